"""Traces of several ranks: matched, on one clock, with the rank that the others wait for."""

import gzip
import json
from dataclasses import replace

import numpy as np
import pytest

from steplab.compare.rank_diff import collectives_diff, waits_diff
from steplab.core import codec
from steplab.core.errors import UserError
from steplab.report.ranks import collectives_table, ranks_table
from steplab.trace.ranks.folder import analyze_folder
from steplab.trace.ranks.rank_trace import read_rank
from tests.trace.ranks.folders import MS, Collective, Step, rank_events, write_rank, write_ranks
from tests.trace.traces import kernel, launched, range_


def step(arrival: float, end: float = 40.0, **more: object) -> Step:
    """A step of 50 ms that computes until `arrival`, then sums up gradients until `end`."""
    return Step(50, [(0, arrival)], [Collective(arrival, end)], **more)


def test_communication_is_split_into_waiting_and_transfer(tmp_path):
    found = analyze_folder(write_ranks(tmp_path, [step(10)] * 3, [step(30)] * 3))
    terms, split = found.budget.typical.terms, found.split[found.budget.typical.number]
    assert split == pytest.approx({"transfer": 10.0, "waiting for rank 1": 10.0})
    assert terms["communication"] == pytest.approx(sum(split.values()))
    assert terms["kernels"] == pytest.approx(20, abs=0.02)
    waits = {row.rank: (row.waiting_ms, row.waited_for_ms) for row in found.rows}
    assert waits == {0: pytest.approx((20, 0)), 1: pytest.approx((0, 20))}


def test_the_late_rank_is_named_with_delay_steps_and_cause(tmp_path):
    slow = Step(50, [(20, 30)], [Collective(30, 40)], data=[(0, 20)])
    found = analyze_folder(
        write_ranks(tmp_path, [step(10)] * 5, [step(10), step(10), slow, slow, slow])
    ).late
    assert (found.rank, found.steps, found.cause) == (1, (2, 3, 4), "data wait")
    assert found.delay_ms == pytest.approx(20) and found.excess_ms == pytest.approx(20)
    assert found.when == "from step 2 to 4, of 5 recorded"


def test_extra_work_of_the_late_rank_is_named(tmp_path):
    more = Step(50, [(0, 10), (10, 30)], [Collective(30, 40)], names=("aten::mm", "aten::sort"))
    found = analyze_folder(write_ranks(tmp_path, [step(10)] * 2, [more] * 2)).late
    assert found.cause == "operators"
    assert found.evidence[0] == "aten::sort: +1 a step, 20.00 ms more"


def test_a_rank_whose_work_is_all_slower_has_lower_clocks(tmp_path):
    found = analyze_folder(write_ranks(tmp_path, [step(10)] * 2, [step(20)] * 2)).late
    assert "lower clocks" in found.evidence[0] and "2" in found.evidence[0]


def test_nobody_is_late_where_ranks_take_turns(tmp_path):
    turns = [step(10), step(30)]
    assert analyze_folder(write_ranks(tmp_path, turns, turns[::-1])).late is None


def test_waiting_that_something_hides_is_not_counted(tmp_path):
    hidden = Step(50, [(0, 35)], [Collective(10, 40)])
    found = analyze_folder(write_ranks(tmp_path, [hidden] * 2, [step(30)] * 2))
    assert found.rows[0].waiting_ms == pytest.approx(0)
    assert found.rows[0].overlap == pytest.approx(25 / 30)


def test_clocks_of_other_machines_are_set_by_the_ends_of_collectives(tmp_path):
    for rank, ahead in ((0, 0.0), (1, 7.0), (2, -3.0)):
        late = [step(30 if rank == 1 else 10)] * 4
        write_rank(tmp_path, rank, 3, rank_events(late, ahead), host=f"machine {rank}")
    found = analyze_folder(tmp_path)
    assert found.clocks.ahead.tolist() == [0, 7 * MS, -3 * MS]
    assert (found.late.rank, found.late.delay_ms) == (1, pytest.approx(20))
    assert found.clocks.impossible == 0


