"""Every scheme computes on two ranks what one process does, alone and with other techniques."""

import math

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

import steplab
from steplab.core.errors import Unsupported, UserError
from steplab.modules.optimizer import MASTER, full_weights
from steplab.modules.shards import local
from steplab.parallel.gradients import Replicated, fill_buckets
from steplab.parallel.sharding import sharded_axis, without_shared_weights
from steplab.parallel.world import current_world, join_alone
from steplab.parallel.zero import share_out
from steplab.step.assemble import assemble
from steplab.techniques.recipes import parse_recipe
from tests.parallel.ranks import run_ranks
from tests.parallel.training import small_spec, train_steps, whole_weights

SCHEMES = ["naive", "flat", "overlap", "bucket", "ddp", "zero1", "fsdp"]
# One of each kind: hooks, a wrapper, whole parameters shared out, shards.
KINDS = ["overlap", "ddp", "zero1", "fsdp"]


@pytest.fixture(scope="module", params=["gpt", "tsmoe"])
def workload(request):
    return request.param


@pytest.fixture(scope="module")
def alone():
    """Train in one process with twice the micro-batches; once for each recipe."""
    known = {}

    def train(workload, recipe, accumulate=4):
        key = (workload, recipe, accumulate)
        if key not in known:
            known[key] = train_steps(*key)
        return known[key]

    return train


def assert_same(ranks, one, rtol=1e-4, atol=1e-5):
    (losses, weights), *others = ranks
    for other_losses, other_weights in others:
        assert other_losses == losses
        for name, weight in weights.items():
            assert torch.equal(weight, other_weights[name]), name
    assert losses == pytest.approx(one[0], rel=max(1e-5, rtol / 10))
    for name, weight in one[1].items():
        torch.testing.assert_close(weights[name], weight, rtol=rtol, atol=atol, msg=name)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_two_ranks_compute_what_one_would(workload, alone, scheme):
    ranks = run_ranks(train_steps, 2, workload, f"parallel={scheme}", 2)
    assert_same(ranks, alone(workload, "plain"))


def test_schemes_with_the_same_arithmetic_have_the_same_bits(workload):
    """One sum of two numbers is the same however it is sent; FSDP adds the norm otherwise."""
    found = [run_ranks(train_steps, 2, workload, f"parallel={s}", 1)[0] for s in SCHEMES[:-1]]
    for losses, weights in found[1:]:
        assert losses == found[0][0]
        assert all(torch.equal(weight, found[0][1][name]) for name, weight in weights.items())


@pytest.mark.parametrize("scheme", KINDS)
@pytest.mark.parametrize(
    "recipe",
    ["optimizer=one-pass", "optimizer=fused", "checkpointing=blocks", "optimizer=foreach"],
)
def test_other_techniques_go_with_it(alone, recipe, scheme):
    ranks = run_ranks(train_steps, 2, "tsmoe", f"{recipe},parallel={scheme}", 2)
    assert_same(ranks, alone("tsmoe", recipe))


@pytest.mark.parametrize("scheme", KINDS)
@pytest.mark.parametrize("recipe", ["precision=bf16", "precision=bf16-weights,optimizer=one-pass"])
def test_16_bits_go_with_it(alone, recipe, scheme):
    ranks = run_ranks(train_steps, 2, "tsmoe", f"{recipe},parallel={scheme}", 2)
    # Three updates of 1e-3 each, whose direction bf16 may turn where a gradient is near zero.
    assert_same(ranks, alone("tsmoe", recipe), rtol=2e-2, atol=4e-3)


def compiled_steps(recipe):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    found = train_steps("gpt", recipe, 2)
    return found, dict(torch._dynamo.utils.counters["stats"])


