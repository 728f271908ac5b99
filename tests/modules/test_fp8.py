"""Rounding to e4m3, the layers that gain by it, and torchao's layers against fp64."""

import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from steplab.core import Accelerator
from steplab.core.errors import Unsupported, UserError
from steplab.costs.fp8 import gain, saved_share
from steplab.hardware.catalog import find_card
from steplab.kernels.e4m3 import E4M3_MAX, RangeCounts, counting, quantize, rounded_to_e4m3
from steplab.modules import fp8
from steplab.modules.fp8 import (
    PAYS,
    EmulatedProduct,
    convert_linears,
    plan_linears,
    plan_stacks,
    refuse_device,
)
from steplab.step.assemble import assemble, micro_batches
from steplab.step.trial import trial
from steplab.techniques.context import StepContext
from steplab.techniques.recipes import parse_recipe, technique
from steplab.techniques.technique import StepParts
from steplab.tune.proposals import proposals
from steplab.verify.fp8_layers import check_fp8_products
from steplab.verify.references import compute_reference
from steplab.verify.shapes import shapes_to_try, with_batch
from steplab.workloads.workload import find_workload
from tests.compare.sides import ENVIRONMENT, run_of
from tests.train.resuming import check_that_it_resumes
from tests.verify.planted import own_file

CPU = torch.device("cpu")
LEAST_NORMAL, STEP = 2.0**-6, 2.0**-9  # of e4m3, and the distance of numbers below


def rows(generator: torch.Generator, count: int, width: int, sigma: float) -> torch.Tensor:
    size = (sigma * torch.randn(count, 1, generator=generator)).exp()
    return torch.randn(count, width, generator=generator) * size


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**31),
    count=st.sampled_from([0, 1, 2, 17]),
    width=st.sampled_from([1, 3, 16, 33]),
    sigma=st.sampled_from([0.0, 3.0, 20.0]),
    dim=st.sampled_from([0, 1, None]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)
def test_rounding_is_as_near_as_four_bits_allow(seed, count, width, sigma, dim, dtype):
    """Half a unit in the last of four bits, or half a step where numbers are subnormal."""
    x = rows(torch.Generator().manual_seed(seed), count, width, sigma).to(dtype)
    quantized, scale = quantize(x, dim)
    seen = quantized.double()
    assert quantized.shape == x.shape
    assert scale.numel() == 1 if dim is None else scale.shape[dim] == 1
    assert torch.isfinite(seen).all() and (seen.abs() <= E4M3_MAX).all()
    assert (torch.frexp(scale)[0] == 0.5).all()  # powers of two
    room = torch.maximum(x.double().abs() * 2.0**-4, scale.double() * STEP / 2)
    assert ((seen * scale.double() - x.double()).abs() <= room).all()
    if x.numel():  # no smaller scale would do, unless there is nothing to scale
        dims = (0, 1) if dim is None else dim
        largest = (x.double().abs() / scale.double()).amax(dims)
        assert ((largest > E4M3_MAX / 2) | (x.double().abs().amax(dims) < 1e-25)).all()


def test_what_does_not_fit_saturates_and_a_nan_stays_where_it_is():
    x = torch.tensor([[1.0, torch.inf, torch.nan, -500.0], [1e6, 3e38, -1e30, 0.0]])
    for wide in (x, x.double()):
        seen = quantize(wide, 1)[0].float()
        assert seen[0].isnan().tolist() == [False, False, True, False]
        assert seen[0, 1] == E4M3_MAX and seen[0, 0] == 0.5 and not seen[1].isnan().any()
        assert rounded_to_e4m3(wide, 1)[0, 3] == -512.0
    with counting() as counts:
        quantize(x, 1)
    assert counts == RangeCounts(8, not_finite=2, saturated=1, flushed=2)
    quantize(x, 1)
    assert counts.rounded == 8  # nobody counts any more


@pytest.mark.parametrize("sizes", [(0, 5, 1), (0, 0, 0), (1,), (40, 0, 2), (64,)])
def test_groups_that_are_empty_or_crowded(sizes):
    """Experts one by one, each with its own weight: as the rounded operands multiplied in fp64."""
    source = torch.Generator().manual_seed(0)
    for size in sizes:
        x = rows(source, size, 32, 2.0).double().requires_grad_()
        w = torch.randn(16, 32, generator=source).double().requires_grad_()
        dy = rows(source, size, 16, 2.0).double()
        y = EmulatedProduct.apply(x, w)
        dx, dw = torch.autograd.grad(y, (x, w), dy)
        by_row, by_column = (lambda t, d=d: rounded_to_e4m3(t.detach(), d) for d in (1, 0))
        for found, expected in (
            (y, by_row(x) @ by_row(w).T),
            (dx, by_row(dy) @ by_column(w)),
            (dw, by_column(dy).T @ by_column(x)),
        ):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
            assert torch.isfinite(found).all()


