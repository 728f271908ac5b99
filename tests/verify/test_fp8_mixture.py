"""A mixture in fp8 before the gate, its networks by the definition of their passes and products."""

import pytest
import torch

from steplab.core import RunSpec
from steplab.core.errors import Unsupported
from steplab.kernels import e4m3, e4m3_network
from steplab.kernels import experts as experts_op
from steplab.kernels import feed_forward as feed_forward_op
from steplab.modules import fp8
from steplab.modules.fp8 import PAYS
from steplab.step.assemble import assemble, micro_batches
from steplab.techniques.recipes import parse_recipe
from steplab.verify.fp8_layers import check_fp8_products, check_fp8_range
from steplab.workloads.workload import find_workload
from tests.verify.planted import verdicts

FP8 = "precision=fp8-bf16-weights,optimizer=one-pass"
SMALL = {"hidden_size": 32, "n_decoder_layers": 2, "n_head": 2, "d_ff": 64, "d_expert": 48}
SMALL |= {"seq_max_len": 64, "horizons": "1,4", "num_experts": 6}


def mixture(recipe, batch=4, **changes):
    config = find_workload("tsmoe").resolve("tiny", {**SMALL, **changes})
    return RunSpec("tsmoe", config, "tiny", batch=batch, recipe=parse_recipe(recipe))


@pytest.fixture
def here(monkeypatch):
    """Let precision=fp8 run on a CPU, where torch stands in for kernels and units."""
    monkeypatch.setattr(fp8, "refuse_device", lambda device: None)
    for op in (experts_op, feed_forward_op):
        monkeypatch.setattr(op.IMPLS["fp8"], "refuse_device", lambda x: "")


def test_it_trains_and_keeps_nothing_in_fp8(here):
    spec = mixture(FP8)
    step = assemble(spec)
    batch = next(micro_batches(step, spec))
    losses = [float(step(batch).loss) for _ in range(8)]
    assert losses[-1] < losses[0]
    networks = {m.op: m.ran for m in step.model.modules() if getattr(m, "op", "") in fp8_ops()}
    assert networks == {"experts": "fp8", "feed_forward": "fp8"}
    plan = step.parts.fp8_linears
    assert plan["blocks.0.mixtures.0.experts"] == plan["blocks.1.mixtures.0.shared"] == PAYS
    assert "casting would take longer" in plan["blocks.0.attention.qkv"]
    assert not any(name.endswith("w_in") for name in plan)  # it is its network's
    lasting = [*step.model.state_dict().values(), *step.model.parameters()]
    lasting += [v for state in step.optimizer.state.values() for v in state.values()]
    assert {t.dtype for t in lasting} <= {torch.float32, torch.bfloat16, torch.int64}


def test_it_trains_with_any_number_of_tokens(here):
    spec = mixture(FP8, batch=3, seq_max_len=63)
    step = assemble(spec)
    assert step.parts.tokens == 189
    assert step(next(micro_batches(step, spec))).loss.isfinite()


def test_where_networks_have_no_kernels_that_is_the_reason(here, monkeypatch):
    """Not that of the first layer in the list, which holds for few parameters."""
    why = "needs compute capability 9.0"
    monkeypatch.setattr("steplab.kernels.e4m3_network.refuse_widths", lambda *x: why)
    with pytest.raises(Unsupported, match=rf"would gain by fp8 \(fp8 {why}\)"):
        assemble(mixture(FP8))


def fp8_ops():
    return ("experts", "feed_forward")


def test_an_implementation_that_was_asked_for_stays(here):
    plan = assemble(mixture(f"{FP8},impl.experts=loop")).parts.fp8_linears
    assert plan["blocks.0.mixtures.0.experts"] == "impl.experts=loop was asked for"
    assert plan["blocks.0.mixtures.0.shared"] == PAYS
    swiglu = assemble(mixture("precision=fp8", d_ff=40)).parts.fp8_linears
    assert "multiples of 16, not 32 and 40" in swiglu["blocks.0.mixtures.0.shared"]


