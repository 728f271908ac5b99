"""Layers that multiply in fp8: which ones gain by it, and what their products are by definition.

The products of a converted layer (forward, input gradient, weight gradient) take e4m3 operands
with scales that are powers of two; results are bf16. Weights and gradients keep their dtype:
nothing in fp8 outlives a step. A Linear is converted by torchao, with one scale for each tensor:
passes that find one for each row and each column take as long as the products save (gpt xl on an
H200, 16 x 1024 tokens: bf16 382 ms, by rows 376, by tensors 320). The networks of a mixture have
kernels of their own with scales of rows (`kernels/e4m3_network.py`).
"""

# M rows, K inputs, N outputs of a layer; T tokens, E experts, D width, F inner width
from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from steplab.core.errors import Unsupported
from steplab.costs.fp8 import gain
from steplab.hardware.catalog import Card, find_card
from steplab.kernels import experts as experts_op
from steplab.kernels import feed_forward as feed_forward_op
from steplab.kernels.activation.reference import activate
from steplab.kernels.dispatch import AUTO
from steplab.kernels.e4m3 import E4M3, rounded_to_e4m3
from steplab.kernels.e4m3_passes import MULTIPLE
from steplab.modules.experts import FeedForward, RoutedExperts

FP8 = "fp8"  # the implementation of experts and of feed-forward networks
LEAST_CAPABILITY = (8, 9)
PAYS = ""  # the reason of a layer that is converted

# Networks of a mixture, with kernels of their own.
OwnLayer = RoutedExperts | FeedForward


