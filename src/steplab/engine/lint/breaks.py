"""Where torch.compile would cut the model into pieces."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
import torch._dynamo
from torch import nn
from torch._dynamo.utils import (
    clear_compilation_metrics,
    get_compilation_metrics,
    graph_break_reasons,
)

from steplab.engine.lint.hazard import BREAK, Hazard
from steplab.engine.places import Frame, innermost_line, place_of

WHY = "torch.compile cuts the model in two here: nothing fuses across, and fullgraph fails"
GIVEN_UP = "Unsupported"  # the exception that leaves a function uncompiled
REMEDY = "take it out of the forward pass, or write it with tensor operations"


def graph_breaks(model: nn.Module, args: Any, kwargs: Any) -> list[Hazard]:
    """Trace one call of the model and return every place at which dynamo ends a graph.

    Breaks with nothing to compute between them count too: they show as soon as the others go.
    """
    log = logging.getLogger("torch._dynamo")
    level = log.level
    log.setLevel(logging.ERROR)  # it warns of some breaks in its own words
    torch._dynamo.reset()
    clear_compilation_metrics()
    try:
        torch.compile(model, backend="eager")(*args, **kwargs)
        return list(dict.fromkeys(_cuts()))
    except Exception as error:
        return [_hazard(place_of(error), f"cannot be traced: {_first_line(str(error))}")]
    finally:
        log.setLevel(level)
        torch._dynamo.reset()


def _cuts() -> Iterator[Hazard]:
    """Yield where a graph was cut, and where a function was left uncompiled instead."""
    for cut in graph_break_reasons:
        stack = [(f.filename, f.lineno or 0, f.name) for f in reversed(cut.user_stack)]
        yield _hazard(_place(stack), _first_line(cut.reason))
    for seen in get_compilation_metrics():
        if seen.fail_type == GIVEN_UP:
            path, line = seen.fail_user_frame_filename, seen.fail_user_frame_lineno
            stack = [(path or "", line or 0, seen.co_name or "")]
            yield _hazard(_place(stack), _first_line(seen.fail_reason or ""))


def _place(stack: list[Frame]) -> str:
    """Return the innermost line that is the user's; else the innermost, by its file's name."""
    file, line, _ = stack[0]
    return innermost_line(stack) or f"{file.rsplit('/', 1)[-1]}:{line}"


def _hazard(line: str, reason: str) -> Hazard:
    return Hazard(BREAK, line, reason, WHY, REMEDY)


def _first_line(text: str) -> str:
    first = next((line.strip() for line in text.splitlines() if line.strip()), "no reason given")
    return "branch by a value" if first.startswith("generic_jump") else first