def test_a_drift_is_told(tmp_path):
    write_rank(tmp_path, 0, 2, rank_events([step(10)] * 24), host="a")
    slower = [replace(step(10), length=50.001)] * 24  # 1 us in 50 ms
    write_rank(tmp_path, 1, 2, rank_events(slower), host="b")
    found = analyze_folder(tmp_path)
    assert found.clocks.drift[1] == pytest.approx(20_000, rel=0.01)
    assert any("drift by up to 20.0 us a second" in note for note in found.notes)


def test_one_machine_has_one_clock_unless_that_is_impossible(tmp_path):
    folder = write_ranks(tmp_path / "a", [step(10)] * 2, [step(10, 45)] * 2)
    assert not analyze_folder(folder).clocks.ahead.any()
    write_rank(tmp_path / "b", 0, 2, rank_events([step(10)] * 2))
    write_rank(tmp_path / "b", 1, 2, rank_events([step(10)] * 2, ahead_ms=200))
    assert analyze_folder(tmp_path / "b").clocks.ahead.tolist() == [0, 200 * MS]


def test_collectives_are_counted_by_kind_with_their_bandwidth(tmp_path):
    one = [replace(step(10), collectives=[Collective(10, 20), Collective(20, 30, "all_gather")])]
    kinds = {kind.kind: kind for kind in analyze_folder(write_ranks(tmp_path, one, one)).kinds}
    reduce, gather = kinds["all-reduce"], kinds["all-gather"]
    assert (reduce.count, reduce.bytes, reduce.size) == (1, 4 * 2**20, 2)
    assert reduce.bus_bytes_per_s == pytest.approx(4 * 2**20 / 0.01)  # 2 (n - 1) / n is 1
    assert gather.bytes == 8 * 2**20  # of all ranks together
    assert reduce.exposed == pytest.approx(1, abs=0.01)


def test_collectives_under_way_together_count_once(tmp_path):
    together = [Collective(10, 30), Collective(15, 40), Collective(20, 25)]
    steps = [Step(100, [(0, 20)], together)] * 2
    (kind,) = analyze_folder(write_ranks(tmp_path, steps, steps)).kinds
    assert kind.count == 3 and kind.transfer_ms == pytest.approx(30)
    assert kind.exposed_ms == pytest.approx(20) and kind.exposed == pytest.approx(2 / 3)
    assert kind.least_ms == pytest.approx(5)


def test_messages_of_unknown_size_have_no_bandwidth(tmp_path):
    bare = [replace(step(10), collectives=[Collective(10, 20, mib=None)])]
    kind = analyze_folder(write_ranks(tmp_path, bare, bare)).kinds[0]
    assert kind.bytes is None and kind.bus_bytes_per_s is None


def nccl(name: str, start: int, end: int, correlation: int, **args: object) -> dict:
    """A kernel of NCCL that describes itself."""
    event = kernel(name, start, end - start, correlation, stream=20)
    return {**event, "args": {**event["args"], **args}}


def all_reduce(number: int, begin: int, end: int, elements: int = 2**20, **more: object) -> dict:
    """The kernel of the n-th all-reduce of a group of two, in ms."""
    return nccl(
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL",
        begin * MS,
        end * MS,
        100 + number,
        **{
            "Collective name": "allreduce",
            "Process Group Name": "3",
            "Process Group Ranks": "[0, 1]",
            "Group size": 2,
            "In msg nelems": elements,
            "Out msg nelems": elements,
            "dtype": "BFloat16",
            "Seq": number,
        }
        | more,
    )


def test_kernels_of_nccl_match_by_group_and_number(tmp_path):
    for rank, (first, second) in enumerate(((10, 35), (15, 30))):
        events = [range_("ProfilerStep#0", 0, 50 * MS), *launched("gemm", 0, 100, 0, MS)]
        events += [all_reduce(7, first, 20), all_reduce(8, second, 40)]
        write_rank(tmp_path, rank, 2, events)
    found = analyze_folder(tmp_path)
    assert len(found.matches) == 2 and found.matches.unmatched == 0
    assert found.waits.last.tolist() == [1, 0]
    assert found.kinds[0].bytes == 2 * 2**20
    assert found.late is None and found.disorder == ()


