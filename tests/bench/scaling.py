"""What a large checkpoint asks of each rank, by simulation: nothing is read or written.

    python -m tests.bench.scaling --model 70B --shards 64 --ranks 8 64
    python -m tests.bench.scaling --model 1T --shards 1024 --ranks 64 1024

The plan is the real one, made from the metadata of a model of that size; so are the shares and the
buckets. Printed, as Markdown: seconds to plan, and for each number of ranks, stage and transport
the buckets, the bytes read and written and the memory of the busiest rank, and how large the reads
are that reach the file system.
"""

from __future__ import annotations

import argparse
import dataclasses
import resource
import statistics
import time
from collections.abc import Iterator, Sequence

from dist_consolidate.checkpoint.fragments import Fragments
from dist_consolidate.checkpoint.reader import read_checkpoint
from dist_consolidate.checkpoint.states import Shapes
from dist_consolidate.options import Options
from dist_consolidate.output.layout import layout_for
from dist_consolidate.plan.buckets import make_phases
from dist_consolidate.plan.direct import FileMap, Share
from dist_consolidate.plan.owners import deal_out
from dist_consolidate.plan.plan import Plan
from dist_consolidate.planning import plan_here
from tests.bench.plan_scale import States

SAMPLED_BUCKETS = 64
DIRECT_BUCKET_BYTES = 8 << 20
GPU_BUCKET_BYTES = 256 << 20


@dataclasses.dataclass(frozen=True)
class Model:
    """A decoder like those that people train: sizes in elements."""

    layers: int
    hidden: int
    inner: int
    key_value: int
    vocabulary: int

    def shapes(self) -> Shapes:
        """Name and shape every tensor."""
        found: Shapes = {"model.embed_tokens.weight": (self.vocabulary, self.hidden)}
        for layer in range(self.layers):
            at = f"model.layers.{layer}."
            found[f"{at}input_layernorm.weight"] = (self.hidden,)
            for name, rows in (("q", self.hidden), ("k", self.key_value), ("v", self.key_value)):
                found[f"{at}self_attn.{name}_proj.weight"] = (rows, self.hidden)
            found[f"{at}self_attn.o_proj.weight"] = (self.hidden, self.hidden)
            found[f"{at}post_attention_layernorm.weight"] = (self.hidden,)
            for name in ("gate", "up"):
                found[f"{at}mlp.{name}_proj.weight"] = (self.inner, self.hidden)
            found[f"{at}mlp.down_proj.weight"] = (self.hidden, self.inner)
        found["model.norm.weight"] = (self.hidden,)
        found["lm_head.weight"] = (self.vocabulary, self.hidden)
        return found


MODELS = {
    "7B": Model(32, 4096, 11008, 4096, 32000),
    "70B": Model(80, 8192, 28672, 1024, 128256),
    "1T": Model(120, 25600, 69632, 25600, 256000),
}


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table; sizes of the busiest rank."""

    transport: str
    ranks: int
    buckets: int
    read_bytes: int
    written_bytes: int
    memory_bytes: int
    bytes_per_read: int


def direct_row(plan: Plan, ranks: int) -> Row:
    """Share the output files out, and look into some of the busiest rank's buckets."""
    layouts = [layout_for("safetensors", file) for file in plan.files]
    maps = [FileMap(x.num_bytes, x.blocks, x.data_offset_bytes) for x in layouts]
    dealt = deal_out([x.num_bytes for x in layouts], ranks)
    busiest = max(dealt, key=lambda owned: sum(o.stop_bytes - o.start_bytes for o in owned))
    share = Share(plan, maps, busiest, DIRECT_BUCKET_BYTES)
    memory_bytes = 4 * share.max_bucket_bytes
    reads = list(read_sizes(plan, share))
    return Row(
        "direct", ranks, share.num_buckets, share.num_read_bytes, share.num_bytes, memory_bytes,
        int(statistics.mean(reads)) if reads else 0,
    )  # fmt: skip


def read_sizes(plan: Plan, share: Share) -> Iterator[int]:
    """Give the length of every contiguous read of evenly spread buckets."""
    fragments = Fragments(plan.groups)
    for index in range(0, share.num_buckets, -(-share.num_buckets // SAMPLED_BUCKETS)):
        extents = sorted(
            (read.extent.file, read.extent.offset_bytes, read.extent.num_bytes)
            for item in share.bucket(index).elements
            for read in fragments.reads(
                plan.tensors[item.tensor].source,
                item.start_numel,
                item.start_numel + item.num_numel,
            )
            if read.extent is not None
        )
        length, end = 0, ("", 0)
        for file, offset, num_bytes in extents:
            if length and (file, offset) != end:
                yield length
                length = 0
            length += num_bytes
            end = (file, offset + num_bytes)
        if length:
            yield length


def exchange_row(plan: Plan, ranks: int) -> Row:
    """Cut the plan into buckets for an all-gather in which rank 0 writes."""
    phases = make_phases(plan, GPU_BUCKET_BYTES, num_ranks=ranks)
    rows = [-(-phase.num_rows // ranks) for phase in phases]
    read = sum(n * p.row_bytes * p.num_buckets for n, p in zip(rows, phases, strict=True))
    table = max(ranks * n * p.row_bytes for n, p in zip(rows, phases, strict=True))
    sizes = [p.row_bytes for p in phases]
    buckets = sum(p.num_buckets for p in phases)
    return Row("allgather", ranks, buckets, read, plan.num_bytes, 3 * table, max(sizes))


def print_table(rows: Sequence[Row]) -> None:
    """Print the rows as Markdown."""
    print("| transport | ranks | buckets | reads, GB | writes, GB | memory, MB | bytes a read |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for row in rows:
        print(
            f"| {row.transport} | {row.ranks} | {row.buckets:,} | {row.read_bytes / 1e9:,.1f} | "
            f"{row.written_bytes / 1e9:,.1f} | {row.memory_bytes / 1e6:,.0f} | "
            f"{row.bytes_per_read:,} |"
        )


def main() -> None:
    """Parse the command line, plan, and print what each rank would have to do."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="70B")
    parser.add_argument("--shards", type=int, default=64)
    parser.add_argument("--stage", type=int, nargs="+", default=[2, 3], choices=(2, 3))
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64])
    options = parser.parse_args()
    for stage in options.stage:
        states = States(stage, options.shards, MODELS[options.model].shapes())
        started = time.monotonic()
        plan = plan_here(read_checkpoint(states.folder(), states.run), Options())
        planned_sec = time.monotonic() - started
        rows = [make(plan, ranks) for ranks in options.ranks for make in (direct_row, exchange_row)]
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
        print(
            f"\n{options.model} on {options.shards} shards, ZeRO-{stage}: {len(plan.tensors):,} "
            f"tensors, {plan.num_bytes / 1e9:,.0f} GB in {len(plan.files)} files; planned in "
            f"{planned_sec:.2f} s, {peak:.0f} MB resident\n"
        )
        print_table(rows)


if __name__ == "__main__":
    main()
