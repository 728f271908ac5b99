"""Twenty late ranks planted on two to four CPU ranks: is each found, and how late it is?

    PYTHONPATH=src python benchmarks/stragglers.py [--out FILE ...]

Every rank trains a small model under DDP over gloo. One of them does something more in its steps:
it waits in its data, runs further operators or Python, collects garbage, or is slow in its first
steps only. The truth is what that took by the rank's own clock, the median of the steps in which it
did so. The traces of all ranks are then explained as a folder that somebody else recorded.
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from steplab.cli.command import Parser
from steplab.core import Cell, Column, Table
from steplab.core.errors import SteplabError
from steplab.report.export import check_suffixes, write_table
from steplab.report.terminal import print_table
from steplab.trace.ranks.analysis import RanksAnalysis
from steplab.trace.ranks.folder import analyze_folder

STEPS, WARMUP = 6, 2
WIDTH, ROWS, LAYERS = 128, 32, 4
COLUMNS = (
    Column("ranks"),
    Column("late"),
    Column("planted"),
    Column("took", "ms"),
    Column("rank found"),
    Column("delay found", "ms"),
    Column("error", "%", 3),
    Column("steps found"),
    Column("cause found"),
)


@dataclass(frozen=True)
class Plant:
    """One late rank: `cause` is a key of CAUSES, `ms` about how late."""

    ranks: int
    late: int
    cause: str
    ms: float
    first: int = STEPS  # recorded steps in which it is late


PLANTS = (
    Plant(2, 0, "data", 60),
    Plant(2, 1, "data", 120),
    Plant(2, 0, "kernels", 80),
    Plant(2, 1, "kernels", 150),
    Plant(2, 0, "python", 70),
    Plant(2, 1, "python", 140),
    Plant(2, 0, "garbage", 90),
    Plant(2, 1, "garbage", 130),
    Plant(2, 0, "data", 100, first=3),
    Plant(2, 1, "python", 100, first=2),
    Plant(3, 0, "data", 120),
    Plant(3, 1, "kernels", 150),
    Plant(3, 2, "python", 120),
    Plant(3, 1, "garbage", 150),
    Plant(3, 2, "data", 150, first=3),
    Plant(4, 0, "python", 150),
    Plant(4, 1, "data", 150),
    Plant(4, 2, "kernels", 200),
    Plant(4, 3, "garbage", 200),
    Plant(4, 3, "data", 200, first=4),
)


def fetch_slowly(seconds: float) -> None:
    """Wait as for a file."""
    with record_function("data"):
        time.sleep(seconds)


def compute_more(seconds: float) -> None:
    """Multiply for a while."""
    x_NN = torch.ones(128, 128)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        x_NN = torch.mm(x_NN, x_NN).clamp_(-1, 1)


def run_python(seconds: float) -> None:
    """Count for a while."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        sum(range(1000))


def collect_garbage(seconds: float) -> None:
    """Collect garbage until the time is up."""
    end = time.perf_counter() + seconds
    kept = [[[] for _ in range(1000)] for _ in range(50)]
    while time.perf_counter() < end:
        gc.collect()
    del kept


CAUSES: dict[str, tuple[Callable[[float], None], tuple[str, ...]]] = {
    "data": (fetch_slowly, ("data wait",)),
    "kernels": (compute_more, ("operators",)),
    "python": (run_python, ("host",)),
    "garbage": (collect_garbage, ("host",)),
}


def train(rank: int, plant: Plant, folder: Path) -> None:
    """Train and record on one rank; the late one writes what its delay took."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=(folder / "store").as_uri(), rank=rank, world_size=plant.ranks
    )
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    shared = DistributedDataParallel(model, bucket_cap_mb=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    took: list[float] = []
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=0, warmup=WARMUP, active=STEPS, repeat=1),
        on_trace_ready=lambda done: done.export_chrome_trace(str(folder / f"rank{rank}.json")),
        acc_events=True,
    ) as profiler:
        for step in range(WARMUP + STEPS):
            if rank == plant.late and step < WARMUP + plant.first:
                begin = time.perf_counter()
                CAUSES[plant.cause][0](plant.ms / 1e3)
                if step >= WARMUP:
                    took.append((time.perf_counter() - begin) * 1e3)
            loss = shared(torch.ones(ROWS, WIDTH)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            profiler.step()
    if rank == plant.late:
        (folder / "took").write_text(str(statistics.median(took)), encoding="utf-8")
    dist.destroy_process_group()


def row(plant: Plant, took: float, found: RanksAnalysis) -> tuple[Cell, ...]:
    """Return what was planted beside what was found."""
    late = found.late
    when = "" if plant.first == STEPS else f", {plant.first} of {STEPS} steps"
    told = (plant.ranks, plant.late, f"{plant.cause}{when}", took)
    if late is None:
        return (*told, "none", None, None, "", "")
    return (
        *told,
        late.rank,
        late.delay_ms,
        (late.delay_ms / took - 1) * 100,
        len(late.steps),
        late.cause,
    )


def visit(plants: tuple[Plant, ...]) -> Table:
    """Plant and explain all, one after the other."""
    rows = []
    for plant in plants:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name).resolve()
            mp.spawn(train, (plant, folder), plant.ranks)
            took = float((folder / "took").read_text(encoding="utf-8"))
            rows.append(row(plant, took, analyze_folder(folder)))
        print(*rows[-1], file=sys.stderr, flush=True)
    right = sum(one[1] == one[4] for one in rows)
    near = sum(abs(one[6]) <= 10 for one in rows if isinstance(one[6], float))
    causes = sum(
        cells[8] in CAUSES[plant.cause][1] for cells, plant in zip(rows, plants, strict=True)
    )
    note = (
        f"rank {right} of {len(rows)}, delay within 10 % {near} of {len(rows)}, cause {causes} of "
        f"{len(rows)}; gloo on {os.cpu_count()} cores, torch {torch.__version__}"
    )
    return Table("late ranks", COLUMNS, tuple(rows), note)


def main() -> int:
    """Plant, print the table, write what is asked for; return the exit code."""
    parser = Parser("stragglers.py", "Plant late ranks and look for them in their traces.")
    parser.add_argument("--only", type=int, nargs="*", default=[], help="numbers of plants, from 0")
    parser.add_argument("--out", type=Path, nargs="*", default=[], help="write the table")
    try:
        args = parser.parse(sys.argv[1:])
        check_suffixes(args.out)
        table = visit(tuple(PLANTS[i] for i in args.only) or PLANTS)
        print_table(table)
        for path in args.out:
            write_table(table, path)
    except SteplabError as error:
        print(f"stragglers.py: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
