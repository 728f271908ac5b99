"""Casts: copies from one floating-point dtype into another."""

from __future__ import annotations

from steplab.trace.shapes import Call

FLOATS = ("float", "c10::BFloat16", "c10::Half")


def is_cast(call: Call) -> bool:
    """Whether a call copies from one floating-point dtype into another."""
    if call.name != "aten::copy_":
        return False
    into, source = call.tensor(0), call.tensor(1)
    if into is None or source is None or into.dtype == source.dtype:
        return False
    return into.dtype in FLOATS and source.dtype in FLOATS
