"""Progress: how far a training has come, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Progress:
    """All of a checkpoint that is not a tensor and that the training loop owns.

    `position` and `spec` are plain JSON data: string keys, lists instead of tuples.
    """

    step: int  # optimizer steps done
    position: Mapping[str, Any]  # where the data continues; only its reader understands it
    spec: Mapping[str, Any]  # what is being trained, and how
    metrics: Mapping[str, float] = field(default_factory=dict)  # the last losses and rates
    steplab: str = ""  # version; this and the two below are filled in when it is saved
    torch: str = ""  # version
    created: str = ""  # UTC, ISO 8601
