"""A config field with its help text, from which the command line makes a flag."""

from __future__ import annotations

from dataclasses import field
from typing import Any


def knob(default: Any, help: str) -> Any:
    """Declare a dataclass field with a default and one sentence of help."""
    return field(default=default, metadata={"help": help})