def test_products_of_rounded_operands_are_four_percent_off():
    source = torch.Generator().manual_seed(0)
    x, w = (torch.randn(256, 768, generator=source).double() for _ in range(2))
    off = (EmulatedProduct.apply(x, w) - x @ w.T).norm() / (x @ w.T).norm()
    assert 0.03 < off < 0.045


class Model(nn.Module):
    """An embedding, blocks, odd layers, and a head."""

    def __init__(self, width: int = 2048) -> None:
        super().__init__()
        self.embed = nn.Linear(64, width)
        block = nn.ModuleDict({"up": nn.Linear(width, 4 * width), "gate": nn.Linear(width, 8)})
        block["odd"] = nn.Linear(width, width + 8)
        block["attention"] = nn.MultiheadAttention(width, 4)
        self.blocks = nn.ModuleList([block])
        self.head = nn.Linear(width, 4096)


def test_layers_that_do_not_gain_stay():
    with torch.device("meta"):
        plan = plan_linears(Model(), CPU)
    assert plan["blocks.0.up"] == PAYS
    assert plan["embed"] == plan["head"] == "it is the first or the last layer"
    assert "multiples of 16" in plan["blocks.0.gate"] and "2048 x 2056" in plan["blocks.0.odd"]
    assert "no plain nn.Linear" in plan["blocks.0.attention.out_proj"]
    with torch.device("meta"):
        small = plan_linears(Model(256), CPU)
        only_blocks = plan_linears(nn.ModuleList([nn.Linear(4096, 4096)]), CPU)
    assert "casting would take longer" in small["blocks.0.up"]
    assert only_blocks == {"0": PAYS}


def test_the_gain_is_saved_time_over_time_of_casts():
    """Measured: at a width of 768 the casts eat the gain; at 1,600 and 6,400 they do not."""
    card, many = find_card("NVIDIA H200"), 65_536
    assert gain(768, 3072, many, card) < 1 < gain(1600, 1600, many, card)
    assert gain(1600, 1600, many, card) < gain(1600, 6400, many, card)
    assert gain(1600, 6400, many, None) == pytest.approx(gain(1600, 6400, many, card), rel=0.01)
    assert gain(8192, 8192, many, find_card("NVIDIA A100-SXM4-80GB")) == 0  # has no fp8
    saved, cost = saved_and_cost(1600, 6400, 4096)
    assert gain(1600, 6400, 4096, card) == pytest.approx(saved / cost)


def saved_and_cost(inputs, outputs, tokens):
    """Return seconds of an H200."""
    saved = 6 * inputs * outputs * tokens * (1 / (0.7 * 989.4e12) - 1 / (0.79 * 1978.9e12))
    rounded = (9.4 + 3.4) * (inputs + outputs) * tokens + 19.4 * inputs * outputs
    return saved, rounded / (0.85 * 4800e9)


@pytest.mark.parametrize(("tokens", "bf16", "fp8"), [(4096, 109.6, 101.8), (16384, 382.2, 319.7)])
def test_the_rule_gives_what_gpt_xl_gained(tokens, bf16, fp8):
    """benchmarks/fp8_h200.md: 48 blocks of four Linears of 1600 x 1600 and three of 1600 x 6400."""
    pairs = 4 * [saved_and_cost(1600, 1600, tokens)] + 3 * [saved_and_cost(1600, 6400, tokens)]
    gained = 48e3 * sum(saved - cost for saved, cost in pairs)
    assert bf16 / (bf16 - gained) == pytest.approx(bf16 / fp8, rel=0.03)


def test_the_cast_of_a_weight_pays_for_enough_tokens():
    """It is the same however many tokens there are; few of them gain less than it takes."""
    with torch.device("meta"):
        few, some, many = (plan_linears(Model(), CPU, tokens) for tokens in (128, 4096, 16_384))
    assert few["blocks.0.up"].endswith("2048 x 8192 gain with 128 tokens")
    assert some["blocks.0.up"] == many["blocks.0.up"] == PAYS
    with torch.device("meta"):
        narrow = nn.ModuleList([nn.Linear(1600, 1600)])
        few, many = (plan_linears(narrow, CPU, tokens) for tokens in (4096, 16_384))
    assert "gain with 4,096 tokens" in few["0"] and many["0"] == PAYS


