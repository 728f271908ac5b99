"""Where torch.compile would cut the model into pieces."""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch._dynamo
from torch import nn

from steplab.engine.lint.hazard import BREAK, Hazard
from steplab.engine.places import innermost_line, place_of

WHY = "torch.compile cuts the model in two here: nothing fuses across, and fullgraph fails"
REMEDY = "take it out of the forward pass, or write it with tensor operations"


def graph_breaks(model: nn.Module, args: Any, kwargs: Any) -> list[Hazard]:
    """Trace one call of the model and return every place at which dynamo ends a graph."""
    log = logging.getLogger("torch._dynamo")
    level = log.level
    log.setLevel(logging.ERROR)  # it warns of some breaks in its own words
    try:
        seen = torch._dynamo.explain(model)(*args, **kwargs)
    except Exception as error:
        return [_hazard(place_of(error), f"cannot be traced: {_first_line(str(error))}")]
    finally:
        log.setLevel(level)
        torch._dynamo.reset()
    found: dict[tuple[str, str], None] = {}
    for reason in seen.break_reasons:
        frames = [(f.filename, f.lineno or 0, f.name) for f in reversed(reason.user_stack)]
        line = innermost_line(frames) or f"{frames[0][0].rsplit('/', 1)[-1]}:{frames[0][1]}"
        found.setdefault((line, _first_line(str(reason.reason))), None)
    return [_hazard(line, reason) for line, reason in found]


def _hazard(line: str, reason: str) -> Hazard:
    return Hazard(BREAK, line, reason, WHY, REMEDY)


def _first_line(text: str) -> str:
    first = next((line.strip() for line in text.splitlines() if line.strip()), "no reason given")
    return "branch by a value" if first.startswith("generic_jump") else first
