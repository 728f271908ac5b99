"""Moments in 8 bits: the rounding, torchao's optimizer against it, its gate and its checkpoints."""

import sys
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from steplab.core.errors import Unsupported, UserError
from steplab.modules import adam_8bit
from steplab.modules.adam_8bit import BLOCK, from_adamw, levels, rounded, rounded_parameters
from steplab.modules.optimizer import moments, numbers_of, packed_state
from steplab.step.assemble import assemble, micro_batches
from steplab.techniques.context import StepContext
from steplab.techniques.optimizer import TECHNIQUE
from steplab.techniques.recipes import parse_recipe
from steplab.tune.proposals import memory_savers, proposals
from steplab.verify.judge import judge
from steplab.verify.numerics import take_snapshot
from steplab.verify.references import compute_reference
from steplab.verify.shapes import GateShape, references_of
from tests.compare.sides import run_of
from tests.train.resuming import check_that_it_resumes

RECIPE = "optimizer=adam-8bit"


@pytest.fixture
def torchao():
    """torchao's optimizer, its update op by op: compiling it takes seconds for every shape."""
    found = pytest.importorskip("torchao.optim", reason="optimizer=adam-8bit is torchao's")
    with torch.compiler.set_stance("force_eager"):
        yield found


@settings(max_examples=25)
@given(st.integers(0, 2**31), st.floats(-12, 6), st.booleans())
def test_a_rounded_block_is_as_near_as_its_levels_allow(seed, exponent, signed):
    """Half the widest gap between levels, in units of the largest number of the block."""
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(4, BLOCK, generator=source, dtype=torch.float64) * 10.0**exponent
    x = x if signed else x.square()
    gap = (levels(signed).diff()).max() / 2
    largest = x.abs().amax(1, keepdim=True).clamp(min=1e-12)  # the least scale
    # The lowest level is -0.993 where there is a sign: the largest number may be a gap off.
    assert ((rounded(x, signed) - x).abs() <= (2 if signed else 1) * gap * largest).all()


def test_rounding_is_that_of_torchao(torchao):
    from torchao.optim.subclass_8bit import OptimState8bit

    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    for signed, moment in ((True, x), (False, x.square())):
        packed = OptimState8bit.zeros(x.shape, signed)
        packed.copy_(moment)
        torch.testing.assert_close(rounded(moment, signed), packed.dequantize(), rtol=1e-6, atol=0)


def test_small_tensors_and_embeddings_are_kept_as_they_are():
    model = nn.ModuleDict(
        {"words": nn.Embedding(64, 64), "large": nn.Linear(64, 64), "odd": nn.Linear(4097, 1)}
    )
    model["tied"] = nn.Linear(64, 64, bias=False)
    model["tied"].weight = model["words"].weight
    assert rounded_parameters(model) == {model["large"].weight}


def test_the_gate_is_green_for_it_and_red_for_moments_that_are_lost(torchao, tiny_spec):
    """Judged as fp32 alone it is red: its budget is the truth with rounded moments."""
    spec = tiny_spec(RECIPE, {"width": 64, "ff_width": 128, "layers": 1}, mode="full")
    shape = GateShape("own", "", replace(spec, recipe=parse_recipe("plain")))
    names = references_of("fp32+adam-8bit")
    assert names == ("fp32-up", "fp32-down", "fp64-state", "fp32")
    truth = compute_reference(shape, "fp64")
    peers = {name: compute_reference(shape, name) for name in names}
    found = take_snapshot(assemble(spec), spec)
    assert found.rounding == "fp32+adam-8bit"
    checks = judge(found, list(peers.values()), truth, "")
    assert all(check.passed for check in checks), [c for c in checks if not c.passed]
    alone = judge(found, [peer for name, peer in peers.items() if name != "fp64-state"], truth, "")
    assert not all(check.passed for check in alone)

    forgetful = assemble(spec)
    for group in forgetful.optimizer.param_groups:
        group["betas"] = (0.0, 0.999)  # a first moment that remembers nothing
    wrong = judge(take_snapshot(forgetful, spec), list(peers.values()), truth, "")
    assert any(check.name.startswith("update") and not check.passed for check in wrong)


