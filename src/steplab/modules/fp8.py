"""Linears that multiply in fp8: how their operands are rounded, and which ones gain by it.

The products of a converted layer (forward, input gradient, weight gradient) take e4m3 operands,
each row or column along the sum with a scale of its own, a power of two; results are bf16. Weights
and gradients keep their dtype: nothing in fp8 outlives a step.
"""

# M rows, K inputs, N outputs of a layer
from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from steplab.core.errors import Unsupported
from steplab.hardware.catalog import Card, find_card

E4M3_MAX = 448.0
MULTIPLE = 16  # of K and N, which the units need
LEAST_CAPABILITY = (8, 9)
PAYS = ""  # the reason of a layer that is converted

# Shares of the dense peaks that products of a width of 768 to 3,072 reach on an H200: 714 of 989
# TFLOP/s in bf16, 1,130 to 1,230 of 1,979 in fp8.
BF16_SHARE, FP8_SHARE = 0.72, 0.6
BANDWIDTH_SHARE = 0.85
# Bytes that rounding costs per number of an activation or a gradient: it is read for its largest
# value, read again and written, once along each of the two sums that it takes part in.
CAST_BYTES = 2 * (2 + 2 + 1)
H200 = (989.4, 1978.9, 4800.0)  # TFLOP/s in bf16 and fp8, GB/s: for cards that are not known


