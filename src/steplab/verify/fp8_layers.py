"""Do fp8 layers multiply what they rounded? Each against fp64 products of the rounded operands.

Against unrounded fp64, an fp8 product is off by 4 %, which hides a wrong scale in one row or a sum
that loses digits. Against the rounded operands there is only the rounding of the sums.
"""

# M rows, K inputs, N outputs of a layer
from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from steplab.core.ladder import Check
from steplab.modules.fp8 import E4M3_MAX, PAYS, EmulatedProduct, quantize
from steplab.techniques.technique import StepParts
from steplab.verify.numerics import unit_roundoff

ROWS = 256
SEED = 20_013
# Rows differ in size as those of a model do, and more: by factors of up to some hundred.
ROW_SPREAD = 1.5
# Sums of 14 bits lose about this much of a result per term (0.06 % at 768 terms, 0.24 % at 3,072).
FAST_SUM_LOSS = 8e-7
FACTOR = 4.0  # the worst of a thousand rows, over the typical one


def check_fp8_layers(parts: StepParts) -> tuple[Check, Check]:
    """Return whether the layers of a step that multiply in fp8 are right, and what they round off.

    One layer of each shape is called with operands of this module's own and its own weight.
    """
    layers = dict(_converted(parts))
    one_of_each = {layer.weight.shape: name for name, layer in reversed(layers.items())}
    worst, where, wrong = 0.0, "", 0
    for name in one_of_each.values():
        for product, excess in product_errors(layers[name], parts).items():
            wrong += excess > 1
            if excess > worst:
                worst, where = excess, f"{product} of {name}"
    detail = f"{3 * len(one_of_each)} products against fp64 ones of the rounded operands; "
    detail += f"nearest to its budget {where}: {worst:.2f} of it"
    if wrong:
        detail = f"{wrong} of {3 * len(one_of_each)} products differ from fp64 ones of the rounded "
        detail += f"operands; worst {where}: {worst:.1f} times its budget"
    return Check("fp8 products", not wrong, detail, worst), _check_range(layers)


def product_errors(layer: nn.Linear, parts: StepParts) -> dict[str, float]:
    """Return the largest error of a row over its budget: of y, of dx and of dw."""
    weight_NK, bias = layer.weight, layer.bias
    outputs, inputs = weight_NK.shape
    device = parts.device
    x_MK, dy_MN = _operand(inputs, 0, device), _operand(outputs, 1, device)
    x_MK.requires_grad_()
    with torch.enable_grad(), parts.forward_context():
        y_MN = layer(x_MK)
    found = (y_MN, *torch.autograd.grad(y_MN, (x_MK, weight_NK), dy_MN.to(y_MN.dtype)))
    exact_x, exact_w = (t.detach().double().requires_grad_() for t in (x_MK, weight_NK))
    exact_y: Tensor = EmulatedProduct.apply(exact_x, exact_w)
    grads = torch.autograd.grad(exact_y, (exact_x, exact_w), dy_MN.to(y_MN.dtype).double())
    expected = (exact_y if bias is None else exact_y + bias.double(), *grads)
    terms = (inputs, outputs, 0)  # the gradient of the weight has precise sums
    return {
        name: _row_error(one, true) / (FACTOR * (unit_roundoff("bf16") + FAST_SUM_LOSS * count))
        for name, one, true, count in zip(("y", "dx", "dw"), found, expected, terms, strict=True)
    }


def _converted(parts: StepParts) -> Iterator[tuple[str, nn.Linear]]:
    for name, reason in parts.fp8_linears.items():
        if reason == PAYS:
            layer = parts.model.get_submodule(name)
            assert isinstance(layer, nn.Linear)
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


def _check_range(layers: Mapping[str, nn.Linear]) -> Check:
    """Count what e4m3 cannot hold of the weights; a weight that is not finite is wrong."""
    counts = {"not finite": 0, "saturated": 0, "flushed to zero": 0}
    total = 0
    for layer in layers.values():
        weight_NK = layer.weight.detach()
        for kind, count in range_counts(weight_NK, 1).items():
            counts[kind] += count
        total += weight_NK.numel()
    words = ", ".join(f"{count:,} {kind}" for kind, count in counts.items())
    return Check("fp8 range", counts["not finite"] == 0, f"of {total:,} weights {words}")


def range_counts(x: Tensor, dim: int) -> dict[str, int]:
    """Count the numbers that e4m3 with scales along `dim` cannot hold, by what becomes of them."""
    quantized, _ = quantize(x, dim)
    seen = quantized.float()
    return {
        "not finite": int((~torch.isfinite(x)).sum()),
        "saturated": int(((seen.abs() == E4M3_MAX) & torch.isinf(x)).sum()),
        "flushed to zero": int(((seen == 0) & (x != 0)).sum()),
    }
