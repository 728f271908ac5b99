"""Measure the cells of a grid one after another; a failed one is a Run with a status."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from steplab.errors import MeasurementError, Unsupported, UserError
from steplab.record import Clock, Column, Environment, Run, Samples, Status, Table, new_run_id
from steplab.record.run import now
from steplab.spec import RunSpec, fingerprint
from steplab.store import Store, open_sweep

if TYPE_CHECKING:
    from steplab.studies.infer.measure import Bench, Latencies

CALLS = "calls"  # the table of a Run that keeps every call; its clock has the cached ones


def sweep(
    specs: Sequence[RunSpec], store: Store, environment: Environment, command: Sequence[str] = ()
) -> Iterator[Run]:
    """Yield a Run for every spec, in order; each is stored before it is yielded.

    Cells that an interrupted sweep of the same specs has finished are read, not measured again.
    """
    from steplab.studies.infer.measure import Bench

    current = open_sweep(store, specs, environment)
    bench = Bench()
    for spec in specs:
        run = current.finished.get(fingerprint(spec))
        if run is None:
            run = replace(
                _measured(spec, bench, environment), group=current.id, command=tuple(command)
            )
            store.save(run)
        yield run


def _measured(spec: RunSpec, bench: Bench, environment: Environment) -> Run:
    run = Run(new_run_id(spec), spec, environment, created=now())
    try:
        latencies = bench.latencies(spec)
    except UserError:
        raise
    except Exception as error:
        status, reason = _failure(error)
        return replace(run, status=status, reason=reason)
    cached, none = latencies.cached, Samples((), "ms")
    total = sum(cached.values)
    clock = Clock(cached, cached, none, {}, {}, window_ms=total, source="perf_counter")
    return replace(run, clock=clock, tables={CALLS: _calls(latencies)})


def _calls(latencies: Latencies) -> Table:
    columns = (Column("cached", "ms"), Column("uncached", "ms"))
    rows = tuple(zip(latencies.cached.values, latencies.uncached.values, strict=True))
    return Table("every call, in turns", columns, rows)


def _failure(error: Exception) -> tuple[Status, str]:
    from steplab.engine.trial import is_out_of_memory
    from steplab.studies.infer.measure import free

    reason = " ".join(str(error).split()).split(". ")[0][:200] or type(error).__name__
    if is_out_of_memory(error) or "Out of memory" in reason:
        free()
        return "oom", reason
    if isinstance(error, Unsupported):
        return "unsupported", reason
    if isinstance(error, MeasurementError):
        return "failed", reason
    return "failed", f"{type(error).__name__}: {reason}"