def test_groups_for_another_purpose_are_rows_of_their_own(tmp_path):
    def purpose(text: str) -> dict[str, object]:
        return {"Process Group Description": text}

    for rank in range(2):
        events = [range_("ProfilerStep#0", 0, 50 * MS), *launched("gemm", 0, 100, 0, MS)]
        events += [all_reduce(1, 10, 12, **purpose("mesh_tp")), all_reduce(2, 12, 14)]
        events += [all_reduce(3, 20, 30, **purpose("mesh_dp"))]
        events += [all_reduce(4, 30, 31, **purpose("undefined"))]  # torch's word for no text
        write_rank(tmp_path, rank, 2, events)
    found = analyze_folder(tmp_path)
    rows = {kind.group: (kind.count, kind.transfer_ms) for kind in found.kinds}
    assert rows == {"mesh_tp": (1, 2.0), "mesh_dp": (1, 10.0), "": (2, 3.0)}
    assert [row[1] for row in collectives_table(found).rows] == ["mesh_dp", None, "mesh_tp"]


def test_collectives_that_cannot_be_one_another_s_tell_no_waits(tmp_path):
    # Files from which somebody has taken a part: of two collectives a step each lacks one, so the
    # second of a rank is taken for the first of the other, which had ended long before.
    first, second = (replace(step(10), collectives=[Collective(a, a + 5)]) for a in (5, 30))
    found = analyze_folder(write_ranks(tmp_path, [first, second] * 2, [second, first] * 2))
    assert found.late is None and not found.tells_waits and not found.clocks.ahead.any()
    assert {row.waiting_ms for row in found.rows} == {None} == {k.waiting_ms for k in found.kinds}
    assert found.record.communication == {}
    assert any("who waited for whom cannot be told" in note for note in found.notes)
    names = {column.name for column in ranks_table(found).columns}
    assert names >= {"transfer or waiting", "hidden"} and not names & {"waiting", "waited for"}
    assert waits_diff(found, found).rows[0][0] == "transfer or waiting"


def test_kinds_of_several_sizes_and_groups_are_added_up_in_a_comparison(tmp_path):
    for rank in range(2):
        events = [range_("ProfilerStep#0", 0, 50 * MS), *launched("gemm", 0, 100, 0, MS)]
        events += [all_reduce(1, 10, 12), all_reduce(2, 20, 30, **{"Group size": 4})]
        write_rank(tmp_path, rank, 4, events)
    found = analyze_folder(tmp_path)
    rows = {row[0]: row[1] for row in collectives_diff(found, found).rows}
    assert rows == {"all-reduce, transfer": 12.0, "all-reduce, waiting": 0.0}


@pytest.mark.parametrize(("host", "link"), [("one", "nvlink4"), ("", None)])
def test_the_bus_is_compared_with_the_link_of_one_machine(tmp_path, host, link):
    card = [{"id": 0, "name": "NVIDIA H200", "totalGlobalMem": 1}]
    for rank in range(2):
        events = [range_("ProfilerStep#0", 0, 50 * MS), *launched("gemm", 0, 100, 0, MS)]
        write_rank(
            tmp_path, rank, 2, [*events, all_reduce(7, 10, 20)], host=host, deviceProperties=card
        )
    found = analyze_folder(tmp_path)
    assert found.record.link == link
    table = collectives_table(found)
    shares = dict(zip([column.name for column in table.columns], table.rows[0], strict=True))
    expected = 100 * 2 * 2**20 / 0.01 / 450e9
    assert shares.get("of the link") == (pytest.approx(expected) if link else None)


