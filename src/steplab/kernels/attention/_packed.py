"""Attention over one tensor that holds queries, keys and values, with one gradient of it.

A projection often computes all three at once. Autograd then joins dq, dk and dv into its gradient,
a pass over memory of its own: 34 us a layer of nanoGPT's step on an H200, beside 325 of attention.
Here the kernels of `triton_flash` write them where they belong.
"""

# B batch, H query heads, G key heads, T queries and keys, D head width
from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from steplab.core.errors import Unsupported
from steplab.kernels.attention import triton_flash
from steplab.kernels.attention._flash_op import empty_lse

# Of (B, H, T, D) in a contiguous tensor: four sizes, four strides and the offset.
Place = tuple[int, ...]
NO_DOCUMENTS = (None, None)


def place_in(packed: Tensor, view: Tensor) -> Place:
    """Return where a view of `packed` lies."""
    return (*view.shape, *view.stride(), view.storage_offset() - packed.storage_offset())


@lru_cache(maxsize=64)  # a model has one layout, and as many layers as it likes
def cover_once(elements: int, places: tuple[Place, ...]) -> bool:
    """Whether every element of a contiguous tensor belongs to exactly one of these places."""
    batch = {(place[0], place[4] if place[0] > 1 else elements) for place in places}
    if not elements or len(batch) != 1:
        return False
    B, step = batch.pop()
    if B * step == elements:  # one sequence after another, all alike: one of them tells
        elements, places = step, tuple((1, *place[1:]) for place in places)
    if sum(math.prod(place[:4]) for place in places) != elements:
        return False
    # As many as there are: if each is met at all, each is met once.
    met = np.zeros(elements, dtype=bool)
    for place in places:
        sizes, strides, offset = place[:4], place[4:8], place[8]
        last = offset + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
        if min(*sizes, *strides, offset) < 0 or last >= elements:
            return False
        np.lib.stride_tricks.as_strided(met[offset:], sizes, strides)[...] = True
    return bool(met.all())


def packed_attention(packed: Tensor, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """Return attention of three views of `packed`, (B, H, T, D), which lies as (B, T, H, D).

    Every element of `packed`, which is contiguous, must belong to exactly one of them.
    """
    places = tuple(place_in(packed, view) for view in (q, k, v))
    if not packed.is_contiguous() or not cover_once(packed.numel(), places):
        raise Unsupported(
            "Queries, keys and values do not cover the packed tensor exactly once.",
            "Use impl.attention=auto.",
        )
    out_BHTD: Tensor = attend(packed, *places, causal)[0]
    return out_BHTD


def _views(packed: Tensor, places: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor, Tensor]:
    start = packed.storage_offset()
    q, k, v = (packed.as_strided(p[:4], p[4:8], start + p[8]) for p in places)
    return q, k, v


@torch.library.custom_op("steplab::packed_attention", mutates_args=())
def attend(
    packed: Tensor, q: Sequence[int], k: Sequence[int], v: Sequence[int], causal: bool
) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp of the scores in bits; q, k and v are places."""
    views = _views(packed.contiguous(), (q, k, v))  # as it is: places are of contiguous memory
    return triton_flash.launch_forward(*views, causal, *NO_DOCUMENTS)


@attend.register_fake
def _(
    packed: Tensor, q: Sequence[int], k: Sequence[int], v: Sequence[int], causal: bool
) -> tuple[Tensor, Tensor]:
    B, H, T, D = q[:4]
    out_BHTD = packed.new_empty(B, T, H, D).transpose(1, 2)
    return out_BHTD, empty_lse(out_BHTD)


@torch.library.custom_op("steplab::packed_attention_backward", mutates_args=())
def attend_backward(
    d_out: Tensor,
    packed: Tensor,
    q: Sequence[int],
    k: Sequence[int],
    v: Sequence[int],
    out: Tensor,
    lse: Tensor,
    causal: bool,
) -> Tensor:
    """Return the gradient of `packed`, into which the kernels write dq, dk and dv."""
    places, d_packed = (q, k, v), packed.new_empty(packed.shape)
    triton_flash.launch_backward(
        d_out,
        *_views(packed.contiguous(), places),
        out,
        lse,
        causal,
        *NO_DOCUMENTS,
        into=_views(d_packed, places),
    )
    return d_packed


@attend_backward.register_fake
def _(d_out: Tensor, packed: Tensor, *rest: Any) -> Tensor:
    return packed.new_empty(packed.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    packed, *ctx.places, ctx.causal = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)  # no zeros in the size of what is kept
    ctx.save_for_backward(packed, *output)


def _differentiate(ctx: Any, d_out: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if d_out is None:
        return (None,) * 5
    packed, out, lse = ctx.saved_tensors
    d_packed = attend_backward(d_out, packed, *ctx.places, out, lse, ctx.causal)
    return d_packed, None, None, None, None


attend.register_autograd(_differentiate, setup_context=_keep)
