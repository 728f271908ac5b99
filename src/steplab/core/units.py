"""Numbers and module paths as text, with every unit beside its number."""

from __future__ import annotations

import math
import re

UNKNOWN = "unknown"


def milliseconds(ms: float | None) -> str:
    """Format a duration given in milliseconds with four significant digits."""
    if ms is None or math.isnan(ms):
        return UNKNOWN
    for size, unit in ((6e4, "min"), (1e3, "s"), (1.0, "ms")):
        if abs(ms) >= size:
            return f"{_significant(ms / size)} {unit}"
    return f"{_significant(ms * 1e3)} us"


def bytes_(count: float | None) -> str:
    """Format a number of bytes in binary units (GiB = 2**30 bytes)."""
    if count is None:
        return UNKNOWN
    for size, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if abs(count) >= size:
            return f"{_significant(count / size, 3)} {unit}"
    return f"{count:.0f} B"


def read_bytes_count(word: str) -> int:
    """Read a number of bytes with its unit, as in 8GiB, 500MB, 1.5e9; a ValueError otherwise."""
    found = re.fullmatch(r"\s*([0-9.]+(?:e[0-9]+)?)\s*(?:([kmgt])(i?))?b?\s*", word.lower())
    if found is None:
        raise ValueError(f"{word!r} is not a number of bytes")
    number, prefix, binary = found.groups()
    size = (2**10 if binary else 10**3) ** ("kmgt".index(prefix) + 1) if prefix else 1
    value = float(number) * size
    if not 1 <= value < 2**63:
        raise ValueError(f"{word!r} is not a possible number of bytes")
    return int(value)


def count(number: float | None) -> str:
    """Format a plain count with thousands separators."""
    return UNKNOWN if number is None else f"{number:,.0f}"


def counted(number: int, noun: str) -> str:
    """Format a number of things with a noun whose plural ends in s: 1 Run, 2 Runs."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def flops(number: float | None) -> str:
    """Format a number of floating-point operations."""
    if number is None:
        return UNKNOWN
    for size, unit in ((1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP")):
        if abs(number) >= size:
            return f"{_significant(number / size)} {unit}"
    return f"{number:.0f} FLOP"


def percent(fraction: float | None) -> str:
    """Format a fraction (0.374) as a percentage (37.4 %)."""
    return UNKNOWN if fraction is None or math.isnan(fraction) else f"{fraction * 100:.1f} %"


def ratio(value: float | None) -> str:
    """Format a speed ratio, as in 1.49x."""
    return UNKNOWN if value is None or math.isnan(value) else f"{value:.2f}x"


def _significant(value: float, digits: int = 4) -> str:
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:.{decimals}f}"


def fold_layer_numbers(module: str) -> str:
    """Return `blocks.*.attention` for `blocks.3.attention`, and `Linear_*` for `Linear_0`."""
    return re.sub(r"(?<![A-Za-z0-9])\d+(?=\.|$)", "*", module)