def quantize(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return x in e4m3 and its scales: x is about `quantized * scale`, one scale along `dim`.

    A scale is the least power of two with which the largest finite value fits. What is infinite
    takes the largest number of the format; a NaN stays one. Neither spoils its neighbors.
    """
    wide = x if x.dtype == torch.float64 else x.float()
    finite = torch.nan_to_num(wide.abs(), nan=0.0, posinf=0.0)
    # Of nothing (an expert without tokens) there is no largest value.
    largest = finite.amax(dim, keepdim=True) if x.shape[dim] else finite.sum(dim, keepdim=True)
    # largest / 448 = m * 2**e with m in [0.5, 1): 2**e is enough, and half of it where m is 0.5.
    part, exponent = torch.frexp(largest / E4M3_MAX)
    exponent = (exponent - (part == 0.5).int()).clamp(-100, 127)  # -100: a row of zeros
    scale = torch.ldexp(torch.ones_like(largest), exponent)
    # torch before 2.12 turns what does not fit into NaN.
    inside = (wide / scale).clamp(-E4M3_MAX, E4M3_MAX)
    return inside.to(torch.float8_e4m3fn), scale


def rounded_to_e4m3(x: Tensor, dim: int) -> Tensor:
    """Return x as the product sees it: rounded to e4m3 with a scale along `dim`, in its dtype."""
    quantized, scale = quantize(x, dim)
    return (quantized.to(scale.dtype) * scale).to(x.dtype)


class EmulatedProduct(torch.autograd.Function):
    """x @ w.T with its two gradients as fp8 units compute them, but for the rounding of sums.

    Every operand is rounded to e4m3 along the axis over which it is summed, so each is rounded in
    two ways: once for each of the two products that it takes part in.
    """

    @staticmethod
    def forward(ctx: Any, x_MK: Tensor, w_NK: Tensor) -> Tensor:
        """Return the product of the rounded operands, in their dtype."""
        ctx.save_for_backward(x_MK, w_NK)
        return rounded_to_e4m3(x_MK, 1) @ rounded_to_e4m3(w_NK, 1).T

    @staticmethod
    def backward(ctx: Any, dy_MN: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of x and w."""
        x_MK, w_NK = ctx.saved_tensors
        dx_MK = rounded_to_e4m3(dy_MN, 1) @ rounded_to_e4m3(w_NK, 0)
        return dx_MK, rounded_to_e4m3(dy_MN, 0).T @ rounded_to_e4m3(x_MK, 0)


def emulate_linears(model: nn.Module, names: Collection[str]) -> None:
    """Let these Linears multiply by EmulatedProduct, in the dtype of the model."""
    for name in names:
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        linear.forward = functools.partial(_emulated_linear, linear)  # type: ignore[method-assign]


def _emulated_linear(linear: nn.Linear, x: Tensor) -> Tensor:
    x_MK = x.reshape(-1, x.shape[-1]).to(linear.weight.dtype)
    y_MN: Tensor = EmulatedProduct.apply(x_MK, linear.weight)
    y = y_MN.reshape(*x.shape[:-1], -1)
    return (y if linear.bias is None else y + linear.bias).to(x.dtype)


def plan_linears(model: nn.Module, device: torch.device) -> dict[str, str]:
    """Return every Linear of a model by name, with why it stays in bf16; "" for those that gain.

    Layers at the ends of a model (the first and the last one, unless they are part of a repeated
    block) see inputs and make outputs whose errors nothing evens out.
    """
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    ends = {names[0], names[-1]} - set(_in_blocks(model)) if names else set()
    card = find_card(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return {name: _reason_to_stay(model.get_submodule(name), name in ends, card) for name in names}


def _in_blocks(model: nn.Module) -> Iterator[str]:
    """Yield the names of all modules inside a ModuleList."""
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList):
            yield from (f"{name}.{inner}".strip(".") for inner, _ in module.named_modules())


def _reason_to_stay(linear: nn.Module, at_the_end: bool, card: Card | None) -> str:
    if type(linear) is not nn.Linear or nn.utils.parametrize.is_parametrized(linear):
        return "it is no plain nn.Linear"
    if at_the_end:
        return "it is the first or the last layer"
    if linear.in_features % MULTIPLE or linear.out_features % MULTIPLE:
        return f"its {linear.in_features} x {linear.out_features} are no multiples of {MULTIPLE}"
    if gain(linear.in_features, linear.out_features, card) <= 1:
        return f"casting would take longer than {linear.in_features} x {linear.out_features} gain"
    return PAYS


def gain(inputs: int, outputs: int, card: Card | None) -> float:
    """Return the time that fp8 saves in the three products of a layer, over that of its casts.

    Both grow with the rows, so these do not matter; the cast of the weight is left out.
    """
    bf16, fp8, bandwidth = (
        (card.peak("bf16"), card.peak("fp8"), card.bandwidth_gbs) if card else H200
    )
    if not bf16 or not fp8:
        return 0.0
    saved = 1 / (BF16_SHARE * bf16) - 1 / (FP8_SHARE * fp8)  # ps per FLOP
    products = 6 * inputs * outputs * saved * 1e-12
    casts = CAST_BYTES * (inputs + outputs) / (BANDWIDTH_SHARE * bandwidth * 1e9)
    return products / casts


def refuse_device(device: torch.device) -> None:
    """Raise Unsupported where there are no units for fp8 products."""
    needs = "precision=fp8 needs an NVIDIA GPU of compute capability 8.9 or newer"
    if device.type != "cuda":
        raise Unsupported(f"{needs}, not a {device.type.upper()}.", "Use precision=bf16.")
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < LEAST_CAPABILITY:
        raise Unsupported(f"{needs}, and this one has {major}.{minor}.", "Use precision=bf16.")


def convert_linears(model: nn.Module, names: Collection[str], emulate: bool = False) -> None:
    """Let these Linears multiply in fp8, by torchao; parameters and their names stay.

    `emulate`: multiply the rounded operands in fp32, for a device without fp8.
    """
    # Its C++ extensions, which training does not need, are built for one torch: it warns of that.
    logging.getLogger("torchao").setLevel(logging.ERROR)
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
        from torchao.float8.config import Float8GemmConfig
    except ImportError:
        raise Unsupported(
            "precision=fp8 needs torchao, which is not installed.",
            "Install it: pip install 'steplab[fp8]'",
        ) from None
    # Fast sums (14 bits) for the forward and the input's gradient. Not for the weight's: it sums
    # over all tokens, and what is lost grows with the number of terms.
    config = dataclasses.replace(
        Float8LinearConfig.from_recipe_name("rowwise"),
        gemm_config_grad_input=Float8GemmConfig(use_fast_accum=True),
        emulate=emulate,
    )
    convert_to_float8_training(
        model, module_filter_fn=lambda module, name: name in names, config=config
    )