@pytest.mark.slow
@pytest.mark.parametrize("scheme", KINDS)
def test_blocks_are_compiled_once(alone, scheme):
    recipe = f"compile=blocks,compile.backend=aot_eager,parallel={scheme}"
    if scheme == "fsdp":
        recipe += ",parallel.together=2"
    ranks = run_ranks(compiled_steps, 2, recipe)
    assert all(stats["unique_graphs"] == 1 for _, stats in ranks)
    assert_same([found for found, _ in ranks], alone("gpt", "plain"))


@pytest.mark.parametrize(
    "words",
    [
        "parallel=fsdp,parallel.reshard=false",
        "parallel=fsdp,parallel.replicate=2",
        "parallel=fsdp,parallel.together=2,checkpointing=blocks",
    ],
)
@pytest.mark.parametrize("accumulate", [1, 2])
def test_ways_of_sharding(alone, words, accumulate):
    ranks = run_ranks(train_steps, 4, "gpt", words, accumulate)
    assert_same(ranks, alone("gpt", "plain", 4 * accumulate))


@pytest.mark.parametrize("scheme", ["naive", "bucket", "ddp", "zero1", "fsdp"])
def test_gradients_sent_in_bf16(alone, scheme):
    ranks = run_ranks(train_steps, 2, "gpt", f"parallel={scheme},parallel.reduce=bf16", 2)
    assert_same(ranks, alone("gpt", "plain"), rtol=2e-2, atol=1e-3)
    exact = run_ranks(train_steps, 2, "gpt", f"parallel={scheme}", 2)
    assert ranks[0][0][2] != exact[0][0][2], "nothing was rounded"


def modes(recipe):
    found = {}
    for mode in ("infer", "forward", "forward+backward"):
        spec = small_spec("gpt", recipe, 2, mode=mode)
        step = assemble(spec)
        feed = steplab.step.assemble.micro_batches(step, spec)
        found[mode] = [step(next(feed)).loss.item() for _ in range(2)]
    return found


@pytest.mark.parametrize("scheme", KINDS)
def test_steps_that_do_not_go_all_the_way(scheme):
    first, second = run_ranks(modes, 2, f"parallel={scheme}")
    assert first == second
    assert first["forward"] == pytest.approx(first["forward+backward"])
    assert first["forward"][0] > 0 and first["infer"] == [0, 0]


