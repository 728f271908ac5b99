"""Paths of modules, as in `blocks.3.attention`."""

from __future__ import annotations

import re


def fold_numbers(module: str) -> str:
    """Return `blocks.*.attention` for `blocks.3.attention`, and `Linear_*` for `Linear_0`."""
    return re.sub(r"(?<![A-Za-z0-9])\d+(?=\.|$)", "*", module)