def test_the_gate_judges_the_layers_of_the_measured_step(monkeypatch, tiny_spec):
    """At batch 1 other layers would pay than in the step that is measured."""
    asked = []

    def plan(model, device, tokens):
        asked.append(tokens)
        return {"blocks.0.feed_forward.up": PAYS}

    monkeypatch.setattr("steplab.verify.references.plan_layers", plan)
    spec = replace(tiny_spec("plain"), batch=3)
    own, single, *_ = shapes_to_try(spec)
    for shape in (own, single, with_batch(own, 2)):
        compute_reference(shape, "fp8-rounded")
    assert asked == 3 * [3 * spec.config["context"]]


def test_a_sample_may_have_any_number_of_rows(tmp_path):
    assert assemble(own_file(tmp_path, "nn.Linear(width, 16)")).parts.tokens == 0


def on_card(name):
    """Return an environment with this GPU; "" for none."""
    return replace(ENVIRONMENT, accelerators=(Accelerator(name, 2**37),)) if name else ENVIRONMENT


def offered(recipe, device_name, *allowed, device="cuda"):
    """Return what is proposed for time, by its key."""
    environment = on_card(device_name)
    recipe = parse_recipe(recipe).techniques
    run = run_of(recipe=recipe, environment=environment, mode="full", device=device)
    found = proposals(StepContext(run, "time", allowed=allowed), {})
    return {proposal.key: proposal for proposal in found}


def test_tune_tries_it_only_where_it_is_allowed():
    h200 = "NVIDIA H200"
    assert not any("fp8" in key for key in offered("plain", h200, "fp8"))  # bf16 comes first
    refused = offered("precision=bf16", h200)["precision=fp8"].conflict
    assert "rounds the factors of products to 8 bits" in refused and "--allow fp8" in refused
    assert offered("precision=bf16", h200, "fp8")["precision=fp8"].conflict == ""
    weights = "precision=bf16-weights,optimizer=one-pass"
    assert offered(weights, h200, "fp8")["precision=fp8-bf16-weights"].conflict == ""
    assert not any("fp8" in key for key in offered("precision=fp8", h200, "fp8"))


def test_tune_says_why_it_cannot_be_tried_here():
    refused = offered("precision=bf16", "NVIDIA A100-SXM4-80GB", "fp8")["precision=fp8"].conflict
    assert "A100" in refused and "has no fp8 products" in refused
    refused = offered("precision=bf16", "", "fp8", device="cpu")["precision=fp8"].conflict
    assert refused == "a CPU has no fp8 products"
    assert "precision=fp8" not in offered("precision=bf16", "", device="cpu")


def test_the_ceiling_is_by_measured_rates():
    """693 TFLOP/s in bf16 and 1,563 in fp8: a wide product takes 44 % of its time."""
    assert saved_share(find_card("NVIDIA H200")) == pytest.approx(1 - 693 / 1563, abs=0.01)
    assert saved_share(find_card("NVIDIA A100-SXM4-80GB")) == 0
    recipe = {"precision": {"dtype": "bf16"}}
    run = run_of(recipe=recipe, environment=on_card("NVIDIA H200"), device="cuda")
    found = technique("precision").suggest(StepContext(run, allowed=("fp8",)), {"dtype": "bf16"})
    (suggestion,) = [one for one in found if one.settings["dtype"] == "fp8"]
    assert suggestion.savings == {"kind:matmul bf16": saved_share(find_card("NVIDIA H200"))}
    assert "take 44 % of their time in bf16 at best" in suggestion.reason


