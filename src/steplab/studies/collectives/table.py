"""The table of a study of collectives, from its Runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from steplab.record import Column, Run, Table
from steplab.record.table import Cell
from steplab.studies.collectives.bandwidth import algorithm_gbs, bus_gbs, message_bytes

METHOD = (
    "us per operation: median, p10 and p90 over the runs of the slowest rank's time; "
    "ranks lined up before each, results verified\n"
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


def collectives_table(runs: Sequence[Run]) -> Table:
    """One row per Run; reasons of failed rows and notes of all Runs stand below."""
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
