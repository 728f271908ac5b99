"""Do fp8 layers multiply what they rounded? Each against fp64 products of the rounded operands.

Against unrounded fp64, an fp8 product is off by 4 %, which hides a wrong scale in one row or a sum
that loses digits. Against the rounded operands there is only the rounding of the sums.
"""

# M rows, K inputs, N outputs of a layer; of networks T tokens, K chosen experts, D width
from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from steplab.core.ladder import Check
from steplab.kernels import e4m3, e4m3_network
from steplab.kernels import experts as experts_op
from steplab.kernels import feed_forward as feed_forward_op
from steplab.kernels.e4m3 import counting, quantize
from steplab.modules.experts import FeedForward, RoutedExperts
from steplab.modules.fp8 import FP8, PAYS, EmulatedProduct, OwnLayer
from steplab.step.step import Step
from steplab.techniques.technique import StepParts
from steplab.verify.numerics import unit_roundoff

Layer = nn.Linear | OwnLayer
ROWS = 256
SEED = 20_013
# Rows differ in size as those of a model do, and more: by factors of up to some hundred.
ROW_SPREAD = 1.5
# Sums of 14 bits lose about this much of a result per term (0.06 % at 768 terms, 0.24 % at 3,072).
FAST_SUM_LOSS = 8e-7
FACTOR = 4.0  # the worst of a thousand rows, over the typical one
# Of a network as a whole: z rounded to bf16 puts some numbers of h on the other side of a border of
# e4m3, which is 1 to 3 % of the norm of a result. A factor that is missing somewhere is more.
NETWORK_BUDGET = 0.06
CHOSEN = 2


def check_fp8_products(parts: StepParts) -> Check:
    """Return whether the layers of a step that multiply in fp8 multiply what they rounded.

    One layer of each shape is called with operands of this module's own and its own weight.
    """
    layers = dict(_converted(parts))
    one_of_each = {_shapes(layer): name for name, layer in reversed(layers.items())}
    worst, where, wrong, count = 0.0, "", 0, 0
    for name in one_of_each.values():
        for product, excess in product_errors(layers[name], parts).items():
            count += 1
            wrong += excess > 1
            if excess > worst:
                worst, where = excess, f"{product} of {name}"
    detail = f"{count} products against fp64 ones of the rounded operands; "
    detail += f"nearest to its budget {where}: {worst:.2f} of it"
    if wrong:
        detail = f"{wrong} of {count} products differ from fp64 ones of the rounded "
        detail += f"operands; worst {where}: {worst:.1f} times its budget"
    return Check("fp8 products", not wrong, detail, worst)


def _shapes(layer: Layer) -> tuple[object, ...]:
    return type(layer), *(parameter.shape for parameter in layer.parameters())


def product_errors(layer: Layer, parts: StepParts) -> dict[str, float]:
    """Return the largest error of a row over its budget, by product: of a Linear y, dx and dw."""
    if isinstance(layer, nn.Linear):
        return _linear_errors(layer, parts)
    return _network_errors(layer, parts)


def _linear_errors(layer: nn.Linear, parts: StepParts) -> dict[str, float]:
    weight_NK, bias = layer.weight, layer.bias
    outputs, inputs = weight_NK.shape
    device = parts.device
    x_MK, dy_MN = _operand(inputs, 0, device), _operand(outputs, 1, device)
    x_MK.requires_grad_()
    with torch.enable_grad(), parts.forward_context():
        y_MN = layer(x_MK)
    found = (y_MN, *torch.autograd.grad(y_MN, (x_MK, weight_NK), dy_MN.to(y_MN.dtype)))
    exact_x, exact_w = (t.detach().double().requires_grad_() for t in (x_MK, weight_NK))
    exact_y: Tensor = EmulatedProduct.apply(exact_x, exact_w, False)
    grads = torch.autograd.grad(exact_y, (exact_x, exact_w), dy_MN.to(y_MN.dtype).double())
    expected = (exact_y if bias is None else exact_y + bias.double(), *grads)
    terms = (inputs, outputs, 0)  # the gradient of the weight has precise sums
    return {
        name: _row_error(one, true) / (FACTOR * (unit_roundoff("bf16") + FAST_SUM_LOSS * count))
        for name, one, true, count in zip(("y", "dx", "dw"), found, expected, terms, strict=True)
    }


def _network_errors(layer: RoutedExperts | FeedForward, parts: StepParts) -> dict[str, float]:
    """Return the errors of the products that it makes, and of its results and gradients."""
    routed = isinstance(layer, RoutedExperts)
    x_TD, dout_TD = (_operand(_width(layer), number, parts.device) for number in range(2))
    source = torch.Generator().manual_seed(SEED)
    weights = torch.rand(ROWS, CHOSEN if routed else 1, generator=source).to(parts.device)
    # Crowded experts, one with one row, and empty ones.
    experts = layer.w_in_EFD.shape[0] if isinstance(layer, RoutedExperts) else 1
    experts_TK = torch.randint(max(0, experts - 2), experts, (ROWS, CHOSEN), generator=source)
    experts_TK[0, 0] = 0
    inputs = (weights, experts_TK.to(parts.device)) if routed else (weights,)
    leaves = [x_TD.requires_grad_(), weights.requires_grad_(), *layer.parameters()]
    with _recorded_products() as calls, torch.enable_grad(), parts.forward_context():
        out = layer(x_TD, *inputs)
        out_TD = out[0] if routed else out
        found = (out_TD, *torch.autograd.grad(out_TD, leaves, dout_TD.to(out_TD.dtype)))
    exact = [t.detach().double().requires_grad_() for t in leaves]
    exact_TD = _in_fp64(layer, exact, experts_TK.to(parts.device))
    truth = (exact_TD, *torch.autograd.grad(exact_TD, exact, dout_TD.to(out_TD.dtype).double()))
    errors = {}
    for name, one, true in zip(
        ("y", "dx", "dweights", "dw_in", "dw_out"), found, truth, strict=True
    ):
        off = float((one.double() - true).detach().norm() / true.detach().norm())
        errors[name] = (off if math.isfinite(off) else math.inf) / NETWORK_BUDGET
    for number, (product, args, result) in enumerate(calls):
        errors[f"product {number + 1}"] = _product_error(product, args, result)
    return errors