class Stacked(nn.Module):
    """Experts as torch._grouped_mm wants them, beside what only looks like a stack."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ParameterDict({"w": nn.Parameter(torch.empty(4, 64, 32))})
        self.convolution = nn.Conv1d(8, 8, 3)
        self.positions = nn.ParameterList([nn.Parameter(torch.empty(1, 16, 32))])
        self.taps = nn.ParameterList([nn.Parameter(torch.empty(48, 3, 48))])


def test_a_strangers_stack_of_experts_stays_and_says_why():
    plan = plan_stacks(Stacked())
    assert list(plan) == ["experts"] and "cannot be replaced in compiled code" in plan["experts"]


@pytest.mark.parametrize(("name", "size"), [("hydra", "100m"), ("megalodon", "tiny")])
def test_taps_and_averages_are_no_stacks_of_matrices(name, size):
    workload = find_workload(name)
    with torch.device("meta"):
        model = workload.open(workload.resolve(size, {})).model()
    assert any(p.ndim == 3 for p in model.parameters()) and plan_stacks(model) == {}


def test_where_there_are_no_units_it_is_refused(monkeypatch, tiny_spec):
    with pytest.raises(Unsupported, match=r"compute capability 8\.9 or newer, not a CPU\."):
        assemble(tiny_spec("precision=fp8"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    with pytest.raises(Unsupported, match=r"this one has 8\.0"):
        refuse_device(torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    refuse_device(torch.device("cuda"))
    with pytest.raises(UserError, match="one rank only"):
        parse_recipe("precision=fp8,parallel=ddp")


def test_without_torchao_one_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(Unsupported, match=r"pip install 'steplab\[fp8\]'"):
        convert_linears(nn.Sequential(nn.Linear(16, 16)), ["0"])


def test_nothing_to_convert_is_refused(monkeypatch, tiny_spec):
    monkeypatch.setattr(fp8, "refuse_device", lambda device: None)
    with pytest.raises(Unsupported, match=r"No layer .* gain by fp8 \(casting would take longer"):
        assemble(tiny_spec("precision=fp8"))


@pytest.fixture
def emulated(monkeypatch):
    """Let precision=fp8 run here: by torchao's emulation, whatever the size of a layer."""
    pytest.importorskip("torchao", reason="precision=fp8 is torchao's")
    monkeypatch.setattr(fp8, "refuse_device", lambda device: None)
    monkeypatch.setattr(fp8, "gain", lambda *shape: 2.0)
    monkeypatch.setattr(fp8, "convert_linears", partial(convert_linears, emulate=True))


def test_torchaos_layers_round_as_ours_do(emulated):
    """Output and gradients, against fp64 products of the same rounded operands."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 32, bias=False), nn.Linear(32, 16))
    names = [name for name, _ in model.named_parameters()]
    parts = StepParts(model, CPU, torch.amp.GradScaler("cpu", enabled=False))
    parts.fp8_linears = {"0": PAYS, "1": PAYS, "2": "it is the last one"}
    fp8.convert_linears(model, ["0", "1"])
    assert [name for name, _ in model.named_parameters()] == names
    assert type(model[2]) is nn.Linear and type(model[0]) is not nn.Linear
    products = check_fp8_products(parts)
    assert products.passed, products


def test_torchaos_sums_over_rows_are_precise_and_padded(monkeypatch):
    """Fast sums lose with every term, and units sum over multiples of 16."""
    pytest.importorskip("torchao", reason="precision=fp8 is torchao's")
    seen = []

    def multiply(a, b, *, out_dtype, use_fast_accum, **scales):
        seen.append((a.shape[1], b.shape[0], use_fast_accum))
        return torch.zeros(a.shape[0], b.shape[1], dtype=out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", multiply)
    model = nn.Sequential(nn.Linear(64, 96))
    convert_linears(model, ["0"])
    model(torch.randn(3, 63, 64, requires_grad=True)).sum().backward()
    assert seen == [(64, 64, True), (96, 96, True), (192, 192, False)]


def test_a_step_with_torchaos_layers_trains_and_keeps_nothing_in_fp8(emulated, tiny_spec):
    spec = tiny_spec("precision=fp8")
    step = assemble(spec)
    feed = micro_batches(step, spec)
    batch = next(feed)
    losses = [float(step(batch).loss) for _ in range(8)]
    assert losses[-1] < losses[0] - 0.01
    lasting = [*step.model.state_dict().values(), *step.model.parameters()]
    lasting += [v for state in step.optimizer.state.values() for v in state.values()]
    assert {t.dtype for t in lasting} <= {torch.float32, torch.int64}
    plain = assemble(tiny_spec("plain"))
    assert list(step.model.state_dict()) == list(plain.model.state_dict())
    assert step.parts.fp8_linears["blocks.0.feed_forward.up"] == PAYS
    assert step.parts.fp8_linears["head"] == "it is the first or the last layer"


def test_training_resumes_where_it_stopped(emulated, tmp_path, tiny_spec):
    check_that_it_resumes(tiny_spec("precision=fp8", mode="full"), tmp_path)


def test_a_run_lists_the_layers_and_an_emulated_one_is_not_taken_for_fp8(emulated, tiny_spec):
    run = trial(tiny_spec("precision=fp8"))
    assert (
        run.status == "failed" and "fp8 was asked for, but the matrix products ran as" in run.reason
    )
    assert run.ran.fp8_linears["blocks.1.attention.out"] == PAYS
    kept = "1 in bf16: it is the first or the last layer"
    assert run.ran.fp8_text == f"fp8 in 14 of 15 layers; {kept}"
    seen = replace(run, ran=replace(run.ran, matmul_dtypes={"c10::Float8_e4m3fn": 2, "float": 9}))
    assert technique("precision").mismatch({"dtype": "fp8"}, seen) == ""
