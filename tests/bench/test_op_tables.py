from dataclasses import replace

import pytest

from steplab.bench.op_results import best_run, cell_result, group_by_shape, rank_runs
from steplab.bench.op_tables import best_table, cell_table, growth_table
from steplab.bench.ops.attention import BENCH
from steplab.core import run_from_json, run_to_json
from tests.bench.op_runs import failed, measured, samples, specs, wrong
from tests.report.test_tables import drawn


def as_dicts(table):
    names = [column.title for column in table.columns]
    return [dict(zip(names, row, strict=True)) for row in table.rows]


def test_best_is_by_the_objective_asked_for():
    one, two, three = specs(["flash", "math", "tiled"])
    runs = [
        measured(one, forward=1, backward=9, both=10, mib=5),
        measured(two, forward=2, backward=3, both=5, mib=9),
        measured(three, forward=4, backward=2, both=6, mib=1),
    ]
    found = {
        objective: best_run(runs, objective).spec.config["impl"]
        for objective in ("forward", "backward", "both", "memory")
    }
    assert found == {"forward": "flash", "backward": "tiled", "both": "math", "memory": "tiled"}


def test_wrong_and_failed_cells_are_rows_and_never_best():
    quick, slow, dead, half = specs(["flash", "math", "tiled", "reference"])
    halfway = replace(measured(half), status="unsupported", reason="backward: no room", tables={})
    empty = replace(halfway.clock, step=samples(1.0).__class__((), "ms"))
    halfway = replace(halfway, clock=empty, memory=None)
    runs = [wrong(quick, both=0.1), measured(slow), failed(dead), halfway]
    assert [r.spec.config["impl"] for r in rank_runs(runs, "both")] == ["math"]
    rows = as_dicts(cell_table(BENCH, runs, "both", detailed=True))
    assert [row["status"] for row in rows] == ["wrong", "ok", "oom", "unsupported"]
    assert [row["by both"] for row in rows] == ["", "best", "", ""]
    assert rows[0]["error dq"] == 1e-3 and rows[0]["of budget"] == pytest.approx(5000)
    assert rows[2]["forward [ms]"] is None and rows[2]["reason"] == "out of memory"
    assert rows[3]["forward [ms]"] == 1.003 and rows[3]["both [ms]"] is None
    (line,) = as_dicts(best_table(BENCH, runs, "both"))
    assert line["best"] == "math" and line["sure"] == "no other row is right"


def test_noisy_and_contended_cells_are_marked():
    one, two = specs(["flash", "math"])
    busy = measured(two)
    busy = replace(busy, clock=replace(busy.clock, contended=0.5))
    for detailed in (True, False):
        rows = as_dicts(cell_table(BENCH, [measured(one, noise=0.1), busy], "both", detailed))
        assert [row["status"] for row in rows] == ["ok, noisy", "ok, contended"]
        assert rows[0]["kept [MiB]"] == 0.5


@pytest.mark.parametrize("objective", ["both", "memory"])
def test_results_of_two_axes_fit_a_hundred_columns(monkeypatch, objective):
    """Lines of doubtful cells ran on to column 108."""
    cells = specs(["flash", "math"], contexts=(128, 65_536), dtypes=("fp32", "bf16"))
    busy = [measured(spec, 1234, 4321, 5555, mib=5678, noise=0.1) for spec in cells]
    busy = [replace(run, clock=replace(run.clock, contended=0.5)) for run in busy]
    text = drawn(cell_table(BENCH, busy, objective, detailed=False), monkeypatch, 100)
    assert max(map(len, text.splitlines())) <= 100
    shown = text.partition("─")[0]
    assert all(name in shown for name in ("forward", "backward", "both", "kept", "error", "status"))
    assert "extra" in shown or objective == "both"


def test_growth_is_that_of_the_longest():
    short, middle, long = specs(["flash"], contexts=(64, 128, 256))
    runs = [
        measured(short, forward=1.0, mib=1),
        measured(middle, forward=1.1, mib=2),
        measured(long, forward=4.4, mib=4),
    ]
    (row,) = as_dicts(growth_table(BENCH, runs))
    assert row["impl"] == "flash" and row["context"] == "128 to 256"
    assert row["forward"] == pytest.approx(2) and row["extra memory"] == pytest.approx(1)
    assert growth_table(BENCH, runs[:1]) is None


