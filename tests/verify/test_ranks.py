"""The gate for several ranks: honest schemes are green, and every planted fault is red."""

import re
from dataclasses import replace
from functools import cache
from itertools import chain, islice

import pytest
import torch
import torch.distributed as dist

from steplab.core import PLAIN, RunSpec
from steplab.core.ladder import Check, verdict
from steplab.parallel.sharding import TreeReduceScatter
from steplab.parallel.world import current_world
from steplab.techniques.recipes import parse_recipe
from steplab.verify.candidate import Candidate
from steplab.verify.judge import judge
from steplab.verify.numerics import take_snapshot
from steplab.verify.ranks import check_agreement, checksum
from steplab.verify.references import compute_reference, make_references, step_without_dropout
from steplab.verify.shapes import GateShape, at_shape, shapes_to_try, with_batch
from steplab.workloads.workload import find_workload
from tests.parallel.ranks import run_ranks
from tests.parallel.training import SMALL

RANKS = 2


# The planted faults need no more than one small block.
ONE_LAYER = {"layers": 1, "width": 32, "ff_width": 64, "heads": 2, "context": 32, "vocab_size": 64}
TWO_LAYERS = {
    "gpt": SMALL["gpt"],
    "tsmoe": SMALL["tsmoe4"] | {"hidden_size": 48, "seq_max_len": 40},
}


def spec_of(workload, recipe="plain", accumulate=1, **config):
    config = find_workload(workload).resolve("tiny", config)
    return RunSpec(
        *(workload, config, "tiny"),
        batch=1,
        accumulate=accumulate,
        recipe=parse_recipe(recipe),
        ranks=1 if recipe == "plain" else RANKS,
    )


def snapshot(spec, plant=None):
    """Return what the ranks have together; `plant` changes the assembled step of each."""
    spec = replace(spec, ranks=current_world().size)
    step = step_without_dropout(spec)
    if plant is not None:
        plant(step)
    return take_snapshot(step, spec)


@cache
def one_process(workload, layers=2):
    """Return (what is trained, what one process computes in fp32, and in fp64)."""
    torch.set_num_threads(1)
    config = TWO_LAYERS[workload] if layers == 2 else ONE_LAYER
    spec = spec_of(workload, accumulate=RANKS, **config)
    shape = GateShape("own", "", spec)
    computed = [compute_reference(shape, dtype) for dtype in ("fp32", "fp64")]
    return (workload, config), *computed


@pytest.fixture(scope="module", params=["gpt", "tsmoe"])
def references(request):
    return one_process(request.param)


@pytest.fixture(scope="module")
def one_layer():
    return one_process("gpt", layers=1)


def checks_of(references, recipe, plant=None):
    (workload, config), peer, truth = references
    found = run_ranks(snapshot, RANKS, spec_of(workload, recipe, **config), plant)[0]
    return {check.name: check for check in judge(found, [peer], truth, "")}


@pytest.mark.parametrize("data", ["naive", "flat", "overlap", "bucket", "ddp", "zero1"])
def test_two_ranks_have_the_bits_of_one_process(references, data):
    checks = checks_of(references, f"parallel={data}")
    assert verdict(list(checks.values())) == "bit-equal", checks


def test_sharded_gradients_have_these_bits_too_but_their_norm_is_summed_over_ranks(references):
    checks = checks_of(references, "parallel=fsdp")
    assert verdict(list(checks.values())) == "within rounding", checks
    checks = checks_of(references, "parallel=fsdp,parallel.exact=true")
    assert verdict(list(checks.values())) == "bit-equal", checks


@pytest.mark.parametrize("data", ["bucket", "fsdp"])
def test_experts_that_are_shared_out_pass(data):
    checks = checks_of(one_process("tsmoe"), f"parallel={data},parallel.expert=2")
    assert verdict(list(checks.values())) == "within rounding", checks


def after_sync(step, change):
    """Let `change(parameter)` follow on the sum over ranks."""
    sync = step.parts.scheme.sync

    def wrong(is_last):
        sync(is_last)
        for p in step.model.parameters():
            change(p)

    step.parts.scheme.sync = wrong


