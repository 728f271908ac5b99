from dataclasses import replace

import pytest

from steplab.compare.bootstrap import slower_than
from steplab.compare.inputs import Side
from steplab.compare.runs import check_same_work, compare_rounds, compare_stored
from steplab.core import Counters, Samples
from steplab.core.comparison import Change
from steplab.core.errors import UserError
from tests.compare.sides import ENVIRONMENT, noisy, run_of, side
from tests.report.analyses import KERNELS, analysis_of


def test_faster_slower_and_cannot_tell():
    a = side(run_of(noisy(100, seed=1)))
    faster = compare_stored(a, side(run_of(noisy(90, seed=2))))
    assert faster.verdict == "faster" and faster.headline == "B is faster than A"
    assert faster.change.low < -0.1 < faster.change.high < 0
    assert "less time per step" in faster.reason and "different moments" in faster.method
    assert 0 < faster.change.detectable < 0.05
    assert compare_stored(a, side(run_of(noisy(110, seed=2)))).verdict == "slower"
    equal = compare_stored(a, side(run_of(noisy(100, seed=2))))
    assert equal.verdict == "cannot tell" and "zero included" in equal.reason


def test_few_samples_give_no_verdict():
    few = compare_stored(side(run_of((10.0,) * 5)), side(run_of((20.0,) * 5)))
    assert few.verdict == "cannot tell" and "6 steps a side or more, and there are 5" in few.reason
    assert few.change.value == pytest.approx(1.0) and few.change.detectable is None
    assert not slower_than(few.change, 0.0)
    one = compare_stored(side(run_of((10.0,))), side(run_of((20.0,) * 9)))
    assert one.verdict == "cannot tell"


def clocked(mhz, watts=600.0, **held_back):
    return Counters(
        power_w=Samples((watts,), "W"),
        sm_clock_mhz=Samples((mhz,), "MHz"),
        sm_clock_max_mhz=1980.0,
        held_back=held_back,
    )


@pytest.mark.parametrize(
    ("a", "b", "told"),
    [
        (1980.0, 1965.0, ""),
        (1980.0, 1950.0, "A 1980 of 1980 MHz at 600 W; B 1950 of 1980 MHz at 600 W"),
        (1980.0, None, ""),
    ],
)
def test_clocks_that_differ_are_told_with_both_figures(a, b, told):
    sides = [side(run_of(), counters=clocked(mhz) if mhz else None) for mhz in (a, b)]
    lines = [line for line in compare_stored(*sides).conditions if line.startswith("SM clocks")]
    assert lines == ([f"SM clocks: {told}"] if told else [])


def test_a_clock_that_was_held_back_is_told_though_the_other_was_too():
    held = side(run_of(), counters=clocked(1440.0, 695.0, heat=0.9))
    text = "1440 of 1980 MHz at 695 W, held back by heat"
    for other, said in ((held, text), (side(run_of()), "unknown")):
        assert f"SM clocks: A {text}; B {said}" in compare_stored(held, other).conditions


def test_tables_of_runs_without_traces():
    b = run_of(noisy(90), recipe={"precision": {"dtype": "bf16"}})
    tables = compare_stored(side(run_of(noisy(100))), side(b)).tables
    assert list(tables) == ["sides", "differences", "phases"]
    row = dict(
        zip([c.title for c in tables["sides"].columns], tables["sides"].rows[1], strict=True)
    )
    assert row["what"] == "gpt: tiny, context 128, batch 4, full, precision=bf16"
    assert row["steps"] == 30 and row["peak memory [GiB]"] == 1.0 and row["tokens/s"] > 5000


def test_traces_show_what_changed():
    a, b = (Side(name, cycles=(analysis_of(steps=8),)) for name in ("a.json", "b.json"))
    found = compare_stored(a, b)
    assert list(found.tables) == ["sides", "budget", "kernels", "modules"]
    assert found.verdict == "cannot tell" and len(found.samples_a) == 8
    assert "is assumed" in found.method and found.conditions == ()


def test_a_run_and_a_trace_are_compared_by_profiled_steps():
    analysis = analysis_of(KERNELS, steps=7)
    found = compare_stored(side(run_of(), analysis), Side("b.json", cycles=(analysis,)))
    assert found.samples_a.values == (10.0,) * 7 and "Profiled steps" in found.method
    with pytest.raises(UserError, match="only profiled ones"):
        compare_stored(side(run_of()), Side("b.json", cycles=(analysis,)))


def test_other_work_is_not_held_against_each_other():
    a, b = side(run_of()), side(run_of((40.0,) * 10, config={"context": 256}, batch=8))
    found = compare_stored(a, b)
    assert found.verdict == "not alike" and found.change is None
    assert found.reason == "they did different work: batch 4 and 8, context 128 and 256."
    assert list(found.tables) == ["sides", "differences"]
    with pytest.raises(UserError, match="context 128 and 256"):
        check_same_work(a, b)


def test_bad_sides():
    good = side(run_of())
    with pytest.raises(UserError, match="status oom: CUDA out of memory"):
        compare_stored(good, side(run_of(), status="oom", reason="CUDA out of memory"))
    with pytest.raises(UserError, match="holds no samples"):
        compare_stored(side(run_of(), clock=None), good)
    with pytest.raises(UserError, match="holds no samples"):
        compare_stored(side(run_of(())), good)


def test_conditions_once_or_twice():
    other = replace(ENVIRONMENT, torch="2.14")
    same = compare_stored(side(run_of()), side(run_of()))
    assert len(same.conditions) == 1 and not same.conditions[0].startswith("A:")
    both = compare_stored(side(run_of()), side(run_of(environment=other)))
    assert [line[:3] for line in both.conditions] == ["A: ", "B: "]


def test_rounds():
    def rounds(median, count):
        return [Samples(noisy(median, 5, seed=i), "ms") for i in range(count)]

    a, b = side(run_of()), side(run_of(recipe={"compile": {"scope": "blocks"}}))
    found = compare_rounds(a, rounds(100, 8), b, rounds(80, 8), "a machine")
    assert found.verdict == "faster" and found.change.value == pytest.approx(-0.2, abs=0.02)
    assert len(found.samples_a) == 40 and "rounds: 8" in found.method
    assert found.conditions == ("a machine",) and "MFU" not in str(found.tables["sides"])
    few = compare_rounds(a, rounds(100, 3), b, rounds(80, 3), "a machine")
    assert few.verdict == "cannot tell" and "rounds a side or more, and there are 3" in few.reason


def test_slower_by_more_than_a_limit_needs_the_whole_interval():
    change = Change(0.05, 0.04, 0.06, 0.95, 0.01)
    assert slower_than(change, 0.03) and not slower_than(change, 0.045)
