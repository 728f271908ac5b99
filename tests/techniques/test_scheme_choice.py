"""Which schemes are offered on a step that ranks share, and the most that they can gain."""

from dataclasses import replace

import pytest

from steplab.core import MemoryTimeline, Profile
from steplab.core.run import Collective, Communication, RankResult
from steplab.techniques.context import StepContext
from steplab.techniques.parallel import TECHNIQUE
from steplab.techniques.recipes import parse_recipe
from steplab.tune.ceilings import ceiling, serves
from tests.compare.sides import run_of

MIB = 2**20
EXPOSED_MS = (3.0, 2.0)  # of 10 ms, by rank
AT_PEAK = {"weights": 5 * MIB, "gradients": 5 * MIB, "optimizer state": 10 * MIB, "other": MIB}
COLLECTIVES = {
    "naive": (Collective("all-reduce", 2, 38, 5 * MIB),),
    "bucket": (Collective("all-reduce", 2, 1, 5 * MIB),),
    "zero1": (Collective("reduce", 2, 4, 5 * MIB), Collective("broadcast", 2, 2, 5 * MIB)),
    "fsdp": (
        Collective("all-gather", 2, 11, 9 * MIB),
        Collective("reduce-scatter", 2, 6, 5 * MIB),
    ),
}


def shared_run(recipe, ranks=2):
    recipe = parse_recipe(recipe)
    data = recipe.techniques["parallel"]["data"]
    sent = COLLECTIVES.get(data, COLLECTIVES["bucket"])
    timeline = MemoryTimeline((), {}, {}, sum(AT_PEAK.values()), 0.0, AT_PEAK, (), ())
    return replace(
        run_of(recipe=recipe.techniques, ranks=ranks),
        ranks=tuple(RankResult(10.0, 1.0, ms, None, None) for ms in EXPOSED_MS),
        communication=Communication(sent, {"weights": 5 * MIB, "optimizer state": 10 * MIB}),
        profile=Profile((0, 1, 1, 1), ("t",), memory=timeline),
    )


def offered(run, objective="time"):
    """Return what is suggested for an objective, by its settings as words."""
    current = run.spec.recipe.techniques["parallel"]
    found = TECHNIQUE.suggest(StepContext(run, objective), current)
    return {
        ",".join(
            f"{value}" if key == "data" else f"{key}={value}" for key, value in s.settings.items()
        ): s
        for s in found
        if serves(s.savings, objective)
    }


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        ("parallel=naive", {"bucket", "ddp", "overlap"}),
        ("parallel=flat", {"bucket", "ddp", "overlap"}),
        ("parallel=overlap", {"bucket", "ddp"}),
        ("parallel=bucket", {"ddp", "overlap", "bucket,bucket_mb=1"}),
        ("parallel=bucket,parallel.bucket_mb=1", {"ddp", "overlap"}),
        ("parallel=ddp", {"bucket", "overlap", "ddp,bucket_mb=1"}),
        ("parallel=zero1", {"bucket", "ddp", "overlap"}),
        ("parallel=fsdp", {"bucket", "ddp", "overlap", "fsdp,reshard=False", "fsdp,together=4"}),
        ("parallel=naive,parallel.exact=true,precision=bf16",
         {"bucket,exact=True", "ddp,exact=True", "overlap,exact=True"}),
        ("parallel=naive,precision=bf16", {"bucket", "ddp", "overlap"}),  # 135 KiB a message
        ("parallel=bucket,precision=bf16",
         {"ddp", "overlap", "bucket,bucket_mb=1", "bucket,reduce=bf16"}),
        ("parallel=bucket,parallel.reduce=bf16,precision=bf16",
         {"ddp,reduce=bf16", "overlap,reduce=bf16", "bucket,reduce=bf16,bucket_mb=1"}),
    ],
)  # fmt: skip
def test_what_could_hide_or_shrink_communication_is_offered(recipe, expected):
    assert set(offered(shared_run(recipe))) == expected


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        ("parallel=naive", {"zero1": 7.5, "fsdp": 10.0}),
        ("parallel=zero1", {"fsdp": 5.0}),
        ("parallel=fsdp", {}),
        ("parallel=bucket,parallel.expert=2", {"fsdp,expert=2": 10.0}),
    ],
)
def test_for_memory_half_of_what_two_ranks_hold_twice_can_go(recipe, expected):
    run = shared_run(recipe)
    found = offered(run, "memory")
    limits = {name: ceiling(s.savings, run, {}, "memory").value for name, s in found.items()}
    assert limits == {name: mib * MIB for name, mib in expected.items()}


@pytest.mark.parametrize("scheme", ["naive", "flat", "overlap", "bucket", "ddp", "zero1", "fsdp"])
def test_nothing_gains_more_than_the_exposed_communication(scheme):
    run = shared_run(f"parallel={scheme},precision=bf16")
    for suggestion in offered(run).values():
        limit = ceiling(suggestion.savings, run, {}, "time")
        assert 0 < limit.value <= min(EXPOSED_MS)
        assert limit.parts.startswith("exposed communication")
        assert "MiB" in suggestion.reason
        TECHNIQUE.check(suggestion.settings, "parallel")


def test_of_eight_ranks_one_part_in_eight_stays():
    run = shared_run("parallel=bucket", ranks=8)
    assert ceiling(offered(run, "memory")["fsdp"].savings, run, {}, "memory").value == 17.5 * MIB


def test_the_last_of_five_buckets_stays_exposed():
    run = shared_run("parallel=bucket")
    found = offered(run)["bucket,bucket_mb=1"]
    assert ceiling(found.savings, run, {}, "time").value == pytest.approx(2.0 * 4 / 5)
    assert found.reason == "5.00 MiB in 1 bucket, 5 by this"


def test_what_would_not_fit_whole_stays_sharded():
    run = shared_run("parallel=fsdp")
    small = replace(run, memory=replace(run.memory, total=run.memory.peak + MIB))
    assert set(offered(small)) == {"fsdp,reshard=False", "fsdp,together=4"}


def test_a_forward_sends_no_gradients():
    run = shared_run("parallel=bucket")
    run = replace(run, spec=replace(run.spec, mode="forward"))
    assert offered(run) == {} and set(offered(run, "memory")) == {"zero1", "fsdp"}


def test_one_rank_has_nobody_to_share_with():
    run = replace(shared_run("parallel=bucket", ranks=1), ranks=())
    assert offered(run) == {} == offered(run, "memory")
    assert TECHNIQUE.suggest(StepContext(run_of(ranks=2)), {}) == []
