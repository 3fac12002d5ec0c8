"""The package's own rules, read off its syntax trees: sizes, docstrings, types, imports."""

import ast
import math
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "dist_consolidate"
MODULES = sorted(PACKAGE.rglob("*.py"))
TREES = {path: ast.parse(path.read_text()) for path in MODULES}
Function = ast.FunctionDef | ast.AsyncFunctionDef

MAX_MODULE_LINES, MEDIAN_MODULE_LINES = 500, 250
MAX_FUNCTION_LINES, P90_FUNCTION_LINES = 80, 40

# Modules that stand beside the rooms; every room may use them.
COMMON = {
    "_version",
    "checksums",
    "crc_pieces",
    "dtypes",
    "errors",
    "doing",
    "filesystems",
    "options",
    "units",
}
ROOMS = {
    "checkpoint": {"checkpoint"},
    "plan": {"checkpoint", "plan"},
    "runtime": {"checkpoint", "plan", "runtime"},
    "output": {"checkpoint", "plan", "output"},
}
# Modules that must be importable in milliseconds.
WITHOUT_TORCH = {"__init__", "__main__", "cli", "checkpoint"} | COMMON
# "module:function" that may catch Exception or BaseException without raising it again, and why.
BROAD_EXCEPTS: dict[str, str] = {}


def name_of(path):
    return path.relative_to(PACKAGE).with_suffix("").as_posix()


def room_of(path):
    return name_of(path).split("/")[0]


def functions_of(tree):
    return [node for node in ast.walk(tree) if isinstance(node, Function)]


def num_lines(function):
    """Count a function's lines; what its docstring says of each argument is none of them."""
    first = function.body[0]
    is_text = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
    docstring = first.end_lineno - first.lineno + 1 if is_text else 0
    return function.end_lineno - function.lineno + 1 - docstring


def where(path, node):
    return f"{name_of(path)}.py:{node.lineno} {getattr(node, 'name', None) or ''}".rstrip()


