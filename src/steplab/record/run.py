"""Run: what is kept when the device is done, and so what every later command may know."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

from steplab.codec import decode, encode
from steplab.errors import UserError
from steplab.record.clock import Clock
from steplab.record.compilation import Compilation
from steplab.record.counters import Counters
from steplab.record.environment import Environment
from steplab.record.finding import Finding
from steplab.record.memory import Memory
from steplab.record.profile import Profile
from steplab.record.ran import Ran
from steplab.record.table import Table
from steplab.record.work import Figures, Work
from steplab.spec import RunSpec

RECORD_VERSION = 1
Metric = float | tuple[float, ...] | tuple[tuple[float, ...], ...]
Status = Literal["ok", "oom", "unsupported", "timeout", "crashed", "failed"]


@dataclass(frozen=True)
class Run:
    """One measurement: what was asked, where, what was seen, and how it ended."""

    id: str
    spec: RunSpec
    environment: Environment
    status: Status = "ok"
    reason: str = ""  # why the status is not ok, in one sentence
    created: str = ""  # UTC, ISO 8601
    command: tuple[str, ...] = ()
    group: str = ""  # the sweep this Run is a cell of
    clock: Clock | None = None
    memory: Memory | None = None
    work: Work | None = None
    figures: Figures | None = None
    compilation: Compilation | None = None
    ran: Ran | None = None
    counters: Counters | None = None
    profile: Profile | None = None
    parameters: int | None = None
    losses: tuple[float, ...] = ()  # one per measured step
    # What the workload says of one step beside its loss: numbers, vectors and matrices by name.
    # Two names are understood: `load_LE` has the share of the assignments that each expert of a
    # layer got, `dropped` the share of them that no expert took.
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # what a reader of the numbers must know
    findings: tuple[Finding, ...] = ()
    tables: Mapping[str, Table] = field(default_factory=dict)
    artifacts: tuple[str, ...] = ()  # file names beside run.json

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens of one step over its median time."""
        if self.clock is None or self.work is None or not self.clock.step.values:
            return None
        return self.work.tokens / self.clock.step.median * 1e3


def new_run_id(spec: RunSpec) -> str:
    """Return an id that sorts by time (microseconds), can be read, and does not collide."""
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S-%f")
    name = spec.workload.rsplit("/", 1)[-1].replace(":", "-").replace(".py", "")
    safe = "".join(c for c in f"{name}-{spec.size}".strip("-") if c.isalnum() or c in "-_")[:40]
    return f"{stamp}-{safe}-{secrets.token_hex(3)}"


def now() -> str:
    """Return the present moment in UTC, ISO 8601, whole seconds."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def run_to_json(run: Run) -> str:
    """Write a Run as JSON text with its record version in front."""
    document = {"steplab_record": RECORD_VERSION, "run": encode(run)}
    return json.dumps(document, indent=1, allow_nan=False)


def run_from_json(text: str, where: str = "run.json") -> Run:
    """Read a Run; a foreign, damaged or newer document is a UserError that says so."""
    try:
        document: Any = json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"{where} is not JSON ({error.msg}, line {error.lineno}).") from None
    version = document.get("steplab_record") if isinstance(document, dict) else None
    if not isinstance(version, int):
        raise UserError(f"{where} is not a steplab Run.")
    if version > RECORD_VERSION:
        raise UserError(
            f"{where} has record version {version}; this steplab reads up to {RECORD_VERSION}.",
            "Upgrade steplab to read it.",
        )
    run: Run = decode(Run, document.get("run"), where)
    return run
