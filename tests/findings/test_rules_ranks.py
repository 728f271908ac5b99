"""Rules about several ranks: each on a folder that has the fault, and on one that has not."""

from pathlib import Path

import pytest

from steplab.core import Finding
from steplab.findings import case_of_folder, explain, is_note
from tests.trace.ranks.folders import Collective, Step, rank_events, write_rank, write_ranks
from tests.trace.traces import op


def found(folder: Path) -> dict[str, Finding]:
    """Findings above a note, by rule."""
    case = case_of_folder(folder)
    return {finding.rule: finding for finding in explain(case) if not is_note(finding, case)}


def computing(*collectives: Collective, length: float = 100.0) -> Step:
    """A step that computes all the time, with collectives beside it."""
    return Step(length, [(0, length)], collectives)


def apart(*collectives: Collective, length: float = 100.0) -> Step:
    """A step that stops computing while its collectives run."""
    borders = [0.0, *(t for one in collectives for t in (one.begin, one.end)), length]
    spans = [(a, b) for a, b in zip(borders[::2], borders[1::2], strict=True) if b > a]
    return Step(length, spans, collectives)


def test_a_straggler_is_told_with_its_cause(tmp_path):
    on_time = Step(100, [(0, 40), (90, 100)], [Collective(40, 90)])
    late = Step(100, [(40, 80), (90, 100)], [Collective(80, 90)], data=[(0, 40)])
    finding = found(write_ranks(tmp_path / "a", [on_time] * 3, [late] * 3))["straggler_rank"]
    assert finding.claim == "the others wait 40.00 ms for rank 1, in every step (data wait)"
    assert finding.gain_ms == pytest.approx(40) and "prefetch" in finding.remedy
    even = Step(100, [(0, 80), (90, 100)], [Collective(80, 90)])
    assert "straggler_rank" not in found(write_ranks(tmp_path / "b", [even] * 3, [even] * 3))


def test_a_rank_that_is_late_now_and_then_is_a_note(tmp_path):
    def steps(*late: float) -> list[Step]:
        return [Step(100, [(0, 40 + ms), (90, 100)], [Collective(40 + ms, 90)]) for ms in late]

    disturbed = write_ranks(tmp_path / "a", steps(*[0] * 9), steps(0, 0, 40, 0, 0, 0, 40, 0, 0))
    assert "straggler_rank" not in found(disturbed)
    assert "straggler_rank" in {finding.rule for finding in explain(case_of_folder(disturbed))}
    once = write_ranks(tmp_path / "c", steps(0), steps(40))  # they may have begun to record apart
    claims = {f.rule: f.claim for f in explain(case_of_folder(once))}
    assert "straggler_rank" not in found(once)
    assert "in the one step recorded" in claims["straggler_rank"]
    always = write_ranks(tmp_path / "b", steps(*[0] * 9), steps(30, 40, 20, 40, 30, 45, 40, 20, 30))
    assert found(always)["straggler_rank"].gain_ms == pytest.approx(295 / 9)


def test_exposed_communication_counts_transfer_only(tmp_path):
    on_time = Step(100, [(0, 40), (90, 100)], [Collective(40, 90)])
    late = Step(100, [(0, 70), (90, 100)], [Collective(70, 90)])
    finding = found(write_ranks(tmp_path / "a", [on_time] * 3, [late] * 3))
    assert finding["exposed_communication"].gain_ms == pytest.approx(20)
    hidden = [computing(Collective(40, 60))] * 3
    assert "exposed_communication" not in found(write_ranks(tmp_path / "b", hidden, hidden))


def test_the_latency_of_a_few_small_messages_is_no_fault(tmp_path):
    small = Collective(80, 88, mib=0.001)
    steps = [apart(small)] * 3
    assert not found(write_ranks(tmp_path / "a", steps, steps))
    both = [apart(Collective(20, 40), small)] * 3
    gain = found(write_ranks(tmp_path / "b", both, both))["exposed_communication"].gain_ms
    assert gain == pytest.approx(20)
    unknown = [apart(Collective(80, 88, mib=None))] * 3
    every = found(write_ranks(tmp_path / "c", unknown, unknown))
    assert every["exposed_communication"].gain_ms == pytest.approx(8)


def test_ranks_that_meet_often_wait_for_each_other_in_turns(tmp_path):
    def steps(rank: int) -> list[Step]:
        begins = [10 + 4 * i + (i + rank) % 2 for i in range(20)]
        ends = [13 + 4 * i for i in range(20)]
        pairs = zip(begins, ends, strict=True)
        return [apart(*(Collective(a, b, "broadcast", 0.01) for a, b in pairs))] * 2

    finding = found(write_ranks(tmp_path, steps(0), steps(1)))["small_buckets"]
    assert finding.claim == "20 times a step, a broadcast carries 10.2 KiB only"
    assert finding.gain_ms == pytest.approx(19 * 2.5)  # 2 ms each, and every other time 1 ms more


def test_many_small_messages_are_told(tmp_path):
    small = [Collective(10 + 4 * i, 12 + 4 * i, mib=0.01) for i in range(20)]
    steps = [apart(*small)] * 2
    every = found(write_ranks(tmp_path / "a", steps, steps))
    finding = every["small_buckets"]
    assert finding.claim == "20 times a step, an all-reduce carries 10.2 KiB only"
    assert finding.gain_ms == pytest.approx(38)  # one is left of 20, 2 ms each
    assert "exposed_communication" not in every or every["exposed_communication"].gain_ms < 3
    large = [apart(Collective(10, 20, mib=40))] * 2
    assert "small_buckets" not in found(write_ranks(tmp_path / "b", large, large))


