import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from steplab.core import RunSpec
from steplab.core.errors import UserError
from steplab.step.assemble import assemble, micro_batches
from steplab.techniques.recipes import parse_recipe
from steplab.workloads.hydra.config import PRESETS
from steplab.workloads.hydra.flops import matmul_parameters, parameters, work
from steplab.workloads.hydra.losses import Advantage, ponder_loss, share_loss
from steplab.workloads.hydra.model import GenerationState, Hydra
from steplab.workloads.workload import find_workload
from tests.workloads.hydra.models import SMALL, gradients, make, tokens

COUNTS = {
    "as-profiled": 61_873_162,
    "100m": 85_125_142,
    "100m-trainer": 94_562_326,
    "500m": 625_977_896,
    "1b": 855_657_530,
}
MOD = ("dense", "top-k", "soft", "threshold")
MOR = ("fixed", "masked", "soft", "capacity", "packed", "threshold")
FORMS = [(mod, mor) for mod in MOD for mor in MOR if (mod, mor) != ("top-k", "packed")]
COMPARING = ("top-k", "capacity")  # a token with the rest of its sequence


@pytest.mark.parametrize("size", [*COUNTS, "tiny"])
def test_parameters_are_exact(size):
    config = PRESETS[size]
    with torch.device("meta"):
        built = sum(p.numel() for p in Hydra(config).parameters())
    assert built == parameters(config) == COUNTS.get(size, built)


def test_the_published_count_by_hand():
    """d 768, f 2304, latent 192, kv 48, heads of 16, 8 blocks of 4 passes, 50,257 tokens."""
    attention = 768 * (192 + 96) + 192 * 768 + 3 * (192 * 16 + 192**2 + 48 * 16 + 48**2) + 1
    block = 3 * 768 * 2304 + attention + 3 * 768 + 769 + 2 * 4 * 768
    assert 8 * block + 6 * 769 + 50_257 * 768 + 768 == COUNTS["100m"]


@pytest.mark.parametrize(
    ("size", "changes", "megaflops"),
    [
        ("as-profiled", {"mod": "dense"}, 337.6),
        ("100m", {"mod": "dense"}, 428.0),
        ("100m", {}, 428.0 - 0.375 * 339.7),
        ("100m-trainer", {"mod": "dense"}, 503.5),
        ("500m", {"mod": "dense"}, 4270),
        ("1b", {"mod": "dense"}, 6023),
    ],
)
def test_flops_are_those_of_the_tables(size, changes, megaflops):
    """Per token and forward pass; top-k at half the tokens leaves 20 of 32 passes."""
    config = replace(PRESETS[size], **changes)
    found = work(config, 1, "forward", {})
    assert found.model / found.tokens == pytest.approx(megaflops * 1e6, rel=2e-3)


@pytest.mark.parametrize("attention", ["hydra", "paper"])
@pytest.mark.parametrize(("mod", "mor"), [("top-k", "fixed"), ("top-k", "capacity"), ("soft",) * 2])
def test_flops_equal_torchs_count(attention, mod, mor):
    config = replace(SMALL, attention=attention, mod=mod, mor=mor, capacity=0.4)
    model = Hydra(config)
    inputs = torch.zeros(2, config.context, dtype=torch.long)
    for module in model.modules():
        if hasattr(module, "op"):
            module.impl = "reference"
    with FlopCounterMode(display=False) as counter:
        model(inputs, inputs).total.backward()
    found = work(config, 2, "full", {"attention": "reference"})
    assert found.hardware == pytest.approx(counter.get_total_flops(), rel=1e-3)
    assert found.model < found.hardware


def test_the_formula_says_that_shared_weights_count_more_than_once():
    """One more pass multiplies the feed-forwards' weights once more; the model stays as large."""
    once, twice = (replace(SMALL, mod="dense", mor="fixed", recursions=n) for n in (1, 2))
    more = matmul_parameters(twice) - matmul_parameters(once)
    assert more == SMALL.blocks * 3 * SMALL.width * SMALL.ff_width
    words = f"6 x {matmul_parameters(twice):,} multiplied weights per token (shared ones once per "
    assert work(twice, 2, "full", {}).formula.startswith(words)


def test_where_depth_decides_there_is_no_formula():
    assert work(replace(SMALL, mod="dense", mor="packed"), 2, "full", {}) is None


@pytest.mark.parametrize("attention", ["hydra", "paper"])
@pytest.mark.parametrize(("mod", "mor"), FORMS)
def test_every_parameter_gets_a_gradient(attention, mod, mor):
    """But a router that is not asked, and none of the others: neither q, k nor convolutions."""
    model = make(attention=attention, mod=mod, mor=mor, router_warmup=1)
    found = gradients(model)
    idle = {name for name, p in model.named_parameters() if not bool(found.get(name, p * 0).any())}
    depth = {name for name, _ in model.named_parameters() if "recursion.router." in name}
    share = {name for name, _ in model.named_parameters() if "feed_forward.router." in name}
    assert idle == (depth if mor == "fixed" else set()) | (share if mod == "dense" else set())


def test_with_a_weight_of_one_only_the_share_loss_trains_the_router():
    model = make(mod="top-k", mor="fixed", mod_gate="one", aux_factor=0.0)
    found = gradients(model)
    routers = [name for name in found if "feed_forward.router." in name]
    assert routers and not any(bool(found[name].any()) for name in routers)


