"""How fast is a step: size x config x batch x mode x recipe, each cell in a worker process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from steplab.core import Environment, Run, RunSpec, fingerprint
from steplab.step.batch_size import BatchSearch, fastest_batch
from steplab.store import Store, open_sweep
from steplab.workers.client import TrialRunner


def sweep(
    specs: Sequence[RunSpec],
    store: Store,
    isolation: TrialRunner,
    environment: Environment,
    command: Sequence[str],
    fresh_workers: bool,
    progress: Callable[[RunSpec, str], None],
    say: Callable[[str], None],
) -> Iterator[Run]:
    """Yield a Run for every spec, in order; each is in the store before it is yielded.

    Cells that an interrupted sweep of the same specs has finished are read, not measured again,
    which is said. `fresh_workers` gives every cell a process of its own; so does a cell without
    warm-up, whose first step must be a true one.
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
        alone = fresh_workers or spec.warmup == 0
        key = cell if alone else f"{spec.workload}/{spec.size}"
        run = isolation.trial(spec, environment, key, lambda text, s=spec: progress(s, text))  # type: ignore[misc]
        run = replace(run, group=current.id, command=tuple(command))
        store.save(run)
        yield run


def search_batches(
    spec: RunSpec,
    store: Store,
    isolation: TrialRunner,
    environment: Environment,
    command: Sequence[str],
    progress: Callable[[RunSpec, str], None],
    done: Callable[[Run], None],
) -> BatchSearch:
    """Find the fastest batch for `spec`, from one sequence up; every Run is in the store."""

    def measure(batch: int) -> Run:
        cell = replace(spec, batch=batch)
        key = f"{cell.workload}/{cell.size}"
        run = isolation.trial(cell, environment, key, lambda text: progress(cell, text))
        run = replace(run, command=tuple(command))
        store.save(run)
        done(run)
        return run

    return fastest_batch(measure)