def test_the_table_says_that_no_row_is_right():
    runs = [failed(spec) for spec in specs(["flash", "math"])]
    (line,) = as_dicts(best_table(BENCH, runs, "both"))
    assert line["best"] == "none" and line["both [ms]"] == ""


def test_noise_is_not_called_a_win():
    one, two = specs(["flash", "math"])
    close = [measured(one, both=1.00, noise=0.1), measured(two, both=1.01, noise=0.1)]
    rows = as_dicts(cell_table(BENCH, close, "both", detailed=False))
    assert [row["by both"] for row in rows] == ["best?", ""]
    assert "cannot tell" in as_dicts(best_table(BENCH, close, "both"))[0]["sure"]
    apart = [measured(one, both=1.0), measured(two, both=2.0)]
    (line,) = as_dicts(best_table(BENCH, apart, "both"))
    assert line["next / best"] == pytest.approx(2) and "cannot tell" not in line["sure"]
    assert as_dicts(cell_table(BENCH, apart, "both", detailed=False))[0]["by both"] == "best"


def test_equal_memory_is_equal():
    runs = [measured(spec, mib=3) for spec in specs(["flash", "math"])]
    (line,) = as_dicts(best_table(BENCH, runs, "memory"))
    assert line["sure"] == "equal" and line["memory [MiB]"] == pytest.approx(3)


def test_shapes_do_not_compete():
    runs = [measured(spec) for spec in specs(["flash", "math"], contexts=(32, 64))]
    assert [len(group) for group in group_by_shape(BENCH, runs)] == [2, 2]
    table = cell_table(BENCH, runs, "both", detailed=False)
    assert table.title == "attention on cpu: batch 1, heads 2, head width 16, causal, fp32"
    assert [row["context"] for row in as_dicts(table)] == [32, 32, 64, 64]
    assert len(best_table(BENCH, runs, "both").rows) == 2


def test_numbers_of_a_row():
    (spec,) = specs(["flash"])
    (row,) = as_dicts(cell_table(BENCH, [measured(spec)], "both", detailed=True))
    pairs = 2 * 64 * 65 / 2
    forward_ms, backward_ms = samples(1.0).median, samples(2.0).median
    assert row["forward [GFLOP/s]"] == pytest.approx(pairs * 2 * 2 * 16 / forward_ms / 1e6)
    assert row["backward [GFLOP/s]"] == pytest.approx(pairs * 5 * 2 * 16 / backward_ms / 1e6)
    assert row["extra [MiB]"] == 1 and row["kept [MiB]"] == 0.5
    assert row["samples"] == 8 and row["checked"] == "all heads"


def test_infinite_errors_survive_the_store():
    (spec,) = specs(["flash"])
    run = measured(spec, error=float("inf"))
    again = cell_result(run_from_json(run_to_json(run)))
    assert again == cell_result(run) and again.of_budget == float("inf")


def test_notes_say_what_was_checked_in_part():
    one, two = specs(["flash"], contexts=(32, 64))
    part = measured(two)
    table = replace(part.tables["errors"], title="against fp64: 3 of 8 heads")
    part = replace(part, tables={"errors": table}, notes=("host-bound",))
    note = cell_table(BENCH, [measured(one), part], "both", detailed=False).note
    assert "error of 3 of 8 heads: batch 1, heads 2, context 64" in note
    assert "host-bound" in note and "context 32" not in note


def test_many_reasons_are_cut_on_a_terminal_only():
    runs = [
        failed(spec, reason=f"no {i}") for i, spec in enumerate(specs(["flash"], range(16, 56)))
    ]
    note = cell_table(BENCH, runs, "both", detailed=False).note
    assert "no 11" in note and "no 12" not in note and "and 28 more" in note
    detailed = as_dicts(cell_table(BENCH, runs, "both", detailed=True))
    assert [row["reason"] for row in detailed] == [f"no {i}" for i in range(40)]