def test_state_goes_through_a_checkpoint_bit_for_bit(torchao, tiny_spec):
    spec = tiny_spec(RECIPE, {"width": 64, "ff_width": 128}, mode="full")
    step = assemble(spec)
    feed = micro_batches(step, spec)
    for _ in range(2):
        step(next(feed))
    saved = {p: {k: v.clone() for k, v in state.items()} for p, state in moments(step.optimizer)}
    assert any("exp_avg.codes" in state for state in saved.values())
    assert all(type(v) is torch.Tensor for state in saved.values() for v in state.values())
    for parameter, state in saved.items():
        again = packed_state(step.optimizer, parameter, dict(state))
        for key in ("exp_avg", "exp_avg_sq"):
            kept = step.optimizer.state[parameter][key]
            assert torch.equal(numbers_of(again[key]), numbers_of(kept))
    large = next(iter(step.optimizer.rounded))
    for key, odd in (("exp_avg.codes", torch.zeros(3, dtype=torch.uint8)), ("exp_avg.scale", None)):
        with pytest.raises(UserError, match="does not fit"):
            packed_state(step.optimizer, large, {**saved[large], key: odd})


def test_training_resumes_where_it_stopped(torchao, tmp_path, tiny_spec):
    spec = tiny_spec(RECIPE, {"width": 64, "ff_width": 128}, mode="full")
    check_that_it_resumes(spec, tmp_path)


def test_rates_may_be_assigned_as_numbers(torchao, tiny_spec):
    spec = tiny_spec(RECIPE, mode="full")
    step = assemble(spec)
    feed = micro_batches(step, spec)
    step(next(feed))
    before = {n: p.detach().clone() for n, p in step.model.named_parameters()}
    for group in step.optimizer.param_groups:
        group["lr"] = 0.0
        group["weight_decay"] = 0.0
    step(next(feed))
    for name, parameter in step.model.named_parameters():
        assert torch.equal(parameter, before[name]), name


def test_without_torchao_one_sentence_says_what_to_install(monkeypatch, tiny_spec):
    adam_8bit._class.cache_clear()
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.optim", None)
    with pytest.raises(Unsupported, match="torchao's, which is not installed") as seen:
        assemble(tiny_spec(RECIPE, mode="full"))
    assert "steplab[adam-8bit]" in str(seen.value)
    adam_8bit._class.cache_clear()


def test_other_optimizers_are_refused():
    weight = torch.nn.Parameter(torch.zeros(4))
    with pytest.raises(Unsupported, match="trained by SGD"):
        from_adamw(torch.optim.SGD([weight], 0.1), ())
    with pytest.raises(Unsupported, match="without amsgrad"):
        from_adamw(torch.optim.AdamW([weight], amsgrad=True), ())


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("compile=blocks,compile.optimizer=true", "compiles its update by itself"),
        ("cuda_graph=step", "counts its steps on the host"),
        ("parallel=ddp", "one rank only"),
        ("precision=bf16-weights", "optimizer=one-pass"),
    ],
)
def test_what_it_does_not_go_with(more, words):
    with pytest.raises(UserError, match=words):
        parse_recipe(f"{RECIPE},{more}")


def test_tune_names_its_class_and_tries_it_only_where_it_is_allowed():
    run = run_of(mode="full")

    def offered(objective, *allowed):
        found = proposals(StepContext(run, objective, allowed=allowed), {})
        return {proposal.key: proposal for proposal in found}

    assert RECIPE not in offered("time", "adam-8bit")
    refused = offered("memory")[RECIPE].conflict
    assert "changes the state's precision" in refused and "--allow adam-8bit" in refused
    assert offered("memory", "adam-8bit")[RECIPE].conflict == ""
    keys = [p.key for p in memory_savers(StepContext(run, "memory", allowed=("adam-8bit",)))]
    assert RECIPE in keys and RECIPE not in [
        p.key for p in memory_savers(StepContext(run, "memory"))
    ]
    done = run_of(recipe=parse_recipe(RECIPE).techniques, mode="full")
    assert not TECHNIQUE.suggest(StepContext(done, "memory"), {"impl": "adam-8bit"})
