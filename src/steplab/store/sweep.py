"""Sweep: a list of cells measured together, continued where an interrupt left it."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from steplab.core import Environment, Run, RunSpec, fingerprint
from steplab.core.codec import encode
from steplab.store.atomic import disk_errors, write_file
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
    key = _key(cells, environment)
    folder = store.root / "sweeps"
    for path in sorted(folder.glob(f"*-{key}-*.json"), reverse=True):
        finished = _finished(store, path.stem)
        if len(finished) < len(set(cells)):
            return Sweep(path.stem, finished)
        break
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    sweep_id = f"{stamp}-{key}-{secrets.token_hex(2)}"
    with disk_errors(store.root):
        folder.mkdir(parents=True, exist_ok=True)
        write_file(folder / f"{sweep_id}.json", json.dumps({"cells": cells}, indent=1).encode())
    return Sweep(sweep_id, {})


def _key(cells: Sequence[str], environment: Environment) -> str:
    # A commit in between does not change what was measured; another file of the user's would,
    # and is part of the cells.
    machine = encode(replace(environment, git=""))
    text = json.dumps([list(cells), machine], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _finished(store: Store, sweep_id: str) -> dict[str, Run]:
    runs = (run for _, run in store.all() if isinstance(run, Run) and run.group == sweep_id)
    return {fingerprint(run.spec): run for run in runs}
