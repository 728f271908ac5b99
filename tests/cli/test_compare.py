"""`steplab compare` as a user runs it."""

import csv
import hashlib
import json
from dataclasses import replace

import pytest

pytest.importorskip("rich")

from steplab.cli.compare import read_share
from steplab.cli.main import main
from steplab.core import Samples
from steplab.core.errors import UserError
from steplab.core.run import OWN_LOOP
from tests.compare.sides import noisy, run_of
from tests.trace.ranks.folders import Collective, Step, write_ranks
from tests.trace.traces import launched, op, range_, write_trace


@pytest.fixture
def compare(store, capsys):
    """Store the Runs given by name, then run the command; returns code, stdout and stderr."""

    def run(*words, **runs):
        for name, stored in runs.items():
            store.save(replace(stored, id=f"20250101-{name}"))
        code = main(["compare", *words, "--store", str(store.root)])
        said = capsys.readouterr()
        return code, said.out, said.err

    return run


def test_a_faster_run(compare, tmp_path):
    b = run_of(noisy(90, seed=2), recipe={"precision": {"dtype": "bf16"}})
    out = [str(tmp_path / name) for name in ("c.csv", "c.md", "c.html")]
    code, said, _ = compare("aaa", "bbb", "--out", *out, aaa=run_of(noisy(100)), bbb=b)
    assert code == 0 and said.startswith("B is faster than A: B takes 10.0 % less time")
    assert "least change that would be seen" in said and "different moments" in said
    assert "precision.dtype" in said and "backward" in said and "A CPU" in said
    rows = list(csv.DictReader((tmp_path / "c.csv").read_text().splitlines()))
    assert rows[1]["Run or trace"] == "20250101-bbb"
    assert "precision.dtype" in (tmp_path / "c.differences.csv").read_text()
    assert (tmp_path / "c.phases.md").exists()
    assert "B is faster than A" in (tmp_path / "c.html").read_text()
    assert all(f"written {path}" in said for path in out)


def test_the_gate(compare):
    a, slow = run_of(noisy(100)), run_of(noisy(110, seed=2))
    code, said, _ = compare("aaa", "bbb", "--fail-if-slower", "3%", aaa=a, bbb=slow)
    assert code == 1 and "failed: B is slower by more than 3.0 %" in said
    code, said, _ = compare("aaa", "bbb", "--fail-if-slower", "12%")
    assert code == 0 and "passed" in said
    code, said, _ = compare("aaa", "ccc", "--fail-if-slower", "0%", ccc=run_of(noisy(100, seed=5)))
    assert code == 0 and "the verdict is `cannot tell`" in said
    few = run_of((200.0,) * 4)
    code, said, _ = compare("aaa", "few", "--fail-if-slower", "3%", few=few)
    assert code == 0 and "and there are 4" in said


def test_other_work_is_told_apart_and_never_passes_the_gate(compare):
    a, b = run_of(), run_of((40.0,) * 10, config={"context": 256})
    code, said, _ = compare("aaa", "bbb", aaa=a, bbb=b)
    assert code == 0 and said.startswith("A and B are not alike: they did different work: context")
    assert "faster" not in said and "tokens/s" in said
    code, _, complaint = compare("aaa", "bbb", "--fail-if-slower", "3%")
    assert code == 2 and "context 128 and 256" in complaint


def test_names_of_the_sides_are_whole(compare, tmp_path):
    """Two Runs keep traces of the same name, each in its folder."""
    events = [
        event
        for step in range(7)
        for event in (
            range_(f"ProfilerStep#{step}", step * 10_000, 10_000),
            op("aten::mm", step * 10_000, 9_000),
        )
    ]
    a, b = (tmp_path / f"{'long_' * 30}{name}" / "trace_1.json.gz" for name in ("one", "two"))
    for path in (a, b):
        path.parent.mkdir()
        write_trace(path, events)
    code, said, _ = compare(str(a), str(b))
    assert code == 0 and f"A: {a}\nB: {b}\n" in said


def test_two_trace_files(compare, tmp_path):
    def trace(name, length, kernel_name):
        events = []
        for step in range(7):
            begin = step * 100_000
            times = (begin + 100, begin + 500, begin + 1_000, length // 2, step + 1)
            events += [range_(f"ProfilerStep#{step}", begin, length), op("aten::mm", begin, 900)]
            events += launched(kernel_name, *times)
        return str(write_trace(tmp_path / name, events))

    name = "void at::native::elementwise" + "<x>" * 200 + "tail"
    a, b = trace("a.json", 50_000, "volta_sgemm_128x32_nt"), trace("b.json.gz", 80_000, name)
    code, said, _ = compare(a, b)
    assert code == 0 and "B is slower than A: B takes 60.0 % more time" in said
    assert "volta_sgemm_128x32_nt" in said and "x><x>" in said and "<x>" * 60 not in said
    assert "the whole step" in said and "is assumed" in said


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["aaa", "nowhere"], "no Run 'nowhere'"),
        (["aaa", "aaa"], "are the same"),
        (["aaa", "oom"], "status oom: CUDA out of memory"),
        (["aaa", "empty"], "no samples"),
        (["aaa", "bbb", "--out", "t.xls"], "suffix"),
        (["aaa", "bbb", "--fail-if-slower", "0.03"], "needs a percentage, not '0.03'"),
        (["aaa", "bbb", "--rerun", "-1"], "more than 0"),
        (["aaa", "gone.json"], "no file gone.json"),
        (["aaa"], "required"),
    ],
)
def test_bad_requests_are_one_sentence(compare, words, complaint):
    runs = {"aaa": run_of(), "bbb": run_of(), "empty": replace(run_of(), clock=None)}
    runs["oom"] = replace(run_of(), status="oom", reason="CUDA out of memory")
    code, _, said = compare(*words, **runs)
    assert code == 2 and complaint in said and said.count("\n") == 1


