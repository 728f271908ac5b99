"""Layers that multiply in fp8: which ones gain by it, and what their products are by definition.

The products of a converted layer (forward, input gradient, weight gradient) take e4m3 operands,
each row or column along the sum with a scale of its own, a power of two; results are bf16. Weights
and gradients keep their dtype: nothing in fp8 outlives a step. A Linear is converted by torchao;
the networks of a mixture have kernels of their own (`kernels/e4m3_network.py`).
"""

# M rows, K inputs, N outputs of a layer; T tokens, E experts, D width, F inner width
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
from steplab.kernels import experts as experts_op
from steplab.kernels import feed_forward as feed_forward_op
from steplab.kernels.activation.reference import activate
from steplab.kernels.dispatch import AUTO
from steplab.kernels.e4m3 import rounded_to_e4m3
from steplab.modules.experts import FeedForward, RoutedExperts

FP8 = "fp8"  # the implementation of experts and of feed-forward networks
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
    block) see inputs and make outputs whose errors nothing evens out. Those inside a network of
    experts are that network's.
    """
    networks = tuple(f"{name}." for name, _ in _networks(model))
    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not name.startswith(networks)
    ]
    ends = {names[0], names[-1]} - set(_in_blocks(model)) if names else set()
    card = find_card(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return {name: _reason_to_stay(model.get_submodule(name), name in ends, card) for name in names}


def plan_networks(model: nn.Module, device: torch.device) -> dict[str, str]:
    """Return every network of a mixture by name, with why it stays in bf16; "" for the others.

    Its passes over rows are there anyway, so casts cost next to nothing and all gain.
    """
    return {name: _network_stays(module, device) for name, module in _networks(model)}


def _networks(model: nn.Module) -> Iterator[tuple[str, RoutedExperts | FeedForward]]:
    for name, module in model.named_modules():
        if isinstance(module, RoutedExperts | FeedForward):
            yield name, module


def _network_stays(module: RoutedExperts | FeedForward, device: torch.device) -> str:
    if module.impl not in (AUTO, FP8):
        return f"impl.{module.op}={module.impl} was asked for"
    if isinstance(module, RoutedExperts):
        weights = experts_op.ExpertWeights(module.w_in_EFD, module.w_out_EDF, module.activation)
        tokens = torch.empty(MULTIPLE, weights.w_out_EDF.shape[1], dtype=torch.bfloat16)
        reason: str = experts_op.IMPLS[FP8].refuse(tokens.to(device), weights)
    else:
        w_in, w_out = module.w_in.weight, module.w_out.weight
        tokens = torch.empty(MULTIPLE, w_out.shape[0], dtype=torch.bfloat16)
        reason = feed_forward_op.IMPLS[FP8].refuse(tokens.to(device), w_in, w_out)
    return f"fp8 {reason}" if reason else PAYS


def convert_networks(model: nn.Module, names: Collection[str]) -> None:
    """Let these networks multiply in fp8."""
    for name in names:
        model.get_submodule(name).impl = FP8  # type: ignore[assignment]


def emulate_networks(model: nn.Module, names: Collection[str]) -> None:
    """Let these networks multiply by EmulatedProduct, expert by expert, in the model's dtype."""
    for name in names:
        network: Any = model.get_submodule(name)
        emulated = _emulated_experts if isinstance(network, RoutedExperts) else _emulated_network
        network.forward = functools.partial(emulated, network)


def _emulated_experts(
    module: RoutedExperts, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor
) -> tuple[Tensor, Tensor]:
    out_TD = torch.zeros_like(x_TD)
    for e, matrices in enumerate(zip(module.w_in_EFD, module.w_out_EDF, strict=True)):
        token_R, nth_R = (experts_TK == e).nonzero(as_tuple=True)
        weight_R1 = weights_TK[token_R, nth_R][:, None]
        y_RD = _two_products(x_TD[token_R], *matrices, module.activation, weight_R1)
        out_TD = out_TD.index_add(0, token_R, y_RD)
    return out_TD, weights_TK.new_zeros(())


def _emulated_network(
    module: FeedForward, x_TD: Tensor, weights_T1: Tensor | None = None
) -> Tensor:
    matrices = module.w_in.weight, module.w_out.weight
    return _two_products(x_TD, *matrices, module.activation, weights_T1)


def _two_products(
    x_RD: Tensor, w_in_FD: Tensor, w_out_DF: Tensor, activation: str, weight_R1: Tensor | None
) -> Tensor:
    h_RF = activate(EmulatedProduct.apply(x_RD, w_in_FD), activation)
    h_RF = h_RF if weight_R1 is None else h_RF * weight_R1
    y_RD: Tensor = EmulatedProduct.apply(h_RF, w_out_DF)
    return y_RD


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