class Tied(nn.Module):
    """Dropout, an embedding that is the head too, and two blocks that share a matrix."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)) for _ in "abc")
        self.blocks[2][0].weight = self.blocks[1][0].weight
        self.head = nn.Linear(8, 11)
        self.head.weight = self.embedding.weight
        self.unused = nn.Linear(3, 1, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def train_tied(recipe, ranks, accumulate, seed=0):
    """Train a model whose first weights and random numbers differ from rank to rank."""
    torch.manual_seed(seed + current_world().rank)
    model = Tied()
    step = steplab.optimize(
        model,
        lambda model, tokens: nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens[0]),
        recipe,
        optimizer=lambda model, **how: torch.optim.AdamW(model.parameters(), lr=0.01, **how),
        clip=0.1,
    )
    generator = torch.Generator().manual_seed(5)
    data = [torch.randint(11, (1, 6), generator=generator) for _ in range(12)]
    rank, per_step = current_world().rank, ranks * accumulate
    losses = []
    for begin in range(0, len(data), per_step):
        mine = data[begin : begin + per_step][rank::ranks]
        losses.append(step(mine).loss.item())
    return losses, whole_weights(step.model)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_tied_weights_dropout_and_first_weights_that_differ(scheme):
    words = f"parallel={scheme}"
    one = run_ranks(train_tied, 1, words, 1, 4)
    two = run_ranks(train_tied, 2, words, 2, 2)
    assert_same(two, one[0])
    assert one[0][0][0] != run_ranks(train_tied, 1, words, 1, 4, 1)[0][0][0]


class Scalar(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide = nn.Linear(2, 2)
        self.narrow = nn.Linear(2, 2, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("model", "words"),
    [(Scalar, "scalar parameter scale"), (Mixed, "the model has bfloat16, float32")],
)
def test_models_that_cannot_be_sharded(model, words):
    with pytest.raises(Unsupported, match=words):
        steplab.optimize(model(), lambda model, batch: batch, "parallel=fsdp")


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("parallel=ddp,cuda_graph=step", "call its collectives"),
        ("parallel=ddp,compile=blocks,compile.mode=reduce-overhead", "still being sent"),
        ("parallel=fsdp,compile=whole", "block by block"),
        ("parallel=zero1,compile=blocks,compile.optimizer=true", "compile.optimizer cannot see"),
        ("parallel=fsdp,precision=fp16", "scaler"),
        ("parallel=zero1,precision=fp16", "scaler"),
        ("parallel=naive,parallel.bucket_mb=5", "belongs to bucket and ddp"),
        ("parallel=ddp,parallel.replicate=2", "belongs to fsdp"),
        ("parallel=bucket,parallel.bucket_mb=0", "at least 1"),
        ("parallel=ddp,parallel.exact=true,parallel.reduce=bf16", "sends gradients as they are"),
        ("parallel=fsdp,parallel.replicate=0", "at least 1"),
    ],
)
def test_recipes_that_are_refused(recipe, words):
    with pytest.raises(UserError, match=words):
        parse_recipe(recipe)


def refused(recipe):
    with pytest.raises(Unsupported) as raised:
        assemble(small_spec("gpt", recipe, 1))
    return str(raised.value)


def test_numbers_of_ranks_that_do_not_fit():
    (words, *_) = run_ranks(refused, 3, "parallel=fsdp,parallel.replicate=2")
    assert words.startswith("3 ranks cannot be divided into 2 replicas.")
    (words, *_) = run_ranks(refused, 3, "parallel=naive,parallel.exact=true")
    assert "3 ranks" in words and "1, 2, 4, 8" in words


def state_bytes(recipe):
    """Return the bytes of weights, gradients, optimizer state and fp32 weights on this rank."""
    from steplab.step.assemble import micro_batches

    spec = small_spec("tsmoe", recipe, 1)
    step = assemble(spec)
    sent = {}

    def watch(phase):
        sent["gradients"] = sum(local(p.grad).nbytes for p in held() if p.grad is not None)
        return torch.no_grad()

    def held():
        return list(step.model.parameters())

    feed = micro_batches(step, spec)
    step(next(feed))
    original, step.watch = (
        step.watch,
        lambda phase: watch(phase) if phase == "clip" else original(phase),
    )
    step(next(feed))
    state = step.optimizer.state.values()
    tensors = [(key, value) for entry in state for key, value in entry.items() if value.ndim]
    return {
        "weights": sum(local(p).nbytes for p in held()),
        "gradients": sent["gradients"],
        "state": sum(local(v).nbytes for key, v in tensors if key != MASTER),
        "masters": sum(local(v).nbytes for key, v in tensors if key == MASTER),
    }


@pytest.mark.parametrize("precision", ["", "precision=bf16-weights,optimizer=one-pass,"])
def test_what_is_sharded_is_held_once(precision):
    whole_model = run_ranks(state_bytes, 1, f"{precision}parallel=naive")[0]
    zero = run_ranks(state_bytes, 2, f"{precision}parallel=zero1")
    shards = run_ranks(state_bytes, 2, f"{precision}parallel=fsdp")
    for kind in ("gradients", "state", "masters"):
        assert sum(rank[kind] for rank in zero) == whole_model[kind]
        assert sum(rank[kind] for rank in shards) == whole_model[kind]
    assert all(rank["weights"] == whole_model["weights"] for rank in zero)
    assert sum(rank["weights"] for rank in shards) == whole_model["weights"]
    assert max(rank["state"] for rank in zero) < 0.55 * whole_model["state"]


def test_parameters_are_shared_out_by_size():
    sizes = [100, 60, 50, 10, 5, 1]
    shares = share_out([nn.Parameter(torch.zeros(n)) for n in sizes], 2)
    assert [sorted(p.numel() for p in share) for share in shares] == [[5, 10, 100], [1, 50, 60]]


def test_buckets_hold_one_dtype_and_the_last_parameters_come_first():
    wide = [nn.Parameter(torch.zeros(4)) for _ in range(3)]
    narrow = nn.Parameter(torch.zeros(4, dtype=torch.bfloat16))
    frozen = nn.Parameter(torch.zeros(4), requires_grad=False)
    parameters = [wide[0], narrow, wide[1], frozen, wide[2]]

    def buckets(size):
        return [[id(p) for p in bucket] for bucket in fill_buckets(parameters, size)]

    a, b, c, d = (id(p) for p in (*wide, narrow))
    assert buckets(0) == [[c], [b], [d], [a]]
    assert buckets(math.inf) == [[c, b, a], [d]]
    assert buckets(32) == [[c, b], [d], [a]]


def test_a_stack_of_matrices_is_cut_where_it_divides():
    assert sharded_axis((8, 3072, 768), 4) == 0
    assert sharded_axis((8, 3072, 768), 64) == 1
    assert sharded_axis((6, 10, 768), 4) == 2
    assert sharded_axis((5, 7, 11), 4) == 0
    assert sharded_axis((50257, 768), 8) == 0
    assert sharded_axis((8, 3072, 768), 4, shared_out=True) == 1


def placements(recipe):
    step = assemble(small_spec("tsmoe", recipe, 1))
    return {name: p.placements for name, p in step.model.named_parameters()}


def test_experts_are_not_padded():
    found = run_ranks(placements, 2, "parallel=fsdp")[0]
    experts = {name: where for name, where in found.items() if "experts.w_" in name}
    assert set(experts.values()) == {(Shard(1),)} and experts


def test_blocks_that_share_a_parameter_stay_together():
    blocks = Tied().blocks
    assert without_shared_weights(list(blocks)) == [blocks[0]]


def test_gradients_are_sent_in_one_order_whatever_the_backward_does():
    """A parameter that is ready early waits for those before it; an unused one gets zeros."""
    join_alone()
    model = Tied()
    scheme = Replicated(model, bucket_bytes=0, while_backward=True)
    with scheme.micro_batch(0, 1):
        model(torch.tensor([[1, 2]])).sum().backward()
    assert not scheme.pending, "the unused parameter is the last one registered, so it goes first"
    scheme.sync(is_last=True)
    assert model.unused.weight.grad is not None and not model.unused.weight.grad.any()


@pytest.mark.parametrize(
    ("recipe", "words"), [("plain", "a model each"), ("parallel=naive", "rank 0 of 1")]
)
def test_a_step_for_more_ranks_than_there_are_is_refused(recipe, words):
    with pytest.raises(UserError, match=words):
        assemble(small_spec("gpt", recipe, 1, ranks=2))


def full_and_rounded():
    spec = small_spec("gpt", "precision=bf16-weights,optimizer=one-pass,parallel=fsdp", 1)
    step = assemble(spec)
    feed = steplab.step.assemble.micro_batches(step, spec)
    step(next(feed))
    masters = {p: local(state[MASTER]) for p, state in step.optimizer.state.items()}
    with full_weights(step.optimizer):
        saved = step.model.state_dict().values()
        full = all(local(tensor).dtype == torch.float32 for tensor in saved)
        full &= all(torch.equal(local(p), master) for p, master in masters.items())
        for p in masters:
            local(p.detach()).add_(1.0)  # as a checkpoint that is read
    rounded = all(torch.equal(local(p), m.bfloat16()) for p, m in masters.items())
    return full, rounded, step(next(feed)).loss.isfinite().item()


def test_fp32_weights_of_shards_can_be_saved_and_replaced():
    assert run_ranks(full_and_rounded, 2) == [(True, True, True)] * 2