def _width(layer: RoutedExperts | FeedForward) -> int:
    weight = layer.w_out_EDF if isinstance(layer, RoutedExperts) else layer.w_out.weight
    return weight.shape[-2]


def _in_fp64(
    layer: RoutedExperts | FeedForward, leaves: list[Tensor], experts_TK: Tensor
) -> Tensor:
    """Return the output by the definition, whose factors are rounded as the layer's are."""
    x_TD, weights, w_in, w_out = leaves
    if isinstance(layer, FeedForward):
        network = feed_forward_op.IMPLS[FP8].feed_forward
        out_TD: Tensor = network(x_TD, w_in, w_out, layer.activation, weights)
        return out_TD
    tokens = experts_op.RoutedTokens(x_TD, weights, experts_TK)
    bundle = experts_op.ExpertWeights(w_in, w_out, layer.activation)
    out_TD, _ = experts_op.IMPLS[FP8].experts(tokens, bundle, layer.grouped_mm)
    return out_TD


@contextlib.contextmanager
def _recorded_products() -> Iterator[list[tuple[Any, tuple[Any, ...], Tensor]]]:
    """Yield the calls of the networks' products: each with its arguments and its result."""
    calls: list[tuple[Any, tuple[Any, ...], Tensor]] = []

    def recording(product: Any) -> Any:
        def call(*args: Any) -> Tensor:
            result: Tensor = product(*args)
            calls.append((product, args, result))
            return result

        return call

    products = (e4m3.product, e4m3.weight_gradient)
    try:
        for product in products:
            setattr(e4m3_network, product.__name__, recording(product))
        yield calls
    finally:
        for product in products:
            setattr(e4m3_network, product.__name__, product)


def _product_error(product: Any, args: tuple[Any, ...], result: Tensor) -> float:
    """Return the largest error of a row over its budget."""
    *factors, offsets_E, _ = args
    true = product(*factors, offsets_E, torch.float64)
    terms = 0 if product is e4m3.weight_gradient else factors[0].values.shape[-1]
    if product is e4m3.product and offsets_E is not None:  # rows after the last group are nobody's
        result, true = (t[: int(offsets_E[-1])] for t in (result, true))
    error = _row_error(result.flatten(0, -2), true.flatten(0, -2))
    return error / (FACTOR * (unit_roundoff("bf16") + FAST_SUM_LOSS * terms))


def _converted(parts: StepParts) -> Iterator[tuple[str, Layer]]:
    for name, reason in parts.fp8_linears.items():
        if reason == PAYS:
            layer = parts.model.get_submodule(name)
            assert isinstance(layer, Layer)
            yield name, layer


def _operand(width: int, number: int, device: torch.device) -> Tensor:
    """Return rows of very different sizes in bf16, one of them zero."""
    source = torch.Generator().manual_seed(SEED + number)
    size_M1 = (ROW_SPREAD * torch.randn(ROWS, 1, generator=source)).exp()
    size_M1[0] = 0.0
    rows = torch.randn(ROWS, width, generator=source) * size_M1
    return rows.to(device, torch.bfloat16)


def _row_error(found: Tensor, true: Tensor) -> float:
    """Return the largest distance of a row, relative to its norm; infinite where there is a NaN.

    A row of zeros must be zero.
    """
    off, norm = (t.detach().norm(dim=1) for t in (found.double() - true, true))
    relative = off / norm.clamp_min(torch.finfo(torch.float32).tiny)
    return float(torch.nan_to_num(relative, nan=math.inf).max())


def check_fp8_range(step: Step, batch: Any) -> Check:
    """Count what e4m3 could not hold of all that one step rounds; the step has not run yet.

    With scales that are found anew, nothing that is finite can be too large. What torchao's Linears
    round is rounded beside them, by a scale that fits as torchao's own does (the largest is scaled
    to between 224 and 448): there nothing but an infinite number saturates. Flushed to zero is what
    is some 100,000 times smaller than the largest with which it shares its scale; how much of that
    is harmless, the checks of the step as a whole tell.
    """
    eager = torch.compiler.set_stance("force_eager")
    with counting() as counts, _counted_linears(step.parts), eager:
        step.accumulate([batch])
    share = 100 * counts.flushed / max(counts.rounded, 1)
    detail = f"of {counts.rounded:,} numbers that one step rounds {counts.not_finite:,} not finite,"
    detail += f" {counts.saturated:,} saturated, {counts.flushed:,} ({share:.2g} %) flushed to zero"
    return Check("fp8 range", not counts.not_finite and not counts.saturated, detail)


@contextlib.contextmanager
def _counted_linears(parts: StepParts) -> Iterator[None]:
    """Round beside torchao's layers what they round, each with one scale."""

    def count(t: Tensor) -> None:
        quantize(t.detach(), None)

    def forward(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        assert isinstance(layer, nn.Linear)
        count(inputs[0])
        count(layer.weight)
        if output.requires_grad:
            output.register_hook(count)

    with contextlib.ExitStack() as stack:
        for _, layer in _converted(parts):
            if not isinstance(layer, OwnLayer):
                stack.callback(layer.register_forward_hook(forward).remove)
        yield