@pytest.mark.parametrize("attention", ["hydra", "paper"])
@pytest.mark.parametrize(("mod", "mor"), FORMS)
def test_causality_but_where_tokens_are_compared(attention, mod, mor):
    model = make(attention=attention, mod=mod, mor=mor).eval()
    before, after = tokens(), tokens()
    after[:, 15] = (after[:, 15] + 1) % 40

    def differs():
        one, other = model(before), model(after)
        assert not torch.allclose(one[:, 15], other[:, 15])
        return not torch.allclose(one[:, :15], other[:, :15], rtol=1e-12, atol=1e-12)

    compares = mod in COMPARING or mor in COMPARING
    assert differs() == compares
    with model.causal_routing():
        assert not differs()
    assert differs() == compares
    model.become_causal()
    assert not differs()


@pytest.mark.parametrize("attention", ["hydra", "paper"])
@pytest.mark.parametrize(
    ("mod", "mor"), [("top-k", "capacity"), ("soft", "masked"), ("dense",) * 2]
)
def test_a_stream_in_pieces_equals_the_whole(attention, mod, mor):
    mor = "packed" if mor == "dense" else mor
    model = make(attention=attention, mod=mod, mor=mor).eval()
    model.become_causal()
    whole = model(tokens())
    stream = GenerationState.empty(model, 2, 24)
    cuts = [0, 1, 2, 7, 8, 20, 24]
    for start, stop in pairwise(cuts):
        found = model.extend(tokens()[:, start:stop], stream)
        torch.testing.assert_close(found, whole[:, stop - 1], rtol=1e-10, atol=1e-10)


def test_thresholds_follow_what_is_taken():
    """After enough updates a threshold takes about as many tokens as the share does."""
    model = make(torch.float32, mod="top-k", mor="capacity", capacity=0.25)
    with torch.no_grad():
        for _ in range(120):
            model(tokens(8), tokens(8))
        recursion = model.blocks[1].recursion
        scores = []
        recursion.feed_forward.register_forward_hook(
            lambda *_, s=scores: s.append(_[2][2].probability_BS.logit())
        )
        model(tokens(8), tokens(8))
    passed = scores[0] >= model.thresholds.mod_NR[1, 0]
    assert passed.float().mean().item() == pytest.approx(0.25, abs=0.1)
    # The first block, which is not routed, keeps its first value.
    assert model.thresholds.mod_NR[0, 0].item() == pytest.approx(math.log(1 / 3))


def test_the_advantage_waits_and_then_tells_hard_tokens():
    advantage = Advantage(warmup=3)
    losses = torch.tensor([[0.0, 2.0, 4.0]])
    early, warm = advantage(losses)
    assert not early.any() and warm.item() == pytest.approx(1 / 3)
    for _ in range(600):
        late, warm = advantage(losses)
    expected = torch.tanh((losses - 2) / losses.var(correction=0).sqrt())
    torch.testing.assert_close(late, expected, rtol=2e-2, atol=2e-2)
    assert warm.item() == 1
    advantage.eval()
    updates = advantage.updates.clone()
    advantage(losses)
    assert torch.equal(advantage.updates, updates)


def test_the_share_loss_is_least_where_half_are_sure_and_half_are_not():
    both = torch.tensor([[[0.0, 1.0] * 8], [[0.5] * 16]])
    sure, unsure = share_loss(both, 0.5).tolist()
    assert sure == pytest.approx(0.5 * math.exp(-10)) and unsure == pytest.approx(0.5)


def test_the_ponder_loss_by_hand():
    logits = torch.tensor([[[-1.0, 1.0]], [[2.0, 2.0]]])
    probabilities = torch.tensor([[[0.2, 0.8]], [[0.9, 0.9]]])
    spread = 0.0005 * 0.5 + 0.01 * math.exp(-0.9)
    alike = 0.0005 * 0.9 + 0.01 + 0.1 * 0.5
    assert ponder_loss(logits, probabilities).tolist() == pytest.approx([spread, alike])


def test_the_first_loss_is_that_of_a_uniform_guess():
    torch.manual_seed(0)
    loss = Hydra(PRESETS["tiny"])(torch.randint(256, (4, 128)), torch.randint(256, (4, 128)))
    assert loss.prediction.item() == pytest.approx(math.log(256), rel=0.02)


@pytest.mark.parametrize(
    "recipe", ["checkpointing=blocks,checkpointing.every=2", "compile.backend=eager"]
)
def test_techniques_do_not_change_the_loss(recipe):
    """Every second block recomputed; and traced by torch.compile without a break."""
    config = {**SMALL.__dict__, "mor": "capacity"}
    losses = []
    for words in ("plain", recipe):
        spec = RunSpec("hydra", config, batch=2, recipe=parse_recipe(words))
        step = assemble(spec)
        batches = micro_batches(step, spec)
        losses.append(torch.stack([step(next(batches)).loss for _ in range(3)]))
    torch.testing.assert_close(*losses, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"n_blocks": 3}, "Did you mean 'blocks'"),
        ({"heads": 5}, "does not split"),
        ({"kv_heads": 3}, "do not divide"),
        ({"mod": "top-k", "mor": "packed"}, "mixes the tokens"),
        ({"capacity": 0.0}, "capacity"),
        ({"min_depth": 2}, "min_depth"),
        ({"context": 9000}, "max_context"),
        ({"recursions": 0}, "at least 1"),
    ],
)
def test_bad_configs_are_refused(overrides, words):
    with pytest.raises(UserError, match=words):
        find_workload("hydra").resolve("tiny", overrides)
