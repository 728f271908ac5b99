"""Opened: what opening a candidate has shown, on its way from the worker to the parent."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from steplab.record import Run
from steplab.record.ladder import Check


@dataclass(frozen=True)
class Opened:
    """A Run of status ok but without a clock was stopped by its numerics."""

    run: Run
    checks: tuple[Check, ...] = ()  # of the numerics
    waits: tuple[str, ...] = ()  # lines in which the host waited for the device
    ops: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # op -> paths of its modules
