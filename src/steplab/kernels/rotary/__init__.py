"""Queries, keys and values from their joint projection, queries and keys rotated by position.

The halves of a head are rotated against each other. Every implementation offers `rotary(qkv_BT3HD,
cos, sin)` and, unless it takes everything, `refuse(qkv_BT3HD, cos)`.
"""

# B batch, T tokens, H heads, D head width
from __future__ import annotations

from torch import Tensor

from steplab.kernels.dispatch import load_all, select

IMPLS = load_all("rotary")
PREFERENCE = ("triton_rotary", "reference")

QKV = tuple[Tensor, Tensor, Tensor]  # (B, H, T, D) each


def choose(impl: str, qkv_BT3HD: Tensor, cos: Tensor) -> str:
    """Return the implementation to run. `auto` takes the one-pass kernel wherever it can run."""
    return select("rotary", IMPLS, PREFERENCE, impl, qkv_BT3HD, cos)


def rotary(impl: str, qkv_BT3HD: Tensor, cos: Tensor, sin: Tensor) -> QKV:
    """Return q, k and v, (B, H, T, D) each, by exactly the implementation named (not `auto`).

    `cos` and `sin` are (T, D / 2), or (B, 1, T, D / 2) where each row has positions of its own, or
    (1, 1, T, D / 2). The rotation is computed in fp32 or better and rounded once. The values are a
    view of the input.
    """
    out: QKV = IMPLS[impl].rotary(qkv_BT3HD, cos, sin)
    return out
