"""Ranking, notes, and what a case makes of a Run, of a trace, or of both."""

import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import steplab.findings
from steplab.core import Finding, Profile, Ran, Recipe, Samples, registry
from steplab.core.errors import UserError
from steplab.findings import Case, case_of_run, case_of_trace, explain, gain_share, is_note
from steplab.findings.claims import Claim, settled
from steplab.techniques.recipes import parse_recipe
from steplab.trace.analyze import analyze
from tests.compare.test_step_tables import make_run
from tests.findings.steps import FP32, RecordedOp, cpu_case, gpu_case, mm, tensors
from tests.trace.traces import launched, op, range_, trace_of, write_trace


def with_clock(**changes):
    run = make_run()
    return replace(run, clock=replace(run.clock, **changes))


def test_a_clean_run_has_no_finding():
    assert explain(make_run()) == ()
    assert explain(make_run(status="oom")) == ()
    assert explain(Case()) == ()


def test_each_fault_is_named():
    stalled = with_clock(data_wait=Samples((1.0, 1.0), "ms"))
    assert [f.rule for f in explain(stalled)] == ["data_stall"]
    noisy = with_clock(step=Samples((8.0, 10.0, 14.0, 9.0, 13.0), "ms"))
    assert [f.rule for f in explain(noisy)] == ["noisy_measurement"]
    slow = replace(
        with_clock(phases={"optimizer": Samples((2.0,), "ms")}), ran=Ran(optimizer="foreach")
    )
    assert [f.rule for f in explain(slow)] == ["unfused_optimizer"]
    assert explain(replace(slow, ran=Ran(optimizer="fused"))) == ()


def test_recipes_that_rules_name_are_recipes():
    techniques = "|".join(registry.names("steplab.techniques", "TECHNIQUE"))
    named = set()
    for path in (Path(steplab.findings.__file__).parent / "rules").glob("*.py"):
        named |= set(re.findall(rf"\b(?:{techniques})(?:\.\w+)?=[\w-]+", path.read_text()))
    assert {"cuda_graph=step", "prefetch=2", "checkpointing=blocks"} <= named
    for words in named:
        parse_recipe(words)


def test_the_largest_gain_comes_first_and_notes_come_last():
    run = with_clock(
        data_wait=Samples((1.0,), "ms"),
        phases={"optimizer": Samples((3.0,), "ms")},
        step=Samples((10.0, 8.0, 14.0, 9.0, 13.0), "ms"),
    )
    findings = explain(replace(run, ran=Ran(optimizer="forloop")))
    assert [f.rule for f in findings] == ["unfused_optimizer", "data_stall", "noisy_measurement"]
    assert all(f.evidence and f.remedy and f.why for f in findings)


def test_what_is_a_note():
    case = Case(replace(make_run(ms=100.0), environment=replace(make_run().environment)))
    held = replace(case.run, environment=replace(case.run.environment, memory_bytes=1000))
    case = Case(held)

    def said(**stakes):
        return Finding("rule", "claim", ("seen",), "remedy", **stakes)

    assert is_note(said(stake_ms=2.9), case) and not is_note(said(stake_ms=3.0), case)
    assert is_note(said(stake_ms=50.0, gain_ms=1.0), case)
    assert gain_share(said(stake_ms=50.0, gain_ms=1.0), case) == pytest.approx(0.01)
    assert is_note(said(stake_bytes=20), case) and not is_note(said(stake_bytes=30), case)
    # What nobody can put a number on is not small.
    assert not is_note(said(), case) and gain_share(said(), case) is None


def test_operators_of_a_cpu_are_scaled_to_the_unprofiled_step():
    done = [mm(8, 8, 8, 600, FP32), RecordedOp("aten::copy_", 400)]
    profiled = cpu_case(done).analysis
    case = Case(make_run(ms=0.5), profiled)
    assert case.step_ms == 0.5 and case.rows.ms(case.rows.inside) == pytest.approx(0.5)
    alone = Case(None, profiled)
    assert alone.step_ms == pytest.approx(1.0) and alone.rows.ms(alone.rows.inside) == alone.step_ms
    on_gpu = Case(make_run(ms=0.5), gpu_case(done).analysis)
    assert on_gpu.rows.ms(on_gpu.rows.inside) == pytest.approx(1.0)


def test_one_held_up_operator_does_not_count():
    """Three steps of 100 us of copies; in the second one of them took 5 ms."""
    events = []
    for number, us in enumerate((100, 5000, 110)):
        start = number * 10_000_000
        events += [range_(f"ProfilerStep#{number}", start, 9_000_000)]
        events += [op("aten::copy_", start, us * 1000), op("aten::mm", start + 6_000_000, 900_000)]
    rows = Case(None, analyze(trace_of(events))).rows
    copied = rows.called(lambda call: call.name == "aten::copy_")
    assert rows.ms(copied) == pytest.approx(0.11) and rows.count(copied) == 1
    assert rows.totals("op", rows.inside)[0].label == "aten::mm"


