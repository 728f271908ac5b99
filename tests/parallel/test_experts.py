"""Experts spread over ranks against all of them on one: outputs and all gradients."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from steplab.core import RunSpec
from steplab.core.errors import Unsupported, UserError
from steplab.kernels.experts import RoutedTokens
from steplab.modules.experts import RoutedExperts
from steplab.modules.shards import is_sharded, local
from steplab.parallel.experts import check_expert_parts, shard_experts
from steplab.parallel.mesh import rank_mesh
from steplab.parallel.world import current_world
from steplab.step import step as step_module
from steplab.step.assemble import assemble, micro_batches
from steplab.techniques.recipes import check_recipe, parse_recipe
from steplab.workloads.workload import find_workload
from tests.parallel.ranks import run_ranks
from tests.parallel.training import SMALL, small_spec, whole_weights

T, K, E, D, F = 24, 2, 4, 16, 8
NAMES = ("out", "dx", "dweights", "dw_in", "dw_out")


def routing(kind, tokens):
    """Return experts_TK: two different experts per token."""
    if kind == "random":
        generator = torch.Generator().manual_seed(tokens)
        return torch.multinomial(torch.ones(tokens, E), K, generator=generator)
    if kind == "crowded":  # all to one rank of two, most to one expert
        return torch.tensor([[0, 1]]).repeat(tokens, 1)
    assert kind == "empty"  # the last two experts get nothing, the first rank's get one row each
    return torch.tensor([[0, 1]] + [[1, 0]] * (tokens - 1))


KINDS = ["random", "crowded", "empty"]


def module_and_tokens(kind, dtype, ranks, activation):
    """Return the whole module, and what all ranks together feed to it."""
    generator = torch.Generator().manual_seed(0)
    module = RoutedExperts(E, D, F, activation)
    for weight in module.parameters():
        nn.init.normal_(weight, std=0.3, generator=generator)
    x = torch.randn(ranks * T, D, generator=generator)
    weights = torch.rand(ranks * T, K, generator=generator).to(
        torch.promote_types(dtype, torch.float32)
    )
    return module.to(dtype), RoutedTokens(x.to(dtype), weights, routing(kind, ranks * T))


def gradients(module, tokens):
    """Return the output and the gradients of tokens, weights and matrices (this rank's)."""
    x, weights = (t.detach().requires_grad_() for t in tokens[:2])
    out, dropped = module(x, weights, tokens.experts_TK)
    assert dropped == 0
    slope = torch.linspace(-1, 1, D, dtype=out.dtype)
    (out * slope).sum().backward()
    return [out.detach(), x.grad, weights.grad, *(local(p.grad) for p in module.parameters())]


def on_this_rank(kind, dtype, impl, pieces, activation):
    """Compute this rank's share of what one process computes; return (its results, the truth's)."""
    world = current_world()
    module, tokens = module_and_tokens(kind, dtype, world.size, activation)
    module.impl = impl
    whole = gradients(module, tokens)
    module.zero_grad()
    mesh = rank_mesh("cpu", world.size)
    shard_experts(module, mesh)
    if pieces > 1:
        exchange = module.exchange
        module.exchange = lambda *inputs: exchange.in_pieces(pieces, *inputs)
    mine = gradients(module, RoutedTokens(*(t.chunk(world.size)[world.rank] for t in tokens)))
    expected = [t.chunk(world.size)[world.rank] for t in whole]
    return mine, expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_outputs_and_gradients_are_those_of_one_process(ranks, kind, dtype):
    for mine, expected in run_ranks(on_this_rank, ranks, kind, dtype, "grouped", 1, "gelu"):
        for name, a, b in zip(NAMES, mine, expected, strict=True):
            assert torch.equal(a, b), name


@pytest.mark.parametrize("impl", ["loop", "grouped"])
def test_in_two_pieces_the_products_are_smaller_and_the_sums_the_same(impl):
    """As on a GPU, where one half travels while the other is multiplied."""
    for mine, expected in run_ranks(on_this_rank, 2, "random", torch.float64, impl, 2, "swiglu"):
        for name, a, b in zip(NAMES, mine, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12, msg=name)


def sender_by_sender(dtype):
    """Compare exact gradients with those of one process that takes micro-batch after micro-batch.

    Four ranks; one process adds neighbors first: (a + b) + (c + d).
    """
    world = current_world()
    module, tokens = module_and_tokens("random", torch.float32, world.size, "gelu")
    batches = [RoutedTokens(*p) for p in zip(*(t.chunk(world.size) for t in tokens), strict=True)]
    found = []
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        for batch in batches:
            found.append(gradients(module, batch))
            module.zero_grad()
        shard_experts(module, rank_mesh("cpu", world.size), exact=True)
        mine = gradients(module, batches[world.rank])
    sums = [(a + b) + (c + d) for a, b, c, d in zip(*(f[3:] for f in found), strict=True)]
    parts = [total.chunk(world.size)[world.rank] for total in sums]
    return mine, [*found[world.rank][:3], *parts]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_exact_adds_the_senders_gradients_in_a_tree(dtype):
    for mine, expected in run_ranks(sender_by_sender, 4, dtype):
        for name, a, b in zip(NAMES, mine, expected, strict=True):
            assert torch.equal(a, b), name


def tsmoe_spec(recipe, accumulate):
    config = find_workload("tsmoe").resolve("tiny", {})
    return RunSpec(
        *("tsmoe", config, "tiny"),
        batch=1,
        accumulate=accumulate,
        recipe=parse_recipe(recipe),
        clip=0.0,
        ranks=current_world().size,
    )


@pytest.fixture(scope="module")
def alone():
    torch.set_num_threads(1)
    return step_gradients("plain", 4)


def step_gradients(recipe, accumulate):
    """Run a step without its update; return (loss, whole gradients, names of the state)."""
    spec = tsmoe_spec(recipe, accumulate)
    step = assemble(spec)
    step.optimizer.step = lambda *_: None
    step.keeps_gradients = True
    loss = step(next(micro_batches(step, spec))).loss
    grads = {}
    for name, p in step.model.named_parameters():
        grads[name] = p.grad.full_tensor() if is_sharded(p) else p.grad
    return loss.item(), grads, list(step.model.state_dict())


@pytest.mark.parametrize("data", ["naive", "flat", "overlap", "bucket", "fsdp"])
@pytest.mark.parametrize("expert", [2, 4])
def test_a_step_of_four_ranks_has_the_gradients_of_one_process(alone, expert, data):
    loss, truth, names = alone
    recipe = f"parallel={data},parallel.expert={expert}"
    for found in run_ranks(step_gradients, 4, recipe, 1):
        assert found[0] == pytest.approx(loss, rel=1e-6)
        assert found[2] == names
        for name, expected in truth.items():
            torch.testing.assert_close(found[1][name], expected, rtol=1e-4, atol=1e-6, msg=name)


def train(recipe, accumulate, steps):
    """Return losses, norms, weights after some steps with a binding clip."""
    config = find_workload("tsmoe").resolve("tiny", {**SMALL["tsmoe"], "num_experts": 4})
    spec = replace(small_spec("tsmoe", recipe, accumulate), config=config)
    step = assemble(spec)
    norms, clip = [], step_module.clip_gradients
    step_module.clip_gradients = lambda *words: norms.append(clip(*words)) or norms[-1]
    try:
        feed = micro_batches(step, spec)
        losses = [step(next(feed)).loss.item() for _ in range(steps)]
    finally:
        step_module.clip_gradients = clip
    assert min(norms) > spec.clip
    return losses, [float(norm) for norm in norms], whole_weights(step.model)


@pytest.fixture(scope="module")
def trained():
    (one,) = run_ranks(train, 1, "parallel=naive,parallel.exact=true", 4, 20)
    return one


@pytest.mark.parametrize(
    ("ranks", "expert", "data"), [(2, 2, "fsdp"), (4, 2, "fsdp"), (4, 4, "fsdp"), (4, 2, "bucket")]
)
def test_exact_has_the_same_bits_with_and_without_it(trained, ranks, expert, data):
    recipe = f"parallel={data},parallel.exact=true,parallel.expert={expert}"
    for losses, norms, weights in run_ranks(train, ranks, recipe, 4 // ranks, 20):
        assert (losses, norms) == trained[:2]
        for name, weight in trained[2].items():
            assert torch.equal(weights[name], weight), name


@pytest.mark.parametrize(
    "more",
    [
        "",
        "optimizer=one-pass",
        "precision=bf16-weights,optimizer=one-pass",
        "checkpointing=blocks",
        "compile=blocks,compile.backend=aot_eager,compile.fullgraph=false",
    ],
)
@pytest.mark.parametrize("data", ["bucket", "fsdp"])
def test_other_techniques_go_with_it(trained, data, more):
    recipe = ",".join(filter(None, [f"parallel={data},parallel.expert=2", more]))
    first, *others = run_ranks(train, 4, recipe, 1, 3)
    close = {"rtol": 3e-2, "atol": 3e-3} if "bf16" in more else {"rtol": 1e-4, "atol": 1e-5}
    assert first[0] == pytest.approx(trained[0][:3], rel=close["rtol"])
    assert first[1] == pytest.approx(trained[1][:3], rel=close["rtol"])
    for other in others:
        assert other[:2] == first[:2]
        assert all(torch.equal(other[2][name], weight) for name, weight in first[2].items())


@pytest.mark.parametrize(
    ("parts", "ranks", "fits"), [(3, 12, "1, 2, 4"), (4, 6, "1, 2"), (8, 8, "1, 2, 4")]
)
def test_parts_that_do_not_fit_are_refused_with_those_that_do(parts, ranks, fits):
    with pytest.raises(UserError, match=f"divide the 4 experts.*the {ranks} ranks") as refusal:
        check_expert_parts(RoutedExperts(4, D, F, "gelu"), parts, ranks)
    assert f"What fits: {fits}." in str(refusal.value)


def test_a_model_without_experts_is_refused():
    with pytest.raises(Unsupported, match="this model has none"):
        check_expert_parts(nn.Linear(2, 2), 2, 2)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("parallel.expert=0", "at least 1"),
        ("compile=blocks,parallel.expert=2", "fullgraph=false"),
        ("impl.experts=capacity,parallel.expert=2", "drops no token"),
        ("parallel=zero1,parallel.expert=2", "goes with .*fsdp, not with zero1"),
        ("parallel=fsdp,parallel.replicate=2,parallel.expert=2", "replicas of its own"),
    ],
)
def test_what_cannot_be_combined_with_it_is_refused(words, reason):
    with pytest.raises(UserError, match=reason):
        check_recipe(parse_recipe(words))


def test_with_pieces_of_graphs_it_can_be_compiled():
    check_recipe(parse_recipe("compile=blocks,compile.fullgraph=false,parallel.expert=2"))
