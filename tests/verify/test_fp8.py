"""fp8 before the gate: honest products are green, wrong ones red at the level that sees them."""

import pytest
import torch

from steplab.kernels.e4m3 import E4M3_MAX, quantize
from steplab.modules import fp8
from steplab.modules.fp8 import PAYS, plan_linears
from steplab.step.assemble import assemble, micro_batches
from steplab.techniques.technique import StepParts
from steplab.verify.candidate import Candidate
from steplab.verify.fp8_layers import check_fp8_products, check_fp8_range
from steplab.verify.references import compute_reference, make_references
from steplab.verify.shapes import GateShape, references_of, shapes_to_try
from tests.verify.planted import plant, planted_spec, verdicts


class Product(torch.autograd.Function):
    """e4m3 with a scale for each tensor, in fp32, as torchao's Linears; one place to go wrong."""

    fault = ""
    kept: dict[str, torch.Tensor] = {}  # noqa: RUF012, scales of earlier calls

    @staticmethod
    def forward(ctx, x_MK, w_NK):
        ctx.save_for_backward(x_MK, w_NK)
        x, w = Product.see(x_MK, "x"), Product.see(w_NK, "w")
        if Product.fault == "one wrong row":
            x = x.clone()
            x[len(x) // 2] *= 2
        if Product.fault == "one wrong scale":
            x = x * 2
        return x @ w.T

    @staticmethod
    def backward(ctx, dy_MN):
        x_MK, w_NK = ctx.saved_tensors
        w = Product.see(w_NK, "w'")
        if Product.fault == "wrong scale of the transpose":
            w = w * 2
        dy = Product.see(dy_MN, "dy")
        dw = Product.see(dy_MN, "dy'").T @ Product.see(x_MK, "x'")
        return dy @ w, dw * 1.25 if Product.fault == "wrong dw" else dw

    @staticmethod
    def see(x, name):
        quantized, scale = quantize(x, None)
        if Product.fault == "stale scale":  # of the call before; 1 at first
            scale = Product.kept.pop(name, torch.ones_like(scale))
            Product.kept[name] = quantize(x, None)[1]
            if scale.shape != Product.kept[name].shape:
                scale = torch.ones_like(Product.kept[name])
            return (x / scale).clamp(-E4M3_MAX, E4M3_MAX).to(quantized.dtype).float() * scale
        if Product.fault == "NaN above the largest" and name == "dy":
            quantized = torch.where(quantized.float().abs() > 200, torch.nan, quantized.float())
        if Product.fault == "few digits":
            return torch.round(quantized.float() / 32) * 32 * scale
        return quantized.float() * scale


def to_fp8(parts: StepParts) -> None:
    """Do what precision=fp8 does, by Product in the place of torchao's."""
    parts.matmul_dtype = "fp8"
    parts.forward_context = lambda: torch.autocast("cpu", torch.bfloat16)
    parts.fp8_linears = plan_linears(parts.model, parts.device)
    for name, reason in parts.fp8_linears.items():
        if reason == PAYS:
            linear = parts.model.get_submodule(name)
            linear.forward = lambda x, linear=linear: multiply(x, linear)


def multiply(x, linear):
    x = x.bfloat16()
    with torch.autocast("cpu", enabled=False):
        y = Product.apply(x.flatten(0, -2).float(), linear.weight).bfloat16()
    y = y.reshape(*x.shape[:-1], -1)
    return y if linear.bias is None else y + linear.bias.to(y.dtype)


@pytest.fixture
def faulty(monkeypatch):
    """Return a function that plants the recipe with a fault; "" for none."""
    monkeypatch.setattr(fp8, "gain", lambda *shape: 2.0)  # also where the layers are tiny
    plant(monkeypatch, to_fp8)

    def choose(fault: str) -> None:
        monkeypatch.setattr(Product, "fault", fault)
        monkeypatch.setattr(Product, "kept", {})

    return choose


def test_the_peers_of_fp8_round_to_its_own_format(tiny_spec, faulty):
    """The rounded peer is off by what e4m3 costs, several times as far as bf16's."""
    assert references_of("fp8") == ("fp8-rounded", "fp8-stretched", "bf16-autocast")
    faulty("")
    shape = GateShape("own", "", tiny_spec())
    names = ("fp64", "fp8-rounded", "fp8-stretched", "bf16-rounded")
    truth, narrow, other, wide = (compute_reference(shape, name) for name in names)

    def off(peer):
        found, true = (s.groups["outputs"]["prediction 0"] for s in (peer, truth))
        return float((found - true).norm() / true.norm())

    assert off(narrow) > 3 * off(wide)
    assert off(other) == pytest.approx(off(narrow), rel=0.5)
    found, again = (s.groups["outputs"]["prediction 0"] for s in (narrow, other))
    true = truth.groups["outputs"]["prediction 0"]
    # Errors that have nothing in common are as far from each other as both of them from the truth.
    assert float((found - again).norm() / true.norm()) > off(narrow)


def test_an_honest_recipe_is_green(tiny_spec, faulty):
    faulty("")
    found = verdicts(planted_spec(tiny_spec))
    assert all(passed for passed, _ in found.values()), found


@pytest.mark.parametrize(
    "fault",
    [
        "one wrong scale",
        "wrong scale of the transpose",
        "NaN above the largest",
        "stale scale",
        "wrong dw",
        "few digits",
    ],
)
def test_a_wrong_recipe_is_red(fault, tiny_spec, faulty):
    faulty(fault)
    found = verdicts(planted_spec(tiny_spec))
    assert not all(passed for passed, _ in found.values()), found


@pytest.mark.parametrize(
    ("fault", "product"),
    [
        ("one wrong row", "y"),
        ("one wrong scale", "y"),
        ("wrong scale of the transpose", "dx"),
        ("wrong dw", "dw"),
        ("NaN above the largest", "dx"),
        ("few digits", "y"),
    ],
)
def test_a_wrong_product_is_seen_in_its_layer(fault, product, tiny_spec, faulty):
    """Here the budget is a rounding of bf16, not one of fp8."""
    faulty(fault)
    products = check_fp8_products(assemble(planted_spec(tiny_spec)).parts)
    assert not products.passed and f"worst {product} of blocks." in products.detail


def test_a_candidate_goes_through_all_levels(tiny_spec, faulty, tmp_path):
    faulty("")
    spec = planted_spec(tiny_spec)
    shape = shapes_to_try(spec)[0]
    for dtype in ("fp64", "fp8"):
        assert make_references(shape, dtype, tmp_path) == ""
    opened = Candidate(spec, [shape], tmp_path).open(lambda text: None)
    assert [check.name for check in opened.checks[:2]] == ["fp8 products", "fp8 range"]
    assert all(check.passed for check in opened.checks), opened.checks
    assert len(opened.checks) > 2, opened.run.reason
    faulty("one wrong row")
    stopped = Candidate(spec, [shape], tmp_path).open(lambda text: None)
    assert len(stopped.checks) == 2 and stopped.run.clock is None


def test_a_weight_that_is_not_finite_is_red(tiny_spec, faulty):
    faulty("")
    step = assemble(planted_spec(tiny_spec))
    batch = next(micro_batches(step, planted_spec(tiny_spec)))[0]
    in_range = check_fp8_range(step, batch)
    assert in_range.passed and " 0 not finite, 0 saturated, " in in_range.detail
    layer = step.model.get_submodule("blocks.0.feed_forward.up")
    with torch.no_grad():
        layer.weight[0, 0] = torch.nan
    in_range = check_fp8_range(step, batch)
    assert not in_range.passed and " 0 not finite" not in in_range.detail
