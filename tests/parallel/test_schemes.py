from dataclasses import replace

import pytest
import torch

from steplab.core import RunSpec
from steplab.core.errors import UserError
from steplab.parallel.world import current_world
from steplab.step.assemble import assemble, micro_batches
from steplab.techniques.recipes import parse_recipe
from steplab.workloads.workload import find_workload
from tests.parallel.ranks import run_ranks

STEPS, MICRO_BATCHES = 3, 2


def train_steps(workload, recipe, accumulate):
    """Return (losses, weights) after a few steps with a binding clip."""
    entry = find_workload(workload)
    spec = RunSpec(
        workload,
        entry.resolve("tiny", {}),
        "tiny",
        batch=2,
        accumulate=accumulate,
        recipe=parse_recipe(recipe),
        clip=0.1,
        ranks=current_world().size,
    )
    step = assemble(spec)
    feed = micro_batches(step, spec)
    losses = [step(next(feed)).loss.item() for _ in range(STEPS)]
    return losses, {n: p.detach().clone() for n, p in step.model.named_parameters()}


@pytest.fixture(scope="module", params=["gpt", "tsmoe"])
def workload(request):
    return request.param


@pytest.fixture(scope="module")
def alone(workload):
    torch.set_num_threads(1)
    return train_steps(workload, "plain", 2 * MICRO_BATCHES)


@pytest.mark.parametrize("scheme", ["naive", "flat", "overlap"])
def test_two_ranks_compute_what_one_would(workload, alone, scheme):
    first, second = run_ranks(train_steps, 2, workload, f"parallel={scheme}", MICRO_BATCHES)
    assert first[0] == second[0]
    for name, weight in first[1].items():
        assert torch.equal(weight, second[1][name]), name
    assert first[0] == pytest.approx(alone[0], rel=1e-5)
    for name, weight in alone[1].items():
        torch.testing.assert_close(first[1][name], weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("recipe", "words"), [("plain", "a model each"), ("parallel=naive", "rank 0 of 1")]
)
def test_a_step_for_more_ranks_than_there_are_is_refused(recipe, words):
    spec = RunSpec("gpt", find_workload("gpt").resolve("tiny", {}), ranks=2)
    with pytest.raises(UserError, match=words):
        assemble(replace(spec, recipe=parse_recipe(recipe)))
