"""Sweep: a list of cells measured together, continued where an interrupt left it."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from steplab.core import Environment, Run, RunSpec, fingerprint
from steplab.core.atomic import disk_errors, write_file
from steplab.core.codec import JSON, encode
from steplab.store.store import Store


@dataclass(frozen=True)
class Sweep:
    """A sweep's id and the Runs of it that are already in the store, by spec fingerprint."""

    id: str
    finished: dict[str, Run]

    @property
    def begun(self) -> str:
        """When it began, UTC: the first part of its id."""
        day, time = self.id.split("-")[:2]
        return f"{day[:4]}-{day[4:6]}-{day[6:]} {time[:2]}:{time[2:4]} UTC"


def open_sweep(store: Store, specs: Sequence[RunSpec], environment: Environment) -> Sweep:
    """Continue the newest unfinished sweep of exactly these cells on this machine, or begin one.

    A finished sweep is never reused: asking again measures again.
    """
    cells = [fingerprint(spec) for spec in specs]
    key = machine_key(environment, cells)
    folder = store.root / "sweeps"
    for path in sorted(folder.glob(f"*-{key}-*.json"), reverse=True):
        finished = _finished(store, path.stem)
        if len(finished) < len(set(cells)):
            return Sweep(path.stem, finished)
        break
    sweep_id = dated_id(key)
    with disk_errors(store.root):
        folder.mkdir(parents=True, exist_ok=True)
        write_file(folder / f"{sweep_id}.json", json.dumps({"cells": cells}, indent=1).encode())
    return Sweep(sweep_id, {})


def machine_key(environment: Environment, work: JSON, *more: JSON) -> str:
    """Return 12 hex digits by which the same work on the same machine is found again.

    A commit in between does not change what is measured. Another file of the user's does, and is
    in the spec; another version of steplab is in the environment.
    """
    machine = encode(replace(environment, git=""))
    text = json.dumps([work, machine, *more], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def dated_id(key: str) -> str:
    """Return an id that sorts by time, holds `key` and does not collide."""
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    return f"{stamp}-{key}-{secrets.token_hex(2)}"


def _finished(store: Store, sweep_id: str) -> dict[str, Run]:
    runs = (run for _, run in store.all() if isinstance(run, Run) and run.group == sweep_id)
    return {fingerprint(run.spec): run for run in runs}
