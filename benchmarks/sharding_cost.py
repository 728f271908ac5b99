"""What sharding costs by itself: PYTHONPATH=src python benchmarks/sharding_cost.py [--out FILE]

Rank 0 of 8, whose group does nothing (`parallel/silent.py`), against the plain step: the host's
calls, copies and memory of FSDP without any communication. Both stay alive, each in a process of
its own, and take turns; the ratio is that of their step times. About a minute per row of gpt xl on
an H200.
`--size tiny --context 64 --device cpu --batch 2` tries it anywhere.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from steplab.cli.command import Parser
from steplab.compare.bootstrap import ratio_of_rounds
from steplab.core import Clock, Column, RunSpec, Table
from steplab.core.errors import SteplabError
from steplab.core.table import Cell
from steplab.report.export import check_suffixes, write_table
from steplab.report.terminal import print_table
from steplab.techniques.recipes import parse_recipe
from steplab.workers.client import Worker, WorkerLost
from steplab.workloads.workload import find_workload

RANKS = 8
WAYS = (
    "parallel=fsdp",
    "parallel=fsdp,parallel.together=4",
    "parallel=fsdp,parallel.together=4,parallel.reshard=false",
)
# As most people have it, and with as little work for the host as sharding allows.
RECIPES = (
    "precision=bf16,optimizer=fused",
    "precision=bf16-weights,optimizer=one-pass,compile=blocks",
)
ROUNDS, STEPS = 6, 5
TIMEOUT_S = 540.0
COLUMNS = (
    Column("recipe"),
    Column("batch"),
    Column("sharded by"),
    Column("plain", "ms"),
    Column("sharded", "ms"),
    Column("ratio"),
    Column("interval"),
    Column("host plain", "ms"),
    Column("host sharded", "ms"),
    Column("peak plain", "GiB"),
    Column("peak sharded", "GiB"),
    Column("status"),
)


class CostedStep:
    """A step that stays alive in a worker, alone or as rank 0 of several."""

    def __init__(self, spec: RunSpec) -> None:
        from steplab.step.live import LiveStep

        if spec.ranks > 1:
            from steplab.parallel.silent import join_silent

            join_silent(spec.ranks)
        self.live = LiveStep(spec, lambda text: None)

    def measure(self, steps: int) -> Clock:
        """Time further steps."""
        from steplab.probes.clock import ClockProbe
        from steplab.step.loop import measure, warm_up

        warm_up(self.live.subject, 1, lambda text: None)
        clock = ClockProbe()
        measure(self.live.subject, steps, clock, [], lambda text: None)
        return clock.result()

    def peak(self) -> int:
        """Return the bytes at the peak of one more step; 0 where nobody counts them."""
        from steplab.probes.memory import MemoryProbe

        probe = MemoryProbe()
        probe.open_window(self.live.subject)
        self.live.subject.run_step()
        probe.close_window(self.live.subject)
        return probe.found.peak if probe.found else 0


def rows(plain: RunSpec, ways: Sequence[str]) -> Iterator[tuple[Cell, ...]]:
    """Yield a row for every way of sharding the step of `plain`, which stays alive meanwhile."""
    names = (plain.recipe.label, plain.batch)
    with Worker() as one:
        one.keep("sharding_cost:CostedStep", timeout=TIMEOUT_S, spec=plain)
        for way in ways:
            recipe = parse_recipe(f"{plain.recipe.label},{way}")
            try:
                with Worker() as two:
                    sharded = replace(plain, recipe=recipe, ranks=RANKS)
                    two.keep("sharding_cost:CostedStep", timeout=TIMEOUT_S, spec=sharded)
                    yield (*names, way, *compare(one, two), "ok")
            except (SteplabError, WorkerLost) as error:
                yield (*names, way, *[None] * 8, str(error).split(". ")[0])


def compare(plain: Worker, sharded: Worker) -> list[Cell]:
    """Return what the columns between the names and the status say."""
    clocks: tuple[list[Clock], list[Clock]] = ([], [])
    workers = (plain, sharded)
    for number in range(ROUNDS):
        for side in (0, 1) if number % 2 == 0 else (1, 0):
            clock = workers[side].call(".measure", Clock, timeout=TIMEOUT_S, steps=STEPS)
            clocks[side].append(clock)
    peaks = [worker.call(".peak", int, timeout=TIMEOUT_S) / 2**30 for worker in workers]
    steps = [[clock.step.values for clock in found] for found in clocks]
    ratio = ratio_of_rounds(steps[1], steps[0])
    medians = [sorted(value for values in found for value in values) for found in steps]
    hosts = [sorted(value for clock in found for value in clock.host.values) for found in clocks]
    middles = [values[len(values) // 2] for values in (*medians, *hosts)]
    span = f"{ratio.low:.3f} to {ratio.high:.3f}"
    return [*middles[:2], ratio.ratio, span, *middles[2:], *peaks]


def main() -> None:
    """Measure and print; the file is written anew after every row."""
    parser = Parser(prog="sharding_cost.py", description=__doc__)
    parser.add_argument("--size", default="xl", help="size of the gpt")
    parser.add_argument("--context", type=int, default=1024, help="tokens of a sequence")
    parser.add_argument("--batch", type=int, nargs="+", default=[16, 4], help="batch sizes")
    parser.add_argument("--device", default="cuda", help="cuda or cpu")
    parser.add_argument("--recipe", nargs="+", default=list(RECIPES), help="of both")
    parser.add_argument("--way", nargs="+", default=list(WAYS), help="ways of sharding")
    parser.add_argument("--out", type=Path, nargs="+", default=[], help=".md, .csv or .json")
    args = parser.parse_args()
    # Workers find this file.
    paths = [str(Path(__file__).parent.resolve()), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    note = f"rank 0 of {RANKS}, no communication; {ROUNDS} rounds of {STEPS} steps"
    found: list[tuple[Cell, ...]] = []
    try:
        check_suffixes(args.out)
        entry = find_workload("gpt")
        spec = RunSpec(
            "gpt",
            entry.resolve(args.size, {"context": args.context}),
            args.size,
            device=args.device,
            warmup=3,
        )
        with Worker() as worker:
            conditions = worker.environment(TIMEOUT_S).conditions_on(args.device)
        title = f"what sharding costs by itself: gpt {args.size}, context {args.context}"
        for recipe, batch in itertools.product(args.recipe, args.batch):
            for row in rows(replace(spec, recipe=parse_recipe(recipe), batch=batch), args.way):
                found.append(row)
                table = Table(title, COLUMNS, tuple(found), f"{note}\n{conditions}")
                for path in args.out:
                    write_table(table, path)
        print_table(table)
    except SteplabError as error:
        sys.exit(f"sharding_cost.py: {error}")


if __name__ == "__main__":
    main()