def test_work_that_two_rules_claim_counts_once():
    """Half of the copies are another's already: only the other half is left for the second."""
    rows = cpu_case([RecordedOp("aten::copy_", 400), RecordedOp("aten::mm", 600)])
    first = rows.rows.called(lambda call: call.name == "aten::copy_")
    both = rows.rows.inside
    large = Claim("large", "", (), "", stake_ms=0.4, gain_ms=0.4, work=first)
    small = Claim("small", "", (), "", stake_ms=1.0, gain_ms=0.3, work=both)
    hidden = Claim("hidden", "", (), "", stake_ms=0.1, gain_ms=0.1, work=first)
    found = settled([hidden, small, large], rows)
    assert [(f.rule, round(f.gain_ms, 3)) for f in found] == [("large", 0.4), ("small", 0.18)]


def test_all_gains_together_are_no_more_than_the_step():
    case = cpu_case([RecordedOp("aten::mm", 1_000)])
    several = [Finding(name, "", (), "", gain_ms=ms) for name, ms in (("a", 0.7), ("b", 0.6))]
    usual = Finding("usual", "", (), "", gain_ms=0.9, ordinary=True)
    found = settled([usual, *several], case)
    assert [(f.rule, round(f.gain_ms, 3)) for f in found] == [("a", 0.7), ("b", 0.3), ("usual", 0)]


def test_an_empty_case_knows_nothing():
    case = Case()
    assert math.isnan(case.step_ms) and case.rows is None and case.card is None
    assert case.capacity_bytes is None and case.timeline is None and not case.on_device


def test_rows_by_call_and_by_what_is_around_them():
    outer = {"inside": "aten::linear", "outer": tensors([8, 8], [8, 8])}
    done = [mm(8, 8, 8, 100, FP32, **outer), mm(8, 8, 8, 300, FP32), RecordedOp("aten::add", 600)]
    rows = cpu_case(done).rows
    inside = rows.within(lambda call: call.name == "aten::linear")
    assert rows.ms(inside) == pytest.approx(0.1)
    products = rows.called(lambda call: call.name == "aten::mm")
    assert rows.count(products) == 2 and rows.ms(products) == pytest.approx(0.4)
    groups = rows.totals("op", products)
    assert [(g.label, g.count) for g in groups] == [("aten::mm", 2)]
    assert rows.calls[-1].name == "" and np.array_equal(rows.call < len(rows.calls), rows.inside)


def test_a_path_is_explained(tmp_path):
    path = write_trace(tmp_path / "theirs.json", [range_("ProfilerStep#1", 0, 1_000_000)])
    assert repr(explain(path)) == repr(explain(str(path))) == repr(explain(case_of_trace(path)))
    with pytest.raises(UserError, match=r"no file .*nope\.json"):
        explain("nope.json")
    with pytest.raises(UserError, match="takes a Run, a trace or a folder"):
        explain(5)


def test_a_trace_file_is_a_case(tmp_path):
    events = [range_("ProfilerStep#1", 0, 1_000_000), range_("forward", 0, 900_000)]
    events += [op("aten::mm", 0, 800_000)]
    case = case_of_trace(write_trace(tmp_path / "foreign.json.gz", events))
    assert case.run is None and case.step_ms == pytest.approx(1.0)


@pytest.mark.parametrize(("mark", "whole"), [("ProfilerStep#1", "step"), ("all", "recording")])
def test_shares_of_a_trace_without_steps_are_of_the_recording(mark, whole):
    events = [range_(mark, 0, 2_000_000)]
    for number in range(1, 100):
        at = 20_000 * number
        events += launched("gemm", at, at + 5_000, at + 6_000, correlation=number)
    (said,) = re.findall(
        r"% of the (\w+)\]", repr(explain(Case(analysis=analyze(trace_of(events)))))
    )
    assert said == whole


def test_a_stored_run_brings_its_traces_and_its_twins(store, tmp_path):
    events = [range_("ProfilerStep#1", 0, 9_000_000), op("aten::mm", 0, 8_000_000)]
    trace = write_trace(tmp_path / "trace_1.json.gz", events).read_bytes()
    eager = make_run(ms=5.0)
    recipe = Recipe({"compile": {"scope": "whole"}})
    run = replace(make_run(ms=6.0), profile=Profile((0, 1, 1, 1), ("trace_1.json.gz",)))
    run = replace(run, spec=replace(run.spec, recipe=recipe, steps=3))
    for other in (eager, make_run(batch=8), make_run(status="oom")):
        store.save(other)
    store.save(run, {"trace_1.json.gz": trace})
    case = case_of_run(run, store)
    assert case.analysis.budget.unprofiled_ms == 6.0 and case.step_ms == 6.0
    assert [other.id for other in case.others] == [eager.id]
    assert "compiled_not_faster" in [finding.rule for finding in explain(case)]
    assert case_of_run(replace(run, id="elsewhere"), store).analysis is None
