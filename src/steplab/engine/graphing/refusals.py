"""Why a call cannot be captured, with the line of the user's code."""

from __future__ import annotations

import torch

from steplab.engine.places import place_of
from steplab.errors import SteplabError, Unsupported

SYNC = "called a synchronizing CUDA operation"  # torch's words in sync debug mode


def waits(error: BaseException) -> bool:
    """Whether torch raised because the host would have waited for the device."""
    return SYNC in str(error)


def refused_sync(error: BaseException) -> Unsupported:
    """Return the refusal of a call in which the host waits for the device."""
    return Unsupported(
        f"No CUDA graph: the host waits for the device at {place_of(error)}.",
        "Keep the value on the device; steplab lint lists all such lines.",
    )


def refused_capture(error: Exception) -> Exception:
    """Return what to raise for an error in a capture: a refusal, or the error itself.

    Ending a broken capture raises once more; the first error is the one that tells.
    """
    first: BaseException = error
    while first.__context__ is not None:
        first = first.__context__
    if isinstance(first, (SteplabError, torch.OutOfMemoryError)):
        return first
    if waits(first):
        return refused_sync(first)
    said = " ".join(str(first).split()).split(". ")[0][:200].rstrip(".")
    return Unsupported(
        f"No CUDA graph: {said} ({place_of(first)}).",
        "steplab lint lists what a graph cannot hold; or leave the graph out.",
    )