class EmulatedProduct(torch.autograd.Function):
    """x @ w.T with its two gradients as fp8 units compute them, but for the rounding of sums.

    Operands have a scale for each row along the sum, so that each is rounded in two ways, once for
    each of the two products that it takes part in; or, not `by_rows`, one for the tensor. Scales
    are `stretch` times as large as need be.
    """

    @staticmethod
    def forward(
        ctx: Any, x_MK: Tensor, w_NK: Tensor, by_rows: bool = True, stretch: float = 1.0
    ) -> Tensor:
        """Return the product of the rounded operands, in their dtype."""
        ctx.save_for_backward(x_MK, w_NK)
        ctx.by_rows, ctx.stretch = by_rows, stretch
        along = 1 if by_rows else None
        return rounded_to_e4m3(x_MK, along, stretch) @ rounded_to_e4m3(w_NK, along, stretch).T

    @staticmethod
    def backward(ctx: Any, dy_MN: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Return the gradients of x and w."""
        x_MK, w_NK = ctx.saved_tensors
        stretch = ctx.stretch
        rows, columns = (1, 0) if ctx.by_rows else (None, None)
        dx_MK = rounded_to_e4m3(dy_MN, rows, stretch) @ rounded_to_e4m3(w_NK, columns, stretch)
        dy_MN, x_MK = (rounded_to_e4m3(t, columns, stretch) for t in (dy_MN, x_MK))
        return dx_MK, dy_MN.T @ x_MK, None, None


def emulate_layers(model: nn.Module, names: Collection[str], stretch: float = 1.0) -> None:
    """Let these layers multiply by EmulatedProduct, expert by expert, in the model's dtype."""
    for name in names:
        layer: Any = model.get_submodule(name)
        emulated: Callable[..., Any] = _emulated_linear
        if isinstance(layer, RoutedExperts):
            emulated = _emulated_experts
        elif isinstance(layer, FeedForward):
            emulated = _emulated_network
        layer.forward = functools.partial(emulated, layer, stretch)


def _emulated_linear(linear: nn.Linear, stretch: float, x: Tensor) -> Tensor:
    x_MK = x.reshape(-1, x.shape[-1]).to(linear.weight.dtype)
    y_MN: Tensor = EmulatedProduct.apply(x_MK, linear.weight, False, stretch)
    y = y_MN.reshape(*x.shape[:-1], -1)
    return (y if linear.bias is None else y + linear.bias).to(x.dtype)


def plan_layers(model: nn.Module, device: torch.device, tokens: int = 0) -> dict[str, str]:
    """Return every layer that fp8 could take by name, with why it stays in bf16; "" for others.

    These are Linears, networks of a mixture, and stacks of matrices. `tokens` are those of a
    micro-batch; 0: nobody knows.
    """
    linears = plan_linears(model, device, tokens)
    return {**linears, **plan_own_layers(model, device), **plan_stacks(model)}


def main_reason(model: nn.Module, plan: Mapping[str, str]) -> str:
    """Return the reason that keeps the most parameters of a plan in bf16."""
    parameters: Counter[str] = Counter()
    for name, reason in plan.items():
        parameters[reason] += sum(p.numel() for p in model.get_submodule(name).parameters())
    return max(parameters, key=parameters.__getitem__, default="there is none")


def plan_linears(model: nn.Module, device: torch.device, tokens: int = 0) -> dict[str, str]:
    """Return every Linear of a model by name, with why it stays in bf16; "" for those that gain.

    Layers at the ends of a model (the first and the last one, unless they are part of a repeated
    block) see inputs and make outputs whose errors nothing evens out. What is inside a network of a
    mixture is not among them: the network reads its weights and never calls it.
    """
    own = {name for name, _ in _own_layers(model)}
    inside = tuple(f"{name}." for name in own)
    names = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name not in own and not name.startswith(inside)
    ]
    ends = {names[0], names[-1]} - set(_in_blocks(model)) if names else set()
    card = find_card(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return {
        name: _reason_to_stay(model.get_submodule(name), name in ends, tokens, card)
        for name in names
    }


def plan_stacks(model: nn.Module) -> dict[str, str]:
    """Return the modules of a stranger that hold matrices in a stack, all of which stay in bf16.

    So experts for torch._grouped_mm are kept. A function mode around them could put a product in
    fp8 in its place, but Dynamo (torch 2.13) calls that op without asking the mode. Stacks with
    other widths than the units take are something else: taps of a convolution, averages.
    """
    why = "it is a stack of matrices, whose grouped products cannot be replaced in compiled code"
    return {
        name: why
        for name, module in model.named_modules()
        if not isinstance(module, OwnLayer | nn.modules.conv._ConvNd)
        and any(_is_stack(p) for p in module.parameters(recurse=False))
    }


def _is_stack(weight: Tensor) -> bool:
    return weight.ndim == 3 and len(weight) > 1 and not any(n % MULTIPLE for n in weight.shape[1:])


def plan_own_layers(model: nn.Module, device: torch.device) -> dict[str, str]:
    """Return every network of a mixture by name, with why it stays in bf16; "" for the others.

    Its passes over rows are there anyway, so its casts cost next to nothing.
    """
    return {name: _own_layer_stays(module, device) for name, module in _own_layers(model)}


def _own_layers(model: nn.Module) -> Iterator[tuple[str, OwnLayer]]:
    for name, module in model.named_modules():
        if isinstance(module, OwnLayer):
            yield name, module


def _own_layer_stays(module: OwnLayer, device: torch.device) -> str:
    if module.impl not in (AUTO, FP8):
        return f"impl.{module.op}={module.impl} was asked for"
    if isinstance(module, RoutedExperts):
        weights = experts_op.ExpertWeights(module.w_in_EFD, module.w_out_EDF, module.activation)
        reason: str = experts_op.IMPLS[FP8].refuse(_tokens(weights.w_out_EDF[0], device), weights)
    else:
        w_in, w_out = module.w_in.weight, module.w_out.weight
        reason = feed_forward_op.IMPLS[FP8].refuse(_tokens(w_out, device), w_in, w_out)
    return f"fp8 {reason}" if reason else PAYS


def _tokens(w_DF: Tensor, device: torch.device) -> Tensor:
    """Return as few tokens as may be, as wide as the network that ends with this matrix."""
    return torch.empty(MULTIPLE, w_DF.shape[0], dtype=torch.bfloat16, device=device)


def convert_layers(model: nn.Module, names: Collection[str]) -> None:
    """Let these layers multiply in fp8."""
    own = {name for name, _ in _own_layers(model)}.intersection(names)
    for name in own:
        model.get_submodule(name).impl = FP8  # type: ignore[assignment]
    linears = [name for name in names if name not in own]
    if linears:
        convert_linears(model, linears)


def _emulated_experts(
    module: RoutedExperts, stretch: float, x_TD: Tensor, weights_TK: Tensor, experts_TK: Tensor
) -> tuple[Tensor, Tensor]:
    out_TD = torch.zeros_like(x_TD)
    for e, matrices in enumerate(zip(module.w_in_EFD, module.w_out_EDF, strict=True)):
        token_R, nth_R = (experts_TK == e).nonzero(as_tuple=True)
        weight_R1 = weights_TK[token_R, nth_R][:, None]
        y_RD = _two_products(x_TD[token_R], *matrices, module.activation, weight_R1, stretch)
        out_TD = out_TD.index_add(0, token_R, y_RD)
    return out_TD, weights_TK.new_zeros(())


def _emulated_network(
    module: FeedForward, stretch: float, x_TD: Tensor, weights_T1: Tensor | None = None
) -> Tensor:
    matrices = module.w_in.weight, module.w_out.weight
    return _two_products(x_TD, *matrices, module.activation, weights_T1, stretch)


def _two_products(
    x_RD: Tensor,
    w_in_FD: Tensor,
    w_out_DF: Tensor,
    activation: str,
    weight_R1: Tensor | None,
    stretch: float,
) -> Tensor:
    h_RF = activate(EmulatedProduct.apply(x_RD, w_in_FD, True, stretch), activation)
    h_RF = h_RF if weight_R1 is None else h_RF * weight_R1
    y_RD: Tensor = EmulatedProduct.apply(h_RF, w_out_DF, True, stretch)
    return y_RD


def _in_blocks(model: nn.Module) -> Iterator[str]:
    """Yield the names of all modules inside a ModuleList."""
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList):
            yield from (f"{name}.{inner}".strip(".") for inner, _ in module.named_modules())