def forgotten_division(step):
    """The loss is divided by the micro-batches of one rank only."""
    after_sync(step, lambda p: p.grad.mul_(RANKS))


def divided_twice(step):
    """The sum over ranks is taken for a mean, and divided once more."""
    after_sync(step, lambda p: p.grad.div_(RANKS))


def parts_in_another_order(step):
    """Reduced in parts, which come back in the order of another group."""
    after_sync(step, lambda p: p.grad.copy_(torch.cat(p.grad.flatten().chunk(2)[::-1]).view_as(p)))


class SwappedParts(TreeReduceScatter):
    """Gives every rank the part of its neighbor."""

    def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
        swapped = torch.cat(input_tensor.chunk(RANKS)[::-1])
        super().__call__(output_tensor, swapped, group, op, async_op)


def scattered_in_another_order(step):
    """The group that scatters has its ranks in another order than the one that gathers."""
    for unit in step.parts.scheme.units:
        unit.set_custom_reduce_scatter(SwappedParts())


def groups_of_one(step):
    """Every rank reduces over a group that the other is not in."""
    group = [dist.new_group([rank]) for rank in range(RANKS)][dist.get_rank()]
    step.parts.scheme.gradient_group = lambda p: group


def never_reduced(step):
    """One parameter is forgotten."""
    group = [dist.new_group([rank]) for rank in range(RANKS)][dist.get_rank()]
    odd = min(step.model.parameters(), key=torch.Tensor.numel)
    step.parts.scheme.gradient_group = lambda p: group if p is odd else None


def shifted(step, by):
    """Let the stream of batches begin `by` later, or earlier with a batch that nobody else has."""
    batches = step.workload.batches

    def wrong(size, device, seed):
        stream = batches(size, device, seed)
        first = [next(batches(size, device, seed + 1)) for _ in range(-by)]
        return chain(first, islice(stream, max(by, 0), None))

    step.workload.batches = wrong


def other_seed(step):
    """Rank 1 draws batches of its own."""
    if dist.get_rank() == 1:
        batches = step.workload.batches
        step.workload.batches = lambda size, device, seed: batches(size, device, seed + 1)


def same_data(step):
    """Rank 1 has the micro-batches of rank 0."""
    if dist.get_rank() == 1:
        shifted(step, -1)


def swapped_data(step):
    """Each rank has the micro-batches of the other."""
    shifted(step, 1 if dist.get_rank() == 0 else -1)


def changed_on_the_way(step):
    """What rank 1 fetches is right, what it computes with is not."""
    loss = step.forward
    if dist.get_rank() == 1:
        step.forward = lambda model, batch: loss(model, tuple(t.flip(0, 1) for t in batch))


def other_weights(step):
    """Rank 1 was initialized by itself."""
    if dist.get_rank() == 1:
        with torch.no_grad():
            next(step.model.parameters()).mul_(1 + 2**-10)


FAULTS = [
    (forgotten_division, "gradients", "too far from fp64"),
    (divided_twice, "gradients", "too far from fp64"),
    (parts_in_another_order, "gradients", "too far from fp64"),
    (scattered_in_another_order, "gradients", "too far from fp64"),
    (groups_of_one, "ranks agree", "the gradient of .* differs between ranks 0 and 1"),
    (never_reduced, "ranks agree", "the gradient of .* differs between ranks 0 and 1"),
    (other_seed, "data", "rank 1 does not have micro-batch 1 of step 0 of one process$"),
    (same_data, "data", "rank 1 does not have micro-batch 1 of .*: it has micro-batch 0 of step 0"),
    (swapped_data, "data", "rank 0 does not have micro-batch 0 of .*: it has micro-batch 1 of"),
    (changed_on_the_way, "gradients", "too far from fp64"),
    (other_weights, "ranks agree", "differs between ranks 0 and 1"),
]


