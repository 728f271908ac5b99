"""What a scheme says it will send is what the counter sees."""

from dataclasses import replace
from pathlib import Path

import pytest

from steplab.core import RunSpec
from steplab.core.run import Communication, new_run
from steplab.parallel.world import current_world
from steplab.probes.communication import CommunicationProbe
from steplab.probes.environment import capture_environment
from steplab.probes.probe import Subject
from steplab.step.assemble import assemble, micro_batches
from steplab.techniques.parallel import TECHNIQUE
from steplab.techniques.recipes import parse_recipe
from steplab.workloads.user_model import load_user_model
from tests.parallel.ranks import run_ranks
from tests.parallel.training import small_spec

FROZEN = Path(__file__).parents[2] / "examples" / "faults" / "host_bound_sharding.py"


def seen_and_planned(workload, recipe, accumulate):
    return seen_and_planned_of(small_spec(workload, recipe, accumulate))


def seen_and_planned_with_frozen(recipe):
    entry = load_user_model(f"{FROZEN}:clean")
    techniques = parse_recipe(recipe)
    return seen_and_planned_of(
        RunSpec(entry.name, entry.resolve("", {}), batch=1, recipe=techniques, ranks=2)
    )


def seen_and_planned_of(spec):
    assert spec.ranks == current_world().size
    step = assemble(spec)
    subject = Subject(step, micro_batches(step, spec), spec, capture_environment())
    subject.run_step()
    probe = CommunicationProbe()
    probe.inspect(subject)
    return probe.result()


def mismatch_of(recipe, communication: Communication):
    settings = parse_recipe(recipe).techniques["parallel"]
    run = new_run(RunSpec("gpt", recipe=parse_recipe(recipe), ranks=2), capture_environment())
    return TECHNIQUE.mismatch(settings, replace(run, communication=communication))


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    "recipe",
    [
        *(f"parallel={name}" for name in ("naive", "flat", "bucket", "ddp", "zero1", "fsdp")),
        "parallel=overlap,parallel.reduce=bf16",
        "parallel=fsdp,parallel.reshard=false",
        "parallel=fsdp,parallel.together=2",
        "parallel=fsdp,parallel.reduce=bf16,checkpointing=blocks",
        *(f"parallel={name},parallel.exact=true" for name in ("bucket", "ddp", "zero1", "fsdp")),
    ],
)
def test_a_step_sends_what_was_planned(recipe, accumulate):
    for found in run_ranks(seen_and_planned, 2, "tsmoe", recipe, accumulate):
        assert found.planned
        assert mismatch_of(recipe, found) == ""


def test_what_is_frozen_is_gathered_and_not_scattered():
    for found in run_ranks(seen_and_planned_with_frozen, 2, "parallel=fsdp"):
        gathered, scattered = found.planned
        assert gathered.bytes > 10 * scattered.bytes > 0
        assert mismatch_of("parallel=fsdp", found) == ""


def test_experts_are_reduced_over_the_ranks_that_share_them():
    recipe = "parallel=bucket,parallel.expert=2"
    for found in run_ranks(seen_and_planned, 4, "tsmoe4", recipe, 2):
        assert {one.ranks for one in found.planned} == {2, 4}
        assert mismatch_of(recipe, found) == ""


def test_replicas_too():
    recipe = "parallel=fsdp,parallel.replicate=2"
    for found in run_ranks(seen_and_planned, 4, "gpt", recipe, 2):
        assert len(found.planned) == 3
        assert mismatch_of(recipe, found) == ""


@pytest.mark.parametrize("recipe", ["parallel=naive", "parallel=fsdp"])
def test_a_collective_that_is_missing_or_repeated_is_a_mismatch(recipe):
    (found, _) = run_ranks(seen_and_planned, 2, "gpt", recipe, 1)
    asked = found.planned[0]
    others = tuple(one for one in found.collectives if one.op != asked.op)
    assert "but there were 0 with 0" in mismatch_of(recipe, replace(found, collectives=others))
    more = replace(asked, calls=asked.calls + 1)
    words = mismatch_of(recipe, replace(found, collectives=(*others, more)))
    assert f"needs {asked.calls} calls" in words
    twice = replace(asked, bytes=2 * asked.bytes + 2**20)
    assert mismatch_of(recipe, replace(found, collectives=(*others, twice)))


def test_a_run_without_a_plan_says_so():
    recipe = parse_recipe("parallel=fsdp,parallel.expert=2")
    run = new_run(RunSpec("gpt", recipe=recipe), capture_environment())
    told = replace(run, communication=Communication(()))
    assert TECHNIQUE.unverified(recipe.techniques["parallel"], told).startswith("unverified")
    assert TECHNIQUE.unverified(recipe.techniques["parallel"], run) == ""
