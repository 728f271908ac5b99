"""Measure specs cell by cell; each Run is stored as it comes, so that a sweep can go on later."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol

from steplab.core import Environment, Run, RunSpec, fingerprint
from steplab.core.run import new_run
from steplab.step.batch_size import BatchSearch, fastest_batch
from steplab.store import Store, open_sweep
from steplab.workers.client import Progress


class Trials(Protocol):
    """Measures one cell after another. `TrialRunner` does so in worker processes."""

    def trial(self, spec: RunSpec, environment: Environment, key: str, progress: Progress) -> Run:
        """Return the Run of a cell, however it ended; cells with one `key` may share a worker."""
        ...


def key_of_size(spec: RunSpec) -> str:
    """Return the key of the worker for a cell: one for each size, to save its start.

    A cell without warm-up has one of its own: its first step must be the first of a process.
    """
    return fingerprint(spec) if spec.warmup == 0 else f"{spec.workload}/{spec.size}"


def sweep(
    specs: Sequence[RunSpec],
    store: Store,
    trials: Trials,
    environment: Environment,
    command: Sequence[str],
    progress: Callable[[RunSpec, str], None],
    say: Callable[[str], None],
    worker_key: Callable[[RunSpec], str] = lambda spec: "",
    refused: Mapping[str, str] | None = None,
) -> Iterator[Run]:
    """Yield a Run for every spec, in order; each is in the store before it is yielded.

    Cells that an interrupted sweep of the same specs has finished are read, not measured again;
    `say` is told so. Cells with the same `worker_key` share a worker process. `refused` has the
    reasons, by fingerprint, why cells of the grid cannot be measured; they are Runs all the same.
    """
    store.check_writable()
    current = open_sweep(store, specs, environment)
    if current.finished:
        say(f"{len(current.finished)} cells are taken from the sweep begun {current.begun}")
    for spec in specs:
        cell = fingerprint(spec)
        if cell in current.finished:
            yield current.finished[cell]
            continue
        if refused and cell in refused:
            empty = new_run(spec, environment)
            run = replace(empty, status="unsupported", reason=refused[cell])
        else:
            run = trials.trial(spec, environment, worker_key(spec), partial(progress, spec))
        run = replace(run, group=current.id, command=tuple(command))
        store.save(run)
        yield run


def search_batches(
    spec: RunSpec,
    store: Store,
    trials: Trials,
    environment: Environment,
    command: Sequence[str],
    progress: Callable[[RunSpec, str], None],
    done: Callable[[Run], None],
) -> BatchSearch:
    """Find the fastest batch for `spec`, from one sequence up; every Run is in the store."""

    def measure(batch: int) -> Run:
        cell = replace(spec, batch=batch)
        key = f"{cell.workload}/{cell.size}"
        run = trials.trial(cell, environment, key, partial(progress, cell))
        run = replace(run, command=tuple(command))
        store.save(run)
        done(run)
        return run

    return fastest_batch(measure)