def gathers(*begins: float) -> list[Collective]:
    return [Collective(t, t + 5, "all_gather", call="c10d::allgather_") for t in begins]


def test_gathers_that_come_when_they_are_needed_are_told(tmp_path):
    late = [apart(*gathers(10, 30, 50, 70))] * 2
    every = found(write_ranks(tmp_path / "a", late, late))
    assert every["late_allgather"].gain_ms == pytest.approx(15)  # the first has to be waited for
    assert "exposed_communication" not in every
    ahead = [computing(*gathers(10, 30, 50, 70))] * 2
    assert "late_allgather" not in found(write_ranks(tmp_path / "b", ahead, ahead))


def test_an_uneven_exchange_is_told_with_the_rank_that_has_most(tmp_path):
    def exchange(mib: float) -> list[Step]:
        return [apart(Collective(10, 30, "all_to_all", mib, "c10d::alltoall_base_"))] * 2

    finding = found(write_ranks(tmp_path / "a", exchange(2), exchange(6)))["uneven_exchange"]
    assert "rank 1 has most" in finding.claim
    assert finding.evidence == ("rank 0: 2.00 MiB a time", "rank 1: 6.00 MiB a time")
    assert finding.gain_ms == pytest.approx(20 / 3)
    even = found(write_ranks(tmp_path / "b", exchange(4), exchange(4)))
    assert "uneven_exchange" not in even


def test_an_exchange_that_is_shorter_is_hidden_better(tmp_path):
    def exchange(mib: float, begin: float) -> list[Step]:
        there = Collective(begin, 30, "all_to_all", mib, "c10d::alltoall_base_")
        return [Step(100, [(0, 25), (30, 100)], [there])] * 2

    # 20 ms, of which 5 are exposed, would be 10.
    finding = found(write_ranks(tmp_path / "a", exchange(2, 10), exchange(6, 10)))
    assert finding["uneven_exchange"].gain_ms == pytest.approx(5)


def test_ranks_that_disagree_on_the_order_are_told(tmp_path):
    reduce, gather = Collective(10, 12), gathers(20)[0]
    other = [Collective(10, 12, "all_gather", call="c10d::allgather_"), Collective(20, 25)]
    one, two = [computing(reduce, gather)] * 2, [computing(*other)] * 2
    finding = found(write_ranks(tmp_path / "a", one, two, groups=2))["desync"]
    assert finding.evidence[0] == (
        "step 0, collective 1: rank 0 calls all-reduce, rank 1 calls all-gather"
    )
    assert finding.stake_ms == pytest.approx(100) and finding.gain_ms is None  # before all others
    assert "desync" not in found(write_ranks(tmp_path / "b", one, one, groups=2))


@pytest.mark.parametrize(("rows", "is_padded"), [(3, True), (4, False)])
def test_padding_of_shards_is_told(tmp_path, rows, is_padded):
    # As fully_shard lays out one gradient of `rows` rows for two ranks.
    laid = op(
        "fsdp::chunk_cat",
        1_000,
        1_000,
        shapes=[[[rows, 64]], [], [], [2, 128]],
        dtypes=["TensorList", "Scalar", "Scalar", "float"],
    )
    steps = [apart(Collective(10, 50))] * 2
    for rank in range(2):
        write_rank(tmp_path, rank, 2, [*rank_events(steps), laid])
    every = found(tmp_path)
    assert ("padded_shards" in every) == is_padded
    if is_padded:
        finding = every["padded_shards"]
        assert finding.evidence == ("3x64: 192 elements become 256",)
        assert finding.gain_ms == pytest.approx(10)


def test_a_host_that_shards_too_slowly_is_told(tmp_path):
    ranges = [(f"FSDP::pre_forward ({i})", 10.0 * i, 10.0 * i + 4) for i in range(8)]
    slow = [Step(100, [(10 * i + 4, 10 * i + 10) for i in range(10)], ranges=ranges)] * 2
    finding = found(write_ranks(tmp_path / "a", slow, slow))["host_bound_sharding"]
    assert finding.gain_ms == pytest.approx(32)
    quick = [Step(100, [(0, 100)], ranges=ranges)] * 2
    assert "host_bound_sharding" not in found(write_ranks(tmp_path / "b", quick, quick))


def test_small_operators_of_sharding_are_the_host(tmp_path):
    # As a backward does it: a node of autograd, around the views and copies of small parameters.
    views = [op("aten::view", 40_000_000 + 20_000 * i, 2_000) for i in range(1_000)]
    node = op("autograd::engine::evaluate_function: Post", 40_000_000, 20_000_000)
    steps = [Step(100, [(0, 40), (60, 100)], ranges=[("FSDP::pre_backward (0)", 40, 60)])]
    for rank in range(2):
        write_rank(tmp_path / "a", rank, 2, [*rank_events(steps), node, *views])
        write_rank(
            tmp_path / "b", rank, 2, [*rank_events(steps), op("aten::mm", 40_000_000, 15_000_000)]
        )
    assert found(tmp_path / "a")["host_bound_sharding"].gain_ms == pytest.approx(20)
    assert "host_bound_sharding" not in found(tmp_path / "b")
