"""Rows in groups, one matrix per group: (R, K) x (E, K, N) -> (R, N).

`offsets_E` (int32) holds the end of each group; the last one is R. Three implementations: `aten`
(torch's own op: one kernel, offsets stay on the device), `dense` (all products, for few rows on
CUDA that torch's op cannot take) and `loop` (group by group, for the rest). Each offers `product`,
`weight_gradient` and the `TAGS` of its op.
"""

# R rows, E groups, K inner width, N outer width
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from steplab.kernels.dispatch import load_all, select

Product = Callable[[Tensor, Tensor, Tensor], Tensor]


def make_op(impl: str, product: Product, gradient: Product, tags: tuple[torch.Tag, ...]) -> Product:
    """Return (x_RK, w_EKN, offsets_E) -> (R, N), differentiable, registered under `impl`.

    An op of its own, because Inductor would look into torch's: it asks for bf16 whatever the
    device, and its autotuner writes kernels for torch's op that do not compile (torch 2.11,
    max-autotune, inner width 64).
    """

    @torch.library.custom_op(f"steplab::grouped_mm_{impl}", mutates_args=(), tags=tags)
    def grouped_mm(x_RK: Tensor, w_EKN: Tensor, offsets_E: Tensor) -> Tensor:
        return product(x_RK, w_EKN, offsets_E)

    @grouped_mm.register_fake
    def _(x_RK: Tensor, w_EKN: Tensor, offsets_E: Tensor) -> Tensor:
        return x_RK.new_empty(x_RK.shape[0], w_EKN.shape[-1])

    name = f"steplab::grouped_mm_{impl}_weight_gradient"

    @torch.library.custom_op(name, mutates_args=(), tags=tags)
    def weight_gradient(x_RK: Tensor, dout_RN: Tensor, offsets_E: Tensor) -> Tensor:
        return gradient(x_RK, dout_RN, offsets_E)

    @weight_gradient.register_fake
    def _(x_RK: Tensor, dout_RN: Tensor, offsets_E: Tensor) -> Tensor:
        return x_RK.new_empty(offsets_E.shape[0], x_RK.shape[-1], dout_RN.shape[-1])

    def keep(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    def differentiate(ctx: Any, dout_RN: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x_RK, w_EKN, offsets_E = ctx.saved_tensors
        need_dx, need_dw, _ = ctx.needs_input_grad
        dout_RN = dout_RN.contiguous()  # the gradient of a sum is one expanded number, stride 0
        dx_RK = grouped_mm(dout_RN, w_EKN.transpose(-2, -1), offsets_E) if need_dx else None
        return dx_RK, weight_gradient(x_RK, dout_RN, offsets_E) if need_dw else None, None

    grouped_mm.register_autograd(differentiate, setup_context=keep)
    return grouped_mm


IMPLS = load_all("grouped_mm")
PREFERENCE = ("aten", "dense", "loop")
OPS = {
    name: make_op(name, impl.product, impl.weight_gradient, impl.TAGS)
    for name, impl in IMPLS.items()
}


def choose(impl: str, x_RK: Tensor, w_EKN: Tensor) -> str:
    """Return the implementation to run; `auto` takes torch's op wherever it can run."""
    return select("grouped_mm", IMPLS, PREFERENCE, impl, x_RK, w_EKN)


def grouped_mm(impl: str, x_RK: Tensor, w_EKN: Tensor, offsets_E: Tensor) -> Tensor:
    """Return (R, N) by exactly the implementation named (not `auto`)."""
    # The end of one group, cut from a larger tensor, counts as contiguous, but torch 2.15 looks at
    # its stride, which a plain `to` keeps.
    ends_E = offsets_E.to(torch.int32, memory_format=torch.contiguous_format).contiguous()
    return OPS[impl](x_RK, w_EKN, ends_E)


def product(impl: str, x_RK: Tensor, w_EKN: Tensor, offsets_E: Tensor) -> Tensor:
    """Like `grouped_mm`, but invisible to autograd: for layers that are one op themselves."""
    out_RN: Tensor = IMPLS[impl].product(x_RK, w_EKN, offsets_E)
    return out_RN


def weight_gradient(impl: str, x_RK: Tensor, dout_RN: Tensor, offsets_E: Tensor) -> Tensor:
    """Return (E, K, N), x^T dout of each group; invisible to autograd too."""
    dw_EKN: Tensor = IMPLS[impl].weight_gradient(x_RK, dout_RN, offsets_E)
    return dw_EKN