def imported_modules(path, node):
    """Yield the absolute names that one import statement reads."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        parts = [PACKAGE.name, *path.relative_to(PACKAGE).parent.parts]
        base = parts[: len(parts) - node.level + 1] if node.level else []
        source = ".".join([*base, *([node.module] if node.module else [])])
        yield from (f"{source}.{alias.name}" for alias in node.names)


def imports_of(path, nodes):
    return {name for node in nodes for name in imported_modules(path, node)}


def is_package(name, package):
    return name == package or name.startswith(f"{package}.")


def top_level_statements(tree):
    """Yield what runs at import: module and class bodies, but no function and no TYPE_CHECKING."""
    waiting = list(tree.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, Function):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            waiting += node.orelse
            continue
        yield node
        waiting += [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)]


def public_definitions(body):
    """Yield public functions, classes and their public members; no nested function."""
    for node in body:
        if isinstance(node, (*Function.__args__, ast.ClassDef)) and not node.name.startswith("_"):
            yield node
            if isinstance(node, ast.ClassDef):
                yield from public_definitions(node.body)


def unannotated(function, is_method):
    spec = function.args
    arguments = [*spec.posonlyargs, *spec.args]
    is_static = any(ast.unparse(d) == "staticmethod" for d in function.decorator_list)
    if is_method and not is_static:
        arguments = arguments[1:]
    arguments += [*spec.kwonlyargs, *filter(None, (spec.vararg, spec.kwarg))]
    missing = [argument.arg for argument in arguments if argument.annotation is None]
    return missing if function.returns else [*missing, "return"]


def methods_of(tree):
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    return {node for cls in classes for node in cls.body if isinstance(node, Function)}


def handlers_with_owner(tree):
    """Yield every except clause with the innermost function around it."""

    def visit(node, owner):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ExceptHandler):
                yield child, owner
            yield from visit(child, child.name if isinstance(child, Function) else owner)

    yield from visit(tree, "")


def caught(handler):
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return {ast.unparse(kind) for kind in kinds}


def raises_again(handler):
    last = handler.body[-1]
    return isinstance(last, ast.Raise) and (last.exc is None or last.cause is not None)


def test_module_lengths():
    lengths = {name_of(path): len(path.read_text().splitlines()) for path in MODULES}
    assert {name: n for name, n in lengths.items() if n > MAX_MODULE_LINES} == {}
    assert statistics.median(lengths.values()) <= MEDIAN_MODULE_LINES


def test_function_lengths():
    lengths = {
        where(path, function): num_lines(function)
        for path, tree in TREES.items()
        for function in functions_of(tree)
    }
    assert {name: n for name, n in lengths.items() if n > MAX_FUNCTION_LINES} == {}
    ordered = sorted(lengths.values())
    assert ordered[math.ceil(0.9 * len(ordered)) - 1] <= P90_FUNCTION_LINES


def test_public_names_have_docstrings():
    bare = [name_of(path) for path, tree in TREES.items() if not ast.get_docstring(tree)]
    bare += [
        where(path, node)
        for path, tree in TREES.items()
        for node in public_definitions(tree.body)
        if not ast.get_docstring(node)
    ]
    assert bare == []


def test_functions_are_annotated():
    gaps = {
        where(path, function): missing
        for path, tree in TREES.items()
        for function in functions_of(tree)
        if (missing := unannotated(function, function in methods_of(tree)))
    }
    assert gaps == {}


def test_only_the_command_line_prints():
    prints = [
        where(path, node)
        for path, tree in TREES.items()
        if name_of(path) != "cli"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "print"
    ]
    assert prints == []


def test_no_blind_except():
    blind = [
        where(path, handler)
        for path, tree in TREES.items()
        for handler, owner in handlers_with_owner(tree)
        if handler.type is None
        or (
            caught(handler) & {"Exception", "BaseException"}
            and not raises_again(handler)
            and f"{name_of(path)}:{owner}" not in BROAD_EXCEPTS
        )
    ]
    assert blind == []


def test_the_allowed_broad_excepts_exist():
    existing = {
        f"{name_of(path)}:{owner}"
        for path, tree in TREES.items()
        for handler, owner in handlers_with_owner(tree)
        if handler.type is not None and caught(handler) & {"Exception", "BaseException"}
    }
    assert set(BROAD_EXCEPTS) <= existing


def test_nothing_imports_deepspeed():
    importers = [
        name_of(path)
        for path, tree in TREES.items()
        if any(is_package(name, "deepspeed") for name in imports_of(path, ast.walk(tree)))
    ]
    assert importers == []


def test_light_modules_import_no_torch():
    importers = [
        name_of(path)
        for path, tree in TREES.items()
        if room_of(path) in WITHOUT_TORCH
        and any(is_package(name, "torch") for name in imports_of(path, top_level_statements(tree)))
    ]
    assert importers == []


def test_importing_the_command_line_loads_no_torch():
    light = [
        ".".join([PACKAGE.name, *path.relative_to(PACKAGE).with_suffix("").parts])
        for path in MODULES
        if room_of(path) in WITHOUT_TORCH and path.stem not in ("__init__", "__main__")
    ]
    code = "import importlib, sys\n"
    code += "".join(f"importlib.import_module({name!r})\n" for name in light)
    code += "print(*sorted({'torch', 'deepspeed', 'numpy'} & sys.modules.keys()))"
    outcome = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (outcome.returncode, outcome.stdout.strip()) == (0, ""), outcome.stderr


@pytest.mark.parametrize("room", [*ROOMS, "the modules beside them"])
def test_arrows_between_rooms(room):
    allowed = ROOMS.get(room, set()) | COMMON
    members = [
        path
        for path in MODULES
        if room_of(path) == room or (room not in ROOMS and room_of(path) in COMMON)
    ]
    assert members
    against = sorted(
        f"{name_of(path)} imports {name}"
        for path in members
        for name in imports_of(path, ast.walk(TREES[path]))
        if is_package(name, PACKAGE.name)
        and not any(is_package(name, f"{PACKAGE.name}.{other}") for other in allowed)
    )
    assert against == []
