"""`steplab explain` as a user runs it."""

import json
from dataclasses import replace

import pytest

pytest.importorskip("rich")

from steplab.cli.main import main
from steplab.core import Samples
from tests.compare.test_step_tables import make_run
from tests.trace.ranks.folders import Collective, Step, write_ranks
from tests.trace.traces import op, range_, write_trace


def stalled(wait: float):
    run = make_run(ms=10.0)
    return replace(run, clock=replace(run.clock, data_wait=Samples((wait,), "ms")))


def test_findings_of_the_last_run(store, capsys):
    store.save(make_run(ms=3.0))
    store.save(stalled(4.0))
    assert main(["explain", "--store", str(store.root)]) == 0
    out = capsys.readouterr().out
    assert "1. data_stall [4.000 ms, 40.0 % of the step]" in out
    assert "remedy: prefetch" in out and "gain:   3.000 ms (30.0 %)" in out
    assert "steplab profile gpt" in out


def test_findings_as_json(store, capsys):
    store.save(stalled(4.0))
    assert main(["explain", "--json", "--store", str(store.root)]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["step_ms"] == 10.0 and said["run"] == store.resolve("last")
    assert [(f["rule"], f["gain_ms"]) for f in said["findings"]] == [("data_stall", 3.0)]
    assert said["notes"] == [] and said["budget"] is None


def test_json_of_a_trace_has_its_budget(tmp_path, capsys):
    path = tmp_path / "trace.json"
    marks = [(3, 0, 1000), (4, 1000, 1200)]
    events = [
        {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{n}", "ts": at, "dur": us}
        for n, at, us in marks
    ] + [{"ph": "X", "cat": "kernel", "name": "k", "ts": at + 9, "dur": 500} for _, at, _ in marks]
    path.write_text(json.dumps({"traceEvents": [{"pid": 1, "tid": 1, **e} for e in events]}))
    assert main(["explain", "--json", str(path)]) == 0
    steps = json.loads(capsys.readouterr().out)["budget"]["steps"]
    assert [(s["number"], s["wall_ms"], s["terms"]["kernels"]) for s in steps] == [
        (3, 1.0, 0.5),
        (4, 1.2, 0.5),
    ]


def test_a_named_run_without_faults(store, capsys):
    clean = make_run()
    store.save(clean)
    store.save(stalled(4.0))
    assert main(["explain", clean.id, "--store", str(store.root)]) == 0
    out = capsys.readouterr().out
    assert clean.id in out and "No finding worth 3 % of the step or more." in out


def test_notes_are_brief(store, capsys):
    run = make_run()
    noisy = replace(run.clock, step=Samples((8.0, 10.0, 14.0, 9.0, 13.0), "ms"))
    store.save(replace(run, clock=noisy))
    assert main(["explain", "--store", str(store.root)]) == 0
    out = capsys.readouterr().out
    assert "\n  noisy_measurement: " in out and "why:" not in out


def test_a_foreign_trace_gets_its_budget_first_and_a_page(tmp_path, capsys):
    shapes = {"shapes": [[8, 4], [8, 4]], "strides": [[4, 1], [1, 8]], "dtypes": ["float"] * 2}
    events = [range_("ProfilerStep#1", 0, 1_000_000), op("aten::copy_", 0, 600_000, **shapes)]
    events += [op("aten::mm", 600_000, 400_000)]
    path = write_trace(tmp_path / "theirs.json", events)
    page = tmp_path / "page.html"
    assert main(["explain", str(path), "--page", str(page)]) == 0
    out = capsys.readouterr().out
    assert out.index("Time budget: 1.000 ms") < out.index(
        "1. copies [600.0 us, 60.0 % of the step]"
    )
    assert "copies" in page.read_text()


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nothing"], "There is no Run"),
        (["nowhere.json"], "nowhere.json"),
        (["--pgae", "x"], "--page"),
    ],
)
def test_mistakes_are_told_in_one_sentence(words, sentence, store, capsys):
    store.save(make_run())
    assert main(["explain", *words, "--store", str(store.root)]) == 2
    assert sentence in capsys.readouterr().err


def test_a_failed_run_says_why(store, capsys):
    store.save(make_run(status="oom"))
    assert main(["explain", "--store", str(store.root)]) == 0
    assert "oom, CUDA out of memory" in capsys.readouterr().out


def test_of_a_step_that_was_not_measured_nothing_is_said(store, capsys):
    run = make_run(ms=10.0)
    store.save(replace(run, status="failed", reason="OSError: disk gone", clock=None))
    assert main(["explain", "--store", str(store.root)]) == 0
    said = capsys.readouterr().out
    assert "no step was measured, so no rule can tell" in said and "No finding" not in said


def test_a_trace_of_any_name_and_never_a_folder(tmp_path, store, capsys):
    """The page is named for the trace; a folder is refused as one, not looked for as a Run."""
    trace = write_trace(tmp_path / "<b>rank0.trace", [op("aten::mm", 0, 5_000)])
    page = tmp_path / "page.html"
    assert main(["explain", str(trace), "--page", str(page), "--store", str(store.root)]) == 0
    assert "a trace on its own" in capsys.readouterr().out
    assert "&lt;b&gt;rank0.trace</h1>" in page.read_text()
    assert main(["explain", f"{tmp_path}/", "--store", str(store.root)]) == 2
    assert "is a folder, not a trace" in capsys.readouterr().err


def test_a_folder_of_ranks_has_one_budget_a_late_rank_and_lanes(tmp_path, capsys):
    on_time = Step(100, [(0, 40), (90, 100)], [Collective(40, 90)])
    late = Step(100, [(0, 80), (90, 100)], [Collective(80, 90)])
    folder = write_ranks(tmp_path / "traces", [on_time] * 3, [late] * 3)
    page = tmp_path / "page.html"
    assert main(["explain", str(folder), "--page", str(page)]) == 0
    out = capsys.readouterr().out
    assert "traces of 2 ranks" in out and "waiting for rank 1" in out
    assert "1. straggler_rank [40.00 ms, 40.0 % of the step]" in out
    text = page.read_text()
    assert "rank 0</text>" in text and "all-reduce of 4.00 MiB, waiting" in text
    assert all(f"</i>{name}</span>" in text for name in ("computing", "waiting", "transfer"))
    assert main(["explain", str(folder), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)["ranks"]
    assert (record["late"]["rank"], record["missing"]) == (1, [])
