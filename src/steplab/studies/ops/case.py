"""Case: what the study of an op offers for one cell. Imports torch.

The package `steplab.studies.<op>` has a module `case` with `build(spec, device) -> Case`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch._dynamo.utils import counters

from steplab.studies.ops.accuracy import Deviation
from steplab.studies.ops.op import COMPILED
from steplab.studies.ops.subject import Subject

FUSED = "fuse_attention"  # Inductor's counter of patterns that it replaced by a fused attention


class Case(Protocol):
    """An op at one shape, by one implementation."""

    subject: Subject

    def check(self) -> tuple[list[Deviation], str]:
        """Return how far each result is from fp64, and in words what was checked."""
        ...

    def notes(self) -> list[str]:
        """Return what a reader must know of what ran; called after the op has run."""
        ...


def compiled_if_asked(impl: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function`, under torch.compile where the name of the implementation says so."""
    if not impl.startswith(COMPILED):
        return function
    counters["inductor"].pop(FUSED, None)
    return torch.compile(function, fullgraph=True, dynamic=False)


def compiler_notes(impl: str) -> list[str]:
    """Say what torch.compile replaced: a fused attention is no longer the definition."""
    if impl.startswith(COMPILED) and counters["inductor"][FUSED]:
        return ["torch.compile put a fused attention in place of the definition"]
    return []