@pytest.mark.parametrize("is_marked", [True, False])
def test_messages_of_another_size_are_told(tmp_path, is_marked):
    for rank, elements in enumerate((2**20, 2**21)):
        mark = [range_(f"ProfilerStep#{i}", i * 50 * MS, 50 * MS) for i in range(2 * is_marked)]
        work = [all_reduce(7, 10, 20), all_reduce(8, 30, 40, elements)]
        write_rank(tmp_path, rank, 2, [*mark, *launched("gemm", 0, 100, 0, MS), *work])
    said = [one.sentence for one in analyze_folder(tmp_path).disorder]
    # Without steps, the recordings may have begun at different collectives.
    told = (
        "step 0, collective 2 of group 3 [0, 1]: rank 0 calls all-reduce of 2.00 MiB, "
        "rank 1 calls all-reduce of 4.00 MiB"
    )
    assert said == ([told] if is_marked else [])


def test_a_kernel_without_arguments_takes_those_of_its_launch(tmp_path):
    said = {"Collective name": "_allgather_base", "Process Group Name": "0", "Group size": 2,
            "In msg nelems": 1024, "Out msg nelems": 2048, "dtype": "Float"}  # fmt: skip
    for rank in range(2):
        around = range_("record_param_comms", 0, 10_000)
        around |= {"cat": "cpu_op", "args": said}
        work = launched("ncclDevKernel_Generic", 1_000, 2_000, 5_000, MS, correlation=9)
        write_rank(tmp_path, rank, 2, [around, *work])
    kind = analyze_folder(tmp_path).kinds[0]
    assert (kind.kind, kind.bytes) == ("all-gather", 8192)


def test_files_tell_their_rank_inside_or_by_name(tmp_path):
    steps = rank_events([step(10)])
    write_rank(tmp_path / "names", 0, 2, steps, name="run-rank_0.pt.trace.json.gz", told=False)
    write_rank(tmp_path / "names", 1, 2, steps, name="run-rank_1.pt.trace.json.gz", told=False)
    assert [row.rank for row in analyze_folder(tmp_path / "names").rows] == [0, 1]
    # As some tools write it: every file claims to be of rank 0.
    for rank in (2, 5):
        write_rank(tmp_path / "zero", 0, 8, steps, name=f"rank-{rank}.json")
    found = analyze_folder(tmp_path / "zero")
    assert [row.rank for row in found.rows] == [2, 5]
    assert found.missing_sentence == "6 ranks without a trace here: 0, 1, 3, 4, 6, 7"
    for name in ("b.json", "a.json"):
        write_rank(tmp_path / "none", 0, 2, steps, name=name, told=False)
    with pytest.raises(UserError, match=r"do not all say which rank .* Name one of: a\.json, b"):
        analyze_folder(tmp_path / "none")
    (tmp_path / "none" / "b.json").unlink()
    assert [row.rank for row in analyze_folder(tmp_path / "none").rows] == [0]


def test_of_several_traces_of_a_rank_the_newest_counts(tmp_path):
    write_rank(tmp_path, 0, 1, rank_events([step(10)]), name="first.json")
    write_rank(tmp_path, 0, 1, rank_events([step(10)], ahead_ms=900), name="second.json")
    found = analyze_folder(tmp_path)
    assert [row.file for row in found.rows] == ["second.json"]
    assert "ranks with several traces, of which the newest counts: 0" in found.notes


def test_ranks_without_a_common_step_are_told(tmp_path):
    write_rank(tmp_path, 0, 2, rank_events([step(10)]))
    other = [
        {**event, "name": event["name"].replace("#0", "#9")} for event in rank_events([step(10)])
    ]
    write_rank(tmp_path, 1, 2, other)
    found = analyze_folder(tmp_path)
    assert found.late is None
    assert any("no step in common" in note for note in found.notes)


def test_a_file_may_claim_any_number_of_ranks(tmp_path):
    write_rank(tmp_path, 0, 2**31 - 1, rank_events([step(10)]))
    found = analyze_folder(tmp_path)
    assert found.missing_sentence.startswith("2,147,483,646 ranks without a trace here: 1, 2, 3")
    assert len(found.record.missing) == 1_000