def test_shares():
    assert read_share("3%") == 0.03 and read_share("0%") == 0
    for word in ("3", "-1%", "nan%", "inf%", "x%", "%"):
        with pytest.raises(UserError):
            read_share(word)


@pytest.fixture
def mine(tmp_path):
    """Return the words for two models of one's own, and what their Runs hold."""
    words, records = [], []
    for name in ("slow", "fast"):
        path = tmp_path / f"{name}.py"
        path.write_text(f"def make():\n    return {name!r}\n")
        words.append(f"{path}:make")
        records.append({"workload": f"elsewhere/{name}.py:make", "source": _hash(path)})
    return words, records


def _hash(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()[:12]


def test_measuring_a_model_of_ones_own_again_needs_its_file(compare, mine):
    _, (record, _) = mine
    code, _, said = compare(
        "aaa", "bbb", "--rerun", "1", aaa=run_of(**record), bbb=run_of(**record)
    )
    assert code == 2 and "The Run 20250101-aaa was made with elsewhere/slow.py:make" in said
    assert "--model my_model.py:make" in said


def test_each_run_takes_the_file_with_its_hash(compare, mine, monkeypatch):
    """The order of the files does not matter, and neither do the folders they are in."""
    words, records = mine
    seen = []

    def alternate(first, second, rounds, timeout, progress):
        seen.extend(spec.workload for spec in (first, second))
        return tuple([Samples(noisy(50, 5, seed=i), "ms") for i in range(8)] for _ in range(2))

    monkeypatch.setattr("steplab.cli.compare.alternate_specs", alternate)
    runs = {"aaa": run_of(**records[0]), "bbb": run_of(**records[1])}
    code, _, said = compare("aaa", "bbb", "--rerun", "--model", *reversed(words), **runs)
    assert code == 0, said
    assert seen == words


@pytest.mark.parametrize(
    ("given", "source", "complaint"),
    [
        ("slow", "another", "has changed since the Run 20250101-bbb (hash another; given: "),
        ("slow", "", "has changed since the Run 20250101-bbb (hash unknown; given: "),
        ("nowhere", None, "no file"),
    ],
)
def test_a_changed_file_cannot_be_measured_again(compare, mine, given, source, complaint):
    words, (record, _) = mine
    word = words[0].replace("slow.py", f"{given}.py")
    runs = {"aaa": run_of(**record), "bbb": run_of(**{**record, "source": source or ""})}
    code, _, said = compare("aaa", "bbb", "--rerun", "1", "--model", word, **runs)
    assert code == 2 and complaint in said and said.count("\n") == 1


def test_a_model_that_is_not_asked_for_is_refused(compare, mine):
    words, _ = mine
    runs = {"aaa": run_of(), "bbb": run_of()}
    code, _, said = compare("aaa", "bbb", "--rerun", "1", "--model", words[0], **runs)
    assert code == 2 and "is the model of neither Run" in said
    code, _, said = compare("aaa", "bbb", "--model", words[0])
    assert code == 2 and "--model is for --rerun" in said


def test_a_loop_of_ones_own_cannot_be_measured_again(compare):
    own = replace(run_of(), notes=(OWN_LOOP,))
    code, _, said = compare("aaa", "bbb", "--rerun", aaa=own, bbb=own)
    assert code == 2 and "20250101-aaa shows a loop of your own" in said and said.count("\n") == 1


def test_a_trace_cannot_be_measured_again(compare, tmp_path):
    path = str(write_trace(tmp_path / "t.json", [op("aten::mm", 0, 5_000)]))
    code, _, said = compare("aaa", path, "--rerun", aaa=run_of())
    assert code == 2 and "t.json is a trace" in said


def test_rounds_decide_and_are_kept(compare, store, monkeypatch):
    """Which spec is measured as which side, and that the verdict comes from the rounds."""

    def alternate(first, second, rounds, timeout, progress):
        assert first.recipe.label == "plain" and second.recipe.label == "optimizer=fused"
        return tuple(
            [Samples(noisy(middle, 5, seed=i), "ms") for i in range(rounds)] for middle in (50, 60)
        )

    monkeypatch.setattr("steplab.cli.compare.alternate_specs", alternate)
    runs = {"aaa": run_of(), "bbb": run_of((1.0,) * 9, recipe={"optimizer": {"impl": "fused"}})}
    code, said, _ = compare("aaa", "bbb", "--rerun", "--fail-if-slower", "3%", **runs)
    assert code == 1 and "B is slower than A" in said and "rounds: 8" in said
    kept = store.load("last")
    assert len(kept.tables["rounds"].rows) == 80 and "saved" in said
    assert kept.against is not None and kept.against.recipe.label == "optimizer=fused"


def test_folders_of_ranks_are_compared(tmp_path, capsys):
    on_time = Step(100, [(0, 40), (90, 100)], [Collective(40, 90)])
    late = Step(100, [(0, 80), (90, 100)], [Collective(80, 90)])
    write_ranks(tmp_path / "a", [on_time] * 8, [late] * 8)
    quick = Step(60, [(0, 40), (50, 60)], [Collective(40, 50)])
    write_ranks(tmp_path / "b", [quick] * 8, [quick] * 8)
    out = tmp_path / "out.json"
    words = ["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--out", str(out)]
    assert main(words) == 0
    assert "faster" in capsys.readouterr().out
    rows = json.loads(out.with_suffix(".communication.json").read_text())["rows"]
    assert rows[0][0] == "waiting for rank 1" and rows[0][3] == -20
