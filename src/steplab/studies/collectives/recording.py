"""The Outcome of a cell becomes a Run, with the times of all ranks kept beside the slowest's."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from steplab.record import Clock, Column, Environment, Run, Samples, Table, new_run_id
from steplab.record.run import now
from steplab.spec import RunSpec
from steplab.studies.collectives.bandwidth import algorithm_gbs, bus_gbs, message_bytes, slowest
from steplab.studies.collectives.job import Outcome


def to_run(spec: RunSpec, outcome: Outcome, environment: Environment) -> Run:
    """Return the Run of one cell; `clock.step` has one value per run, that of the slowest rank."""
    run = Run(
        new_run_id(spec),
        spec,
        environment,
        status=outcome.status,
        reason=outcome.reason,
        created=now(),
    )
    if outcome.status != "ok":
        return run
    step = Samples(slowest(outcome.rank_ms), "ms")
    clock = Clock(
        step=replace(step, marks={str(i): "slow, no cause seen" for i in step.slow_indices()}),
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
            "time holds a wait for it"
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