def test_too_many_collectives_of_too_many_ranks_are_refused(tmp_path, monkeypatch):
    write_ranks(tmp_path, [step(10)] * 2, [step(30)] * 2)
    monkeypatch.setattr("steplab.trace.ranks.matching.CELL", 2**60)
    with pytest.raises(UserError, match=r"Matching 2 ranks needs .* --max-memory"):
        analyze_folder(tmp_path)


def test_an_empty_folder_is_one_sentence(tmp_path):
    with pytest.raises(UserError, match=r"has no \.json or \.gz in it"):
        analyze_folder(tmp_path)


def test_the_folder_of_a_run_is_told_how_to_name_it(tmp_path):
    folder = write_ranks(tmp_path / "store" / "runs" / "20260101-gpt", [step(10)])
    (folder / "run.json").write_text("{}")
    with pytest.raises(UserError, match=r"folder of a Run\. Name the Run: 20260101-gpt --store"):
        analyze_folder(folder)


def test_another_order_of_collectives_is_told(tmp_path):
    def calls(*kinds: str) -> list[Step]:
        spelled = {"all_reduce": "c10d::allreduce_", "all_gather": "c10d::allgather_"}
        each = [
            Collective(10 * i, 10 * i + 5, kind, call=spelled[kind])
            for i, kind in enumerate(kinds, 1)
        ]
        return [Step(50, [(0, 5)], each)] * 2

    one, other = calls("all_reduce", "all_gather"), calls("all_gather", "all_reduce")
    found, _ = analyze_folder(write_ranks(tmp_path / "a", one, other, groups=2)).disorder
    assert found.sentence == (
        "step 0, collective 1: rank 0 calls all-reduce, rank 1 calls all-gather"
    )
    # Of several groups that are not named, a rank may have more calls than another.
    assert not analyze_folder(write_ranks(tmp_path / "b", one, one, groups=2)).disorder
    fewer = calls("all_reduce")
    assert not analyze_folder(write_ranks(tmp_path / "c", one, fewer, groups=2)).disorder
    found, _ = analyze_folder(write_ranks(tmp_path / "d", one, fewer)).disorder
    assert found.calls == {0: "all-gather", 1: "nothing more"}


def test_sizes_come_from_a_detailed_step(tmp_path):
    lean = [replace(step(10), collectives=[Collective(10, 20, mib=None)])] * 3
    path = write_rank(tmp_path, 0, 2, rank_events(lean))
    detail = write_rank(tmp_path, 0, 2, rank_events([step(10)]), name="detail.json")
    assert np.isnan(read_rank(path).collectives.bytes).all()
    assert read_rank(path, detail).collectives.bytes.tolist() == [4 * 2**20] * 3


def test_large_folders_are_read_by_several_processes(tmp_path, monkeypatch):
    write_ranks(tmp_path, [step(10)] * 2, [step(30)] * 2)
    alone = analyze_folder(tmp_path)
    monkeypatch.setattr("steplab.trace.ranks.folder.SMALL", 0)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert codec.encode(analyze_folder(tmp_path).record) == codec.encode(alone.record)


def test_a_damaged_file_is_named(tmp_path):
    write_ranks(tmp_path, [step(10)], [step(10)])
    whole = gzip.compress((tmp_path / "rank1.json").read_bytes())
    (tmp_path / "rank1.json").unlink()
    (tmp_path / "rank1.json.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"rank1\.json\.gz is a gzip file that ends too early"):
        analyze_folder(tmp_path)


def test_the_record_is_plain_json(tmp_path):
    found = analyze_folder(write_ranks(tmp_path, [step(10)] * 2, [step(30)] * 2))
    record = json.loads(json.dumps(codec.encode(found.record)))
    assert record["late"]["rank"] == 1
    assert record["communication"]["transfer"] == pytest.approx(10)
    assert sum(record["terms"].values()) + record["residual_ms"] == pytest.approx(50)
