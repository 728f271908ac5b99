import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from steplab.core.errors import UserError
from steplab.workloads.gpt.config import PRESETS, GPTConfig
from steplab.workloads.gpt.flops import matmul_parameters, parameters, work
from steplab.workloads.gpt.model import GPT
from steplab.workloads.workload import find_workload

# d_model, d_ff, layers, heads, and the parameters they give, worked out by hand:
# layers * (4 d^2 + 3 d f + 2 d) + 2 * 10000 d + d.
TABLE = {
    "small": (768, 3072, 12, 12, 128_625_408),
    "medium": (1024, 4096, 24, 16, 423_183_360),
    "large": (1280, 5120, 36, 20, 969_411_840),
    "xl": (1600, 6400, 48, 25, 1_998_235_200),
    "2.7b": (2560, 10240, 32, 32, 3_406_809_600),
}
SMALL = GPTConfig(32, 64, layers=2, heads=2, context=16, vocab_size=64)


@pytest.mark.parametrize("size", TABLE)
def test_sizes_and_parameters_are_exact(size):
    width, ff_width, layers, _, total = TABLE[size]
    config = PRESETS[size]
    assert (config.width, config.ff_width, config.layers, config.heads) == TABLE[size][:4]
    by_hand = layers * (4 * width**2 + 3 * width * ff_width + 2 * width) + 20_000 * width + width
    with torch.device("meta"):
        built = sum(p.numel() for p in GPT(config).parameters())
    assert built == parameters(config) == by_hand == total


@pytest.mark.slow
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("size", ["tiny", *TABLE])
def test_flops_equal_torchs_count(size, fused):
    """The reference attention computes all pairs, which is what torch's counter sees."""
    base = PRESETS[size]
    config = GPTConfig(
        base.width, base.ff_width, base.layers, base.heads, 128, fused_projections=fused
    )
    with torch.device("meta"):
        model = GPT(config)
        tokens = torch.zeros(2, config.context, dtype=torch.long)
    for module in model.modules():
        if hasattr(module, "op"):
            module.impl = "reference"
    with FlopCounterMode(display=False) as counter:
        loss = model(tokens, tokens)
    forward = counter.get_total_flops()
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    both = forward + counter.get_total_flops()
    assert work(config, 2, "forward", "reference").palm == forward
    assert work(config, 2, "full", "reference").palm == both
    assert work(config, 2, "full", "reference").hardware == both


def test_flops_equal_an_independent_formula():
    """6 N T for the matrices and 6 L d T (T + 1) for causal attention, all for one sequence."""
    config = PRESETS["small"]
    T, L, d = config.context, config.layers, config.width
    expected = 6 * matmul_parameters(config) * T + 6 * L * d * T * (T + 1)
    assert work(config, 1, "full", "flash").model == expected


def test_flash_executes_visible_pairs_and_a_fifth_product():
    config = PRESETS["small"]
    full, flash = work(config, 1, "full", "math"), work(config, 1, "full", "flash")
    visible_attention = full.model - 6.0 * matmul_parameters(config) * config.context
    assert flash.hardware - flash.model == pytest.approx(visible_attention / 6)
    assert full.hardware == full.palm > flash.hardware


@pytest.mark.parametrize("impl", ["reference", "math", "flash"])
def test_causality(impl):
    torch.manual_seed(0)
    model = GPT(SMALL)
    for module in model.modules():
        if getattr(module, "op", "") == "attention":
            module.impl = impl
    tokens = torch.randint(64, (2, 16))
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 64
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.allclose(before[:, 9], after[:, 9])


def test_fused_projections_compute_the_same():
    torch.manual_seed(0)
    separate = GPT(SMALL).double()
    fused = GPT(GPTConfig(**{**SMALL.__dict__, "fused_projections": True})).double()
    weights = separate.state_dict()
    for key in list(fused.state_dict()):
        if key.endswith("qkv.weight"):
            parts = [key.replace("qkv", name) for name in "qkv"]
        elif key.endswith("gate_up.weight"):
            parts = [key.replace("gate_up", name) for name in ("gate", "up")]
        else:
            continue
        weights[key] = torch.cat([weights.pop(part) for part in parts])
    fused.load_state_dict(weights)
    tokens = torch.randint(64, (2, 16))
    losses = [model(tokens, tokens) for model in (separate, fused)]
    torch.testing.assert_close(*losses, rtol=1e-12, atol=0)
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(
        separate.embedding.weight.grad, fused.embedding.weight.grad, rtol=1e-9, atol=1e-12
    )


def test_the_first_loss_is_that_of_a_uniform_guess():
    torch.manual_seed(0)
    tokens = torch.randint(1024, (4, 128))
    loss = GPT(PRESETS["tiny"])(tokens, torch.randint(1024, (4, 128)))
    assert loss.item() == pytest.approx(math.log(1024), rel=0.02)


def test_every_parameter_gets_a_gradient():
    model = GPT(SMALL)
    tokens = torch.randint(64, (2, 16))
    model(tokens, tokens).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_rotary_keeps_the_relative_position_only():
    """Scores of rotated q and k depend on the distance between their positions."""
    from steplab.modules.rotary import Rotary

    rotary = Rotary(8, 64, 10_000.0).double()
    rotary.cos_TD, rotary.sin_TD = rotary.cos_TD.double(), rotary.sin_TD.double()
    q, k = torch.randn(2, 8, dtype=torch.float64)
    rows = torch.zeros(1, 1, 64, 8, dtype=torch.float64)
    rotated_q, rotated_k = rotary(rows + q)[0, 0], rotary(rows + k)[0, 0]
    scores = rotated_q @ rotated_k.T
    torch.testing.assert_close(scores[5, 2], scores[45, 42], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(rotated_q.norm(dim=-1), q.norm().expand(64), rtol=1e-6, atol=0)


def test_batches_are_seeded_and_shifted():
    entry = find_workload("gpt")
    workload = entry.open(entry.resolve("tiny", {}))
    first = next(workload.batches(3, torch.device("cpu"), 7))
    again = next(workload.batches(3, torch.device("cpu"), 7))
    other = next(workload.batches(3, torch.device("cpu"), 8))
    assert first[0].shape == (3, 128) and torch.equal(first[0], again[0])
    assert torch.equal(first[0][:, 1:], first[1][:, :-1])
    assert not torch.equal(first[0], other[0])


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"context": 9000}, "max_context"),
        ({"heads": 7}, "does not split"),
        ({"layers": 0}, "at least 1"),
        ({"wdith": 3}, "Did you mean 'width'"),
    ],
)
def test_bad_configs_are_refused(overrides, words):
    with pytest.raises(UserError, match=words):
        find_workload("gpt").resolve("tiny", overrides)