def test_an_honest_mixture_is_green(here):
    spec = mixture(FP8)
    products = check_fp8_products(assemble(spec).parts)
    assert products.passed, products
    found = verdicts(spec)
    assert all(passed for passed, _ in found.values()), found


def forgotten_scale(x, w, offsets_E, dtype, product=e4m3.product):
    x = x if dtype == torch.float64 else x._replace(scale=torch.ones_like(x.scale))
    return product(x, w, offsets_E, dtype)


def one_wrong_row(x, w, offsets_E, dtype, product=e4m3.product):
    out = product(x, w, offsets_E, dtype)
    return out if dtype == torch.float64 else out.index_fill(0, torch.tensor(3), 1.0)


def wrong_gradient(a, b, scale, offsets_E, dtype, gradient=e4m3.weight_gradient):
    out = gradient(a, b, scale, offsets_E, dtype)
    return out if dtype == torch.float64 else out * 1.1


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("product", forgotten_scale),
        ("product", one_wrong_row),
        ("weight_gradient", wrong_gradient),
    ],
)
def test_a_wrong_product_is_seen_in_its_network(here, monkeypatch, name, fault):
    """It is called by its name in both modules: once by the network, once by the check."""
    fault.__name__ = name
    monkeypatch.setattr(e4m3, name, fault)
    monkeypatch.setattr(e4m3_network, name, fault)
    products = check_fp8_products(assemble(mixture(FP8)).parts)
    assert not products.passed, products.detail


def test_a_wrong_pass_is_seen_in_the_results(here, monkeypatch):
    def unweighted(z, dh, weights, scales, slope_rows=e4m3_network.slope_rows):
        found = slope_rows(z, dh, weights, scales)
        if dh.dtype == torch.float64:
            return found
        return found._replace(dz=found.dz._replace(scale=2 * found.dz.scale))

    monkeypatch.setattr(e4m3_network, "slope_rows", unweighted)
    products = check_fp8_products(assemble(mixture(FP8)).parts)
    assert not products.passed and "dx of blocks." in products.detail


def count_range(spec, change=lambda model: None):
    step = assemble(spec)
    change(step.model)
    return check_fp8_range(step, next(micro_batches(step, spec))[0])


def test_all_that_a_step_rounds_is_counted(here):
    """Of each layer both matrices twice, the rows forward and backward; nothing is too large."""
    in_range = count_range(mixture(FP8))
    assert in_range.passed and " 0 not finite, 0 saturated, " in in_range.detail
    counted = int(in_range.detail.split()[1].replace(",", ""))
    T, E, D, F, inner, blocks = 4 * 64, 6, 32, 64, 48, 2
    # Rows of the experts: two for a token, and 16 more for each expert.
    R = 2 * T + 16 * E
    network = [(R, inner, E), (T, F, 1)]
    # x, h, z kept; dout, dz; dz and h again, dout and x again for the weight gradients.
    rows = sum(r * (D + f + f + D + f + 2 * f + 2 * D) for r, f, _ in network)
    matrices = sum(2 * 2 * e * D * f for _, f, e in network)
    assert counted == blocks * (rows + matrices)


def test_an_activation_that_is_not_finite_is_red(here):
    def spoil(model):
        with torch.no_grad():
            model.blocks[0].norms[0].weight[3] = torch.inf

    in_range = count_range(mixture(FP8), spoil)
    assert not in_range.passed and " 0 not finite" not in in_range.detail


def test_a_bound_that_is_none_is_red(here, monkeypatch):
    """Scales that are too small let numbers saturate, which no result of a step would show."""
    scale_for = e4m3.scale_for
    monkeypatch.setattr("steplab.kernels.e4m3_passes.scale_for", lambda t: scale_for(t) / 2**7)
    in_range = count_range(mixture(FP8))
    assert not in_range.passed and " 0 saturated" not in in_range.detail