@pytest.mark.parametrize(("plant", "name", "detail"), FAULTS, ids=[f[0].__name__ for f in FAULTS])
def test_planted_faults_are_red(one_layer, plant, name, detail):
    scheme = "fsdp" if plant is scattered_in_another_order else "naive"
    checks = checks_of(one_layer, f"parallel={scheme}", plant)
    assert not checks[name].passed
    assert re.search(detail, checks[name].detail), checks[name].detail
    red = "unverified" if name == "data" else "failed"
    assert verdict(list(checks.values())) == red


def test_an_honest_step_of_the_small_model_is_green(one_layer):
    checks = checks_of(one_layer, "parallel=naive")
    assert verdict(list(checks.values())) == "bit-equal"
    assert "have the same bits" in checks["ranks agree"].detail


def open_candidate(spec, shapes, folder):
    return Candidate(spec, shapes, folder).open(lambda text: None)


def test_a_candidate_is_verified_by_all_its_ranks_and_measured(tmp_path):
    spec = replace(spec_of("gpt", "parallel=flat", accumulate=2, **ONE_LAYER), ranks=RANKS, steps=2)
    own, single, *_ = shapes_to_try(spec)
    shapes = (own, with_batch(single, 2))
    for shape in shapes:
        assert not make_references(shape, "fp64", tmp_path)
        assert not make_references(shape, "fp32", tmp_path)
    first, second = run_ranks(open_candidate, RANKS, spec, shapes, tmp_path)
    assert first.run.status == "ok", first.run.reason
    assert first.run.clock is not None and second.checks == first.checks
    named = {check.name for check in first.checks}
    assert {"ranks agree", "bits", "ranks agree at batch 1, then batch 2"} <= named
    assert verdict(first.checks) == "within rounding"  # of (a + c) + (b + d)


def test_the_truth_is_one_process_with_the_micro_batches_of_all_ranks():
    spec = replace(spec_of("gpt", "parallel=naive", accumulate=3), batch=2, size="", ranks=4)
    own, single, small = shapes_to_try(spec)
    for shape, accumulate in ((own, 12), (single, 4), (small, 4)):
        assert (shape.spec.ranks, shape.spec.accumulate) == (1, accumulate)
        assert shape.spec.recipe == PLAIN
        ranks = at_shape(spec, shape)
        assert (ranks.ranks, ranks.accumulate) == (4, accumulate // 4)
        assert ranks.recipe == spec.recipe


def test_parts_are_compared_with_the_same_parts():
    a, b = {"w, part 0": 1, "norm": 5}, {"w, part 1": 2, "norm": 5}
    assert check_agreement([a, b]) == Check(
        "ranks agree", True, "1 tensors that several ranks hold have the same bits"
    )
    red = check_agreement([a, b, {**a, "norm": 6}, {**b, "w, part 1": 3}])
    assert not red.passed
    assert red.detail == "norm differs between ranks 0 and 2, and 1 more"


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool])
def test_a_checksum_sees_every_bit_and_the_order(dtype):
    tensor = (torch.arange(12) % 5 < 2).to(dtype).view(3, 4)
    assert checksum(tensor) == checksum(tensor.t().contiguous().t())
    assert checksum(tensor) != checksum(tensor.flip(1))
    changed = tensor.clone()
    changed[2, 3] = 1 - changed[2, 3].to(torch.int64)
    assert checksum(tensor) != checksum(changed)


def test_negative_zero_is_not_zero():
    assert checksum(torch.tensor([0.0, 0.0])) != checksum(torch.tensor([0.0, -0.0]))


@pytest.mark.parametrize(
    ("details", "word"),
    [
        ([], "unverified"),
        ([(True, "12 compared"), (True, "bit-equal to one process: 3")], "bit-equal"),
        ([(True, "12 compared"), (True, "within rounding: 1 of 3 differ")], "within rounding"),
        ([(True, "bit-equal to one process"), (True, "within rounding: 1")], "within rounding"),
        ([(True, "bit-equal to one process"), (False, "unverified: other data")], "unverified"),
        ([(False, "unverified: too noisy"), (False, "1 of 3 too far")], "failed"),
    ],
)
def test_the_verdict_in_one_word(details, word):
    assert verdict([Check("a check", *detail) for detail in details]) == word
