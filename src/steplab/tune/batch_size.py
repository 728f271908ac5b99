"""`--batch auto`: the batch with the most tokens per second under the baseline's recipe. No torch.

The choice is kept beside the ladders until the ladder is finished, so that an interrupted search
goes on with the same step.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from steplab.core import Environment, Run, RunSpec
from steplab.core.atomic import disk_errors, write_file
from steplab.core.codec import decode, encode
from steplab.core.errors import MeasurementError
from steplab.core.input_file import parse_json, read_input
from steplab.step.batch_size import fastest_batch
from steplab.store import Store, machine_key
from steplab.tune.progress import View
from steplab.workers.pool import WorkerPool
from steplab.workers.trials import TrialRunner

# Beside a candidate's peak there must be room for the weights of the two recipes that wait.
MAX_MEMORY = 0.6


def find_batch(
    spec: RunSpec,
    store: Store,
    environment: Environment,
    pool: WorkerPool,
    timeout: float,
    view: View,
) -> int:
    """Return the batch to tune `spec` at: the one noted, or the fastest, measured now."""
    note = _note(spec, store, environment)
    if note.exists():
        batch: int = decode(int, parse_json(read_input(note), note), str(note))
        return batch
    with TrialRunner(timeout, worker=pool.take()) as trials:

        def measure(batch: int) -> Run:
            view.stage(f"measuring batch {batch}")
            run = trials.trial(replace(spec, batch=batch), environment)
            store.save(run)
            return with_room(run)

        found = fastest_batch(measure)
    if found.best is None:
        raise MeasurementError(f"No batch could be measured: {found.runs[0].reason}.")
    best = found.best.spec.batch
    view.say(f"--batch auto: {best} ({found.reason})")
    with disk_errors(store.root):
        note.parent.mkdir(parents=True, exist_ok=True)
        write_file(note, json.dumps(best).encode())
    return best


def with_room(run: Run) -> Run:
    """Return the Run as one that did not fit where two others would find no room beside it."""
    memory = run.memory
    if memory is None or memory.total is None or memory.peak <= MAX_MEMORY * memory.total:
        return run
    return replace(run, status="oom", reason="no room beside it for the recipes that wait")


def forget_batch(spec: RunSpec, store: Store, environment: Environment) -> None:
    """Let the next search of this step look for its batch anew."""
    _note(spec, store, environment).unlink(missing_ok=True)


def _note(spec: RunSpec, store: Store, environment: Environment) -> Path:
    key = machine_key(environment, encode(replace(spec, batch=1)))
    return store.root / "ladders" / f"batch-{key}.json"
