"""Quantiles beside the point forecast."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from steplab.core.errors import UserError
from steplab.modules.kv_cache import KVCache
from steplab.workloads.tsmoe.config import PRESETS, TsmoeConfig
from steplab.workloads.tsmoe.flops import parameters, work
from steplab.workloads.tsmoe.loss import QuantileLoss
from steplab.workloads.tsmoe.model import Tsmoe
from steplab.workloads.workload import find_workload

SHAPE = {"hidden_size": 32, "n_decoder_layers": 2, "n_head": 2, "num_experts": 4, "d_ff": 32}
POINTS = 40


def config(quantiles="0.1,0.5,0.9", **changes):
    options = {"d_expert": 16, "seq_max_len": POINTS, "horizons": "1,4,9", **changes}
    return TsmoeConfig(**SHAPE, **options, quantiles=quantiles)


def build(**changes):
    torch.manual_seed(0)
    return Tsmoe(config(**changes)).double()


@pytest.mark.parametrize("layout", ["gelu", "time-moe"])
def test_parameters_are_counted(layout):
    with_quantiles, without = config(layout=layout), config("", layout=layout)
    built = sum(p.numel() for p in Tsmoe(with_quantiles).parameters())
    assert built == parameters(with_quantiles)[0]
    outputs = 14 * 3  # (1 + 4 + 9) points, three levels each
    more = outputs * 32 + (outputs if layout == "gelu" else 0)
    assert built - parameters(without)[0] == more


def test_point_weights_and_outputs_are_those_of_the_point_model():
    """A point model's weights load into one with quantiles; what it lacks is named."""
    point, both = build(quantiles=""), build()
    result = both.load_state_dict(point.state_dict(), strict=False)
    assert result.missing_keys == ["quantile_heads.weight", "quantile_heads.bias"]
    assert not result.unexpected_keys
    values = torch.randn(2, POINTS, dtype=torch.float64)
    with torch.no_grad():
        assert torch.equal(point(values).outputs_BNH, both(values).outputs_BNH)
        assert point(values).quantiles_BNHQ is None


def test_flops_equal_torchs_count():
    model = Tsmoe(config())
    for module in model.modules():
        if hasattr(module, "op"):
            module.impl = {"attention": "reference", "experts": "loop"}.get(module.op, "auto")
    with FlopCounterMode(display=False) as counter:
        model(torch.randn(2, POINTS + 1), torch.ones(2, POINTS + 1, dtype=torch.bool))
    assert work(config(), 2, "forward", {}).palm == counter.get_total_flops()


def test_loss_equals_a_loop_over_points():
    torch.manual_seed(0)
    horizons, levels, T = (1, 3), (0.1, 0.5, 0.8), 9
    predictions = torch.randn(2, T, 4, 3, dtype=torch.float64)
    values = torch.randn(2, T + 1, dtype=torch.float64)
    mask = torch.rand(2, T + 1) > 0.3
    documents = torch.tensor([[0] * 4 + [1] * 6, [0] * 7 + [2] * 3])
    of_head = []
    for head, h in enumerate(horizons):
        first, errors = sum(horizons[:head]), []
        for b in range(2):
            for n in range(T):
                for i in range(h):
                    p = n + 1 + i
                    if p > T or not mask[b, p] or documents[b, p] != documents[b, n]:
                        continue
                    for q, level in enumerate(levels):
                        miss = (values[b, p] - predictions[b, n, first + i, q]).item()
                        errors.append(2 * abs(miss) * (level if miss > 0 else 1 - level))
        of_head.append(sum(errors) / len(errors))
    loss = QuantileLoss(horizons, 1, levels)(predictions, values, mask, documents)
    # The levels are kept in fp32.
    assert loss.item() == pytest.approx(sum(of_head) / 2, rel=1e-6)


def test_the_loss_is_least_at_the_quantiles_of_the_data():
    torch.manual_seed(0)
    levels = (0.1, 0.5, 0.9)
    values = torch.randn(1, 2002, dtype=torch.float64)
    mask = torch.ones(1, 2002, dtype=torch.bool)
    loss = QuantileLoss((1,), 1, levels)
    best = values[0, 1:].quantile(torch.tensor(levels, dtype=torch.float64))

    def of(shift):
        return loss((best + shift).expand(1, 2001, 1, 3), values, mask).item()

    for q in range(3):
        for step in (-0.1, 0.1):
            shift = torch.zeros(3, dtype=torch.float64)
            shift[q] = step
            assert of(shift) > of(torch.zeros(3, dtype=torch.float64))


@pytest.mark.parametrize("patch", [1, 4])
def test_quantiles_come_sorted_and_cached_ones_are_the_same(patch):
    model = build(patch_length=patch)
    values = torch.randn(2, POINTS, dtype=torch.float64)
    with torch.no_grad():
        whole = model(values).quantiles_BNHQ
    assert whole.shape == (2, POINTS // patch, 14, 3)
    assert (whole.diff(dim=-1) >= 0).all()
    cache = KVCache.empty(model, 2, POINTS // patch)
    parts = [model.extend(piece, cache).quantiles_BNHQ for piece in values.split([32, 8], 1)]
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-12, atol=1e-13)


def test_every_weight_learns_and_all_losses_are_told():
    workload = find_workload("tsmoe").open(find_workload("tsmoe").resolve("tiny", {
        **SHAPE, "d_expert": 16, "seq_max_len": 72, "quantiles": "0.25,0.75",
    }))  # fmt: skip
    torch.manual_seed(0)
    model = workload.model()
    values, mask = torch.randn(2, 73), torch.ones(2, 73, dtype=torch.bool)
    loss, metrics = workload.loss(model, (values, mask))
    parts = metrics["pred"] + metrics["quantile"] + 0.02 * metrics["aux"]
    torch.testing.assert_close(loss, parts)
    loss.backward()
    assert [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_predictions_compile_without_a_break():
    torch._dynamo.reset()
    model, compiled = build(), build()
    compiled.compile(backend="eager", fullgraph=True, dynamic=False)
    values = torch.randn(2, POINTS, dtype=torch.float64)
    with torch.no_grad():
        found = compiled(values).quantiles_BNHQ
        torch.testing.assert_close(found, model(values).quantiles_BNHQ)


@pytest.mark.parametrize("words", ["0.5,0.1", "0,0.5", "0.5,1", "a", "0.1,,0.9", "nan", "0.5,0.5"])
def test_bad_levels_are_refused(words):
    with pytest.raises(UserError, match="rising numbers between 0 and 1"):
        config(words)


def test_presets_predict_points_only():
    assert all(preset.quantile_levels == () for preset in PRESETS.values())