def _reason_to_stay(linear: nn.Module, at_the_end: bool, tokens: int, card: Card | None) -> str:
    if type(linear) is not nn.Linear or nn.utils.parametrize.is_parametrized(linear):
        return "it is no plain nn.Linear"
    if at_the_end:
        return "it is the first or the last layer"
    if linear.in_features % MULTIPLE or linear.out_features % MULTIPLE:
        return f"its {linear.in_features} x {linear.out_features} are no multiples of {MULTIPLE}"
    if gain(linear.in_features, linear.out_features, tokens, card) <= 1:
        at = f" with {tokens:,} tokens" if tokens else ""
        shape = f"{linear.in_features} x {linear.out_features}"
        return f"casting would take longer than {shape} gain{at}"
    return PAYS


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
        from torchao.float8.config import CastConfig, Float8GemmConfig
    except ImportError:
        raise Unsupported(
            "precision=fp8 needs torchao, which is not installed.",
            "Install it: pip install 'steplab[fp8]'",
        ) from None
    # One scale for each tensor is torchao's default; its e5m2 for gradients is not taken: scales
    # are found anew at each call, so a bit of precision is worth more than the longer range. Fast
    # sums (14 bits) for the forward and the input's gradient. Not for the weight's: it sums over
    # all tokens, and what is lost grows with the number of terms. That sum has to be padded where
    # the tokens are no multiple of 16; compilers leave out a padding by nothing.
    config = Float8LinearConfig(
        cast_config_grad_output=CastConfig(target_dtype=E4M3),
        gemm_config_grad_input=Float8GemmConfig(use_fast_accum=True),
        round_scales_to_power_of_2=True,
        pad_inner_dim=True,
        emulate=emulate,
    )
    convert_to_float8_training(
        model, module_filter_fn=lambda module, name: name in names, config=config
    )
