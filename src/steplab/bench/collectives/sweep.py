"""Plan the cells of a collectives benchmark, turn every outcome into a Run, and make the table."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from steplab.bench.collectives import group
from steplab.bench.collectives.job import (
    MAX_WORLD,
    Backend,
    Collective,
    CollectiveOp,
    Dtype,
    Job,
    Outcome,
    algorithm_gbs,
    bus_gbs,
    message_bytes,
    message_elements,
    slowest,
)
from steplab.core import (
    Cell,
    Clock,
    Column,
    Environment,
    Run,
    RunSpec,
    Samples,
    Table,
    fingerprint,
)
from steplab.core.errors import UserError
from steplab.core.run import new_run
from steplab.store import Store, open_sweep

METHOD = (
    "us per operation: median, p10 and p90 over the runs of the slowest rank's time; "
    "ranks are lined up before each run, results are verified\n"
    "algbw = message bytes / median, busbw = algbw x 2(n-1)/n for all-reduce, x (n-1)/n for the "
    "others; 1 GB = 10^9 bytes"
)
COLUMNS = (
    Column("op"),
    Column("backend"),
    Column("world"),
    Column("size", "MiB"),
    Column("median", "us"),
    Column("p10", "us"),
    Column("p90", "us"),
    Column("algbw", "GB/s"),
    Column("busbw", "GB/s"),
    Column("status"),
)


@dataclass(frozen=True)
class Grid:
    """The values of every axis, and what is the same in all cells."""

    ops: tuple[CollectiveOp, ...]
    mibs: tuple[float, ...]
    worlds: tuple[int, ...]
    device: str = "cpu"
    dtype: Dtype = "fp32"
    runs: int = 10
    warmup: int = 2
    timeout_s: float = 600.0  # per world size

    def __post_init__(self) -> None:
        if self.runs < 1 or self.warmup < 0 or not 0 < self.timeout_s < math.inf:
            raise UserError("Collectives need at least 1 run, 0 warm-ups and a positive timeout.")
        for world, mib in itertools.product(self.worlds, self.mibs):
            if not 1 <= world <= MAX_WORLD:
                raise UserError(f"{world} ranks cannot be measured.", f"Use 1 to {MAX_WORLD}.")
            if not 0 < mib < math.inf or message_elements(mib, self.dtype, world) == 0:
                raise UserError(
                    f"A message of {mib:g} MiB has no {self.dtype} element for each of {world} "
                    "ranks.",
                    "Use a larger --mib.",
                )

    @property
    def backend(self) -> Backend:
        """What carries the messages: NCCL on GPUs, gloo on a CPU."""
        return "nccl" if self.device == "cuda" else "gloo"


def plan(grid: Grid) -> list[RunSpec]:
    """Return one spec per cell, world sizes outermost: the ranks of one are started once."""
    same = {"dtype": grid.dtype, "backend": grid.backend, "runs": grid.runs, "warmup": grid.warmup}
    return [
        RunSpec(
            workload="collectives",
            config={"op": op, "world": world, "mib": mib, **same},
            device=grid.device,
            steps=grid.runs,
            warmup=grid.warmup,
        )
        for world, op, mib in itertools.product(grid.worlds, grid.ops, grid.mibs)
    ]


def sweep(
    grid: Grid,
    store: Store,
    environment: Environment,
    command: Sequence[str] = (),
    progress: Callable[[RunSpec, str], None] = lambda spec, text: None,
) -> Iterator[Run]:
    """Yield a Run for every cell of `plan(grid)`, in order; each is stored before it is yielded.

    Cells that an interrupted sweep of the same grid has finished are read, not measured again.
    """
    specs = plan(grid)
    current = open_sweep(store, specs, environment)
    for world, cells in itertools.groupby(specs, key=lambda spec: int(spec.config["world"])):
        waiting = []
        for spec in cells:
            done = current.finished.get(fingerprint(spec))
            if done is None:
                waiting.append(spec)
            else:
                yield done
        if waiting:
            progress(waiting[0], "starting the ranks")
        with contextlib.closing(_outcomes(grid, world, waiting, environment)) as outcomes:
            for spec, outcome in zip(waiting, outcomes, strict=True):
                run = to_run(spec, outcome, environment)
                run = replace(run, group=current.id, command=tuple(command))
                store.save(run)
                yield run


def refusal(backend: Backend, world: int, environment: Environment) -> str:
    """Return why `world` ranks cannot be started here, or "" when they can."""
    gpus = len(environment.accelerators)
    if backend == "nccl" and world > gpus:
        return f"NCCL ranks do not share a GPU, and {world} ranks found {gpus}; use --device cpu"
    return ""


def _outcomes(
    grid: Grid, world: int, specs: Sequence[RunSpec], environment: Environment
) -> Generator[Outcome, None, None]:
    reason = refusal(grid.backend, world, environment)
    if reason:
        yield from [Outcome("unsupported", reason)] * len(specs)
    elif specs:
        cells = tuple(Collective(spec.config["op"], spec.config["mib"]) for spec in specs)
        yield from group.run_job(
            Job(world, grid.backend, grid.dtype, cells, grid.runs, grid.warmup, grid.timeout_s)
        )


def to_run(spec: RunSpec, outcome: Outcome, environment: Environment) -> Run:
    """Return the Run of one cell; `clock.step` has one value per run, that of the slowest rank."""
    run = replace(new_run(spec, environment), status=outcome.status, reason=outcome.reason)
    if outcome.status != "ok":
        return run
    step = Samples(slowest(outcome.rank_ms), "ms").with_slow_marked()
    clock = Clock(
        step=step,
        host=Samples(slowest(outcome.rank_host_ms), "ms"),
        data_wait=Samples((), "ms"),
        phases={},
        host_phases={},
        window_ms=outcome.window_ms,
        source="cuda events" if spec.device == "cuda" else "perf_counter",
    )
    tables = {"bandwidth": _bandwidth(spec.config, step.median), "ranks": _ranks(outcome)}
    return replace(run, clock=clock, tables=tables, notes=tuple(_notes(spec, outcome, environment)))


def _bandwidth(config: Any, ms: float) -> Table:
    op, world = config["op"], config["world"]
    message = message_bytes(config["mib"], config["dtype"], world)
    row = (message, ms * 1e3, algorithm_gbs(message, ms), bus_gbs(op, world, message, ms))
    columns = (
        Column("message", "B"),
        Column("median", "us"),
        Column("algbw", "GB/s"),
        Column("busbw", "GB/s"),
    )
    return Table(f"{op} over {world} ranks", columns, (row,))


def _ranks(outcome: Outcome) -> Table:
    columns = (Column("run"), *(Column(f"rank {r}", "us") for r in range(len(outcome.rank_ms))))
    rows = tuple(
        (index, *(ms * 1e3 for ms in run))
        for index, run in enumerate(zip(*outcome.rank_ms, strict=True))
    )
    return Table("time of every rank", columns, rows)


def _notes(spec: RunSpec, outcome: Outcome, environment: Environment) -> Iterator[str]:
    if outcome.late_runs:
        yield (
            f"{spec.config['op']} of {spec.config['mib']:g} MiB over {spec.config['world']} ranks: "
            f"the host was late in {outcome.late_runs} of {len(outcome.rank_ms[0])} runs, whose "
            "time includes a wait for it"
        )
    if spec.device == "cuda":
        return
    world = spec.config["world"]
    if world > environment.cores:
        yield (
            f"{world} ranks shared {environment.cores} cores: growth with the world size beyond "
            "that is core contention, not the algorithm"
        )
    if spec.config["op"] == "reduce-scatter":
        # Counted on the loopback device: 2(n-1)/n of the message per rank for n = 2 and 4.
        yield (
            "gloo's reduce-scatter sends the bytes of an all-reduce: "
            "the link carried twice its busbw"
        )


def collectives_table(runs: Sequence[Run]) -> Table:
    """Return one row per Run; reasons of failed rows and notes of all Runs stand below."""
    dtype = runs[0].spec.config["dtype"]
    return Table(
        title=f"Collectives, {dtype}",
        columns=COLUMNS,
        rows=tuple(_row(run) for run in runs),
        note="\n".join([_conditions(runs[0]), METHOD, *_remarks(runs)]),
    )


def _row(run: Run) -> tuple[Cell, ...]:
    config = run.spec.config
    op, world, mib = config["op"], config["world"], config["mib"]
    numbers: tuple[float | None, ...] = (None,) * 5
    if run.clock is not None:
        step = run.clock.step
        message = message_bytes(mib, config["dtype"], world)
        numbers = (
            *(ms * 1e3 for ms in (step.median, step.percentile(10), step.percentile(90))),
            algorithm_gbs(message, step.median),
            bus_gbs(op, world, message, step.median),
        )
    return (op, config["backend"], world, mib, *numbers, run.status)


def _conditions(run: Run) -> str:
    environment, device = run.environment, run.spec.device
    if device == "cuda":
        return environment.conditions_on(device)
    # Where the variable is set, torch has read it here as the ranks do; else they have one.
    threads = environment.threads if "OMP_NUM_THREADS" in environment.variables else 1
    ranks = replace(environment, threads=threads)
    return f"{ranks.conditions_on(device)}; {environment.cores} cores, threads are per rank"


def _remarks(runs: Sequence[Run]) -> list[str]:
    remarks = [note for run in runs for note in run.notes]
    remarks += [
        f"{run.spec.config['world']} ranks, {run.status}: {run.reason}"
        for run in runs
        if run.status != "ok"
    ]
    return list(dict.fromkeys(remarks))
