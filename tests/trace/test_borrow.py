import numpy as np
import pytest

from steplab.trace.analyze import analyze, match_rows
from tests.trace.traces import MAIN, call, kernel, launched, op, python, range_, trace_of


def test_partners_have_the_same_key_and_position_in_their_step():
    key = np.array([7, 8, 7, 7, 7, 8, 9])
    step = np.array([0, 0, 0, 1, 1, 1, 1])
    time = np.array([0, 1, 2, 9, 8, 7, 6])
    other_key, other_time = np.array([8, 7, 7]), np.array([5, 4, 3])
    partner = match_rows(key, step, (time,), other_key, (other_time,))
    assert partner.tolist() == [2, 0, 1, 1, 2, 0, -1]


def test_a_different_number_of_a_key_matches_nothing():
    partner = match_rows(
        np.array([7, 7, 8]), np.zeros(3, int), (np.arange(3),), np.array([7, 8]), (np.arange(2),)
    )
    assert partner.tolist() == [-1, -1, 1]


def test_work_outside_steps_has_no_partner():
    one = np.array([7])
    assert match_rows(one, np.array([-1]), (one,), one, (one,)).tolist() == [-1]
    assert match_rows(one, np.array([0]), (one,), one[:0], (one[:0],)).tolist() == [-1]


def launches(names: list[str], at: int, delay: int, first: int) -> list:
    """One kernel after the other, each launched at a known time and run `delay` later."""
    found = []
    for i, name in enumerate(names):
        called = at + 100 * i
        found += launched(name, called, called + 20, called + delay, 50, first + i)
    return found


def detailed(names: list[str]):
    lines = [python(f"model.py({i}): f{i}", 100 * i, 90) for i in range(len(names))]
    modules = [range_(f"module:m{i}", 100 * i, 90) for i in range(len(names))]
    shapes = {"shapes": [[8, 8], [8, 8]], "dtypes": ["c10::BFloat16", "c10::BFloat16"]}
    ops = [op("aten::mm", 100 * i, 80, **shapes) for i in range(len(names))]
    head = [range_("ProfilerStep#9", 0, 1_000), range_("forward", 0, 990)]
    return trace_of([*head, *lines, *modules, *ops, *launches(names, 10, 5_000, 1)])


def test_a_lean_trace_learns_who_did_its_work():
    names = ["nvjet_tst_64x64_TNN", "other", "nvjet_tst_64x64_TNN"]
    head = [range_("ProfilerStep#3", 0, 400), range_("ProfilerStep#4", 1_000, 400)]
    phases = [range_("forward", 0, 390), range_("forward", 1_000, 390)]
    steps = launches(names, 10, 9_000, 1) + launches(names, 1_010, 9_000, 11)
    found = analyze(trace_of([*head, *phases, *steps]), detailed(names))
    work = found.work
    text = np.array(work.labels)
    assert text[work.module].tolist() == ["m0", "m1", "m2"] * 2
    assert text[work.line].tolist() == [f"model.py:{i} (f{i})" for i in range(3)] * 2
    assert text[work.category].tolist()[::2] == ["matmul bf16"] * 3
    assert work.op_row.tolist() == [0, 1, 2] * 2
    assert work.flops[0] == pytest.approx(2 * 8**3)
    assert work.step.tolist() == [3] * 3 + [4] * 3
    assert "100.0 % of the time" in found.budget.notes[-1]


def test_names_whose_counts_differ_stay_unattributed():
    head = [range_("ProfilerStep#3", 0, 500), range_("forward", 0, 490)]
    lean = trace_of([*head, *launches(["a", "b", "a", "a"], 10, 9_000, 1)])
    found = analyze(lean, detailed(["a", "b", "a"]))
    text = np.array(found.work.labels)
    assert text[found.work.module].tolist() == ["unattributed", "m1"] + ["unattributed"] * 2
    assert found.work.op_row.tolist() == [-1, 1, -1, -1]
    assert np.isnan(found.work.flops[0])
    assert text[found.work.phase].tolist() == ["forward"] * 4
    assert "25.0 % of the time" in found.budget.notes[-1]


def test_a_replayed_graph_borrows_what_was_seen_before_its_capture():
    names = ["gemm", "softmax_warp_forward", "gemm"]
    replay = [kernel(name, 900 + 60 * i, 50, 5, graph=1) for i, name in enumerate(names)]
    launch = call("cudaGraphLaunch", 100, 300, 5, MAIN)
    around = [range_("ProfilerStep#3", 0, 700), range_("step", 1, 690), range_("replay", 90, 400)]
    found = analyze(trace_of([*around, launch, *replay]), detailed(names))
    text = np.array(found.work.labels)
    assert text[found.work.module].tolist() == ["m0", "m1", "m2"]
    assert text[found.work.phase].tolist() == ["forward"] * 3
    assert found.work.launched.tolist() == [400] * 3


def test_a_phase_with_other_counts_does_not_spoil_the_rest():
    head = [range_("ProfilerStep#3", 0, 700), range_("forward", 0, 290)]
    more = range_("optimizer", 300, 300)
    lean = trace_of([*head, more, *launches(["a", "b", "a", "a", "b"], 10, 9_000, 1)])
    found = analyze(lean, detailed(["a", "b", "a"]))
    text = np.array(found.work.labels)
    assert text[found.work.module].tolist() == ["m0", "m1", "m2"] + ["unattributed"] * 2


def test_waits_borrow_their_lines():
    def waits(step: int, first: int, extra: list) -> list:
        events = [range_(f"ProfilerStep#{step}", 0, 1_000), *extra]
        for i in range(2):
            events.append(op("aten::item", 100 + 200 * i, 90))
            events.append(call("cudaStreamSynchronize", 110 + 200 * i, 50, first + i))
        return [*events, *launches(["k", "k"], 600, 50, first + 5)]

    lines = [python(f"train.py({i}): f", 100 + 200 * i, 95) for i in range(2)]
    found = analyze(trace_of(waits(1, 10, [])), trace_of(waits(2, 20, lines)))
    text = np.array(found.work.labels)
    assert text[found.syncs.line].tolist() == ["train.py:0 (f)", "train.py:1 (f)"]
    assert text[found.syncs.op].tolist() == ["aten::item"] * 2
