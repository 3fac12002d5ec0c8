"""Which ranks hold the same experts: the configuration says it, the values confirm it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dist_consolidate.checkpoint.expert_values import Comparison, Layout
from dist_consolidate.checkpoint.experts import parse
from dist_consolidate.checkpoint.states import ModelState, OptimState
from dist_consolidate.errors import Problems, listed
from dist_consolidate.units import counted

ORDERS = {
    False: "neighbouring ranks hold different experts (the default)",
    True: "neighbouring ranks hold the same experts (use_data_before_expert_parallelism)",
}


_TRUST = (
    "; if the weights were changed after the last step, and the masters are what you want, pass "
    "--trust-masters"
)
_NO_TRUST = "; this release records no shapes, so that --trust-masters cannot stand in for values"


class Choice:
    """Takes the order that is recorded if the values agree; without a record the values decide.

    Attributes:
        unseen: Tensors that could not be compared, because rank 0 does not see their shards.
        notes: What the user's word was taken for, against the values.
    """

    def __init__(
        self,
        model: ModelState,
        layouts: Sequence[Layout],
        optim: OptimState,
        comparison: Comparison,
        problems: Problems,
    ) -> None:
        """Set up.

        Args:
            model: The model states of rank 0.
            layouts: One for each order that is possible, at least one.
            optim: The optimizer states of rank 0.
            comparison: Compares values.
            problems: Takes what rules every layout out.
        """
        self.layouts, self.comparison, self.problems = layouts, comparison, problems
        self.recorded = optim.experts.data_first
        # Without recorded shapes everything is compared, not only the experts.
        self.is_inferred = model.param_shapes is None and optim.param_shapes is None
        self.names = [n for n in layouts[0].sources if self.is_inferred or parse(n)]
        self.unseen = comparison.unseen(layouts[0], self.names)
        self.notes: list[str] = []

    def layout(self, *, trust_masters: bool = False) -> Layout | None:
        """Choose.

        Args:
            trust_masters: Take masters of other values, where the layout is recorded.

        Returns:
            The layout that is right, or ``None`` if a problem was noted.
        """
        if self.is_inferred and self.unseen:
            self.problems.add(
                f"this release records no shapes, so that values must confirm the layout, but "
                f"rank 0 does not see the shards of {len(self.unseen)} tensors, the first is "
                f"{self.unseen[0]!r}; run it where all shards are seen"
            )
            return None
        wrong = {item.data_first: self._differing(item) for item in self.layouts}
        fits = [item for item in self.layouts if not wrong[item.data_first]]
        known = [item for item in self.layouts if item.data_first == self.recorded]
        known = list(self.layouts) if len(self.layouts) == 1 else known
        if not fits and trust_masters and known and not self.is_inferred:
            differing = wrong[known[0].data_first]
            self.notes.append(
                f"{counted(len(differing), 'tensor has', 'tensors have')} other values in `module` "
                "and the expert files than in the fp32 partitions; these were taken "
                f"(--trust-masters): {listed(differing)}"
            )
            return known[0]
        if self.recorded is None or len(self.layouts) == 1:
            return self._by_value(fits, wrong)
        asked = [item for item in fits if item.data_first == self.recorded]
        if asked:
            return asked[0]
        hint = f"; they fit if {ORDERS[fits[0].data_first]}" if fits else ""
        condition = f"if {ORDERS[self.recorded]}, as the configuration says{hint}"
        self._refuse(wrong[self.recorded], condition)
        return None

    def _by_value(self, fits: Sequence[Layout], wrong: Mapping[bool, list[str]]) -> Layout | None:
        if len(fits) == 1:
            return fits[0]
        if not fits:
            several = len(self.layouts) > 1
            condition = "in any order of the ranks" if several else "by the recorded layout"
            self._refuse(next(iter(wrong.values())), condition)
            return None
        if not self.unseen:
            if self.comparison.same(fits, self.names):
                return fits[0]
            whole = [item for item in fits if not self._differing(item, whole=True)]
            if len(whole) == 1:
                return whole[0]
        self.problems.add(
            "which ranks hold the same experts is not recorded (the run's ds_config was no "
            "dictionary), and their values do not tell it: they are alike, or rank 0 does not see "
            "all shards"
        )
        return None

    def _differing(self, layout: Layout, *, whole: bool = False) -> list[str]:
        names = [name for name in self.names if name in layout.sources]
        return self.comparison.differing(layout, names, whole=whole)

    def _refuse(self, names: Sequence[str], condition: str) -> None:
        module = self.comparison.module
        files = sorted({module[name].span.file for name in names if name in module})
        self.problems.add(
            f"{counted(len(names), 'tensor has', 'tensors have')} other values in `module` and the "
            "expert files than in the "
            f"fp32 partitions (rounded) {condition}: {listed(names)} (in {listed(files)}). A file "
            "was exchanged, or the files are of different saves"
            f"{_NO_TRUST if self.is_inferred else _TRUST}"
        )
