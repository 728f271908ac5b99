"""The command as a user runs it. Starting a worker takes seconds: few runs, much looked at."""

import csv
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("rich")

from steplab.cli.main import main
from steplab.core import Environment, Run
from steplab.store import Store
from steplab.trace.analyze import analyze_run

SMALL = ["--layers", "1", "--width", "16", "--heads", "2", "--ff-width", "16", "--context", "8"]
QUICK = [*SMALL, "--vocab-size", "32", "--steps", "2", "--warmup", "1"]


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Two threads of a worker on a busy machine wait for each other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    """Profile once: return the folder, what was printed, and the Run."""
    import contextlib
    import io

    root = tmp_path_factory.mktemp("profile")
    words = ["profile", *QUICK, "--schedule", "0", "1", "2", "2", "--range", "blocks.0.attention"]
    words += ["--store", str(root / "store"), "--out", str(root / "out")]
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        assert main(words) == 0
    return root, said.getvalue(), Store(root / "store").load("last")


def test_the_budget_comes_first_and_the_files_last(profiled):
    _, said, run = profiled
    marks = ("Time budget", "operators of module blocks.0.attention", "memory: peak", "saved ")
    places = [said.index(mark) for mark in marks]
    assert places == sorted(places)
    for name in run.artifacts:
        assert name in said[places[-1] :]
    assert run.id in said.splitlines()[-1] and "steplab explain" in said.splitlines()[-1]


def test_the_run_holds_it_all(profiled):
    root, _, run = profiled
    assert run.status == "ok" and run.command and run.profile.schedule == (0, 1, 2, 2)
    assert [step.number for step in run.profile.budget.steps] == [1, 2, 4, 5]
    assert run.profile.memory is not None
    files = {"trace_1.json.gz", "trace_2.json.gz", "detail.json.gz", "key_averages.txt"}
    assert set(run.artifacts) == {*files, "page.html"}
    folder = root / "store" / "runs" / run.id
    assert {path.name for path in folder.iterdir()} == {*run.artifacts, "run.json"}
    assert analyze_run(run, folder).budget.steps == run.profile.budget.steps[:2]
    assert "<html" in (folder / "page.html").read_text()


def test_explain_shows_the_budget_of_all_cycles(profiled, capsys):
    root, said, run = profiled
    title = f"(step {run.profile.budget.typical.number}, the median of 4 profiled)"
    cycles = "all 2 cycles count here; kernels and findings are of the first"
    assert main(["explain", "--store", str(root / "store"), "--page", str(root / "e.html")]) == 0
    for shown in (said, capsys.readouterr().out):
        assert title in shown and cycles in shown
    assert cycles in (root / "e.html").read_text()


def test_out_has_the_summary_and_a_copy(profiled):
    root, _, run = profiled
    (row,) = csv.DictReader((root / "out" / "summary.csv").read_text().splitlines())
    assert row["run"] == run.id and row["context"] == "8" and row["size"] == "tiny"
    assert float(row["step_ms"]) == run.clock.step.median
    assert row["trace"] == str(root / "out" / run.id / "trace_1.json.gz")
    for name in run.artifacts:
        assert (root / "out" / run.id / name).is_file()
    assert not (root / "store" / "summary.csv").exists()
    assert not list((root / "store" / "runs").glob(".*"))


def test_a_range_that_only_running_can_rule_out_is_reported_after_everything_else(tmp_path, capsys):
    words = ["profile", *QUICK, "--schedule", "0", "1", "1", "1", "--no-detail"]
    assert main([*words, "--range", "ProfilerStep#99", "--store", str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert "Did you mean 'ProfilerStep#" in said.err
    assert "Time budget" in said.out and "detail.json.gz" not in said.out
    assert Store(tmp_path).load("last").profile.detail is None
    assert (tmp_path / "summary.csv").is_file()


def test_a_module_that_is_not_there_is_refused_before_anything_runs(tmp_path, capsys):
    assert main(["profile", *QUICK, "--range", "blocks.*.atention", "--store", str(tmp_path)]) == 2
    assert "Did you mean 'blocks.*.attention'?" in capsys.readouterr().err
    assert Store(tmp_path).ids() == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--contxt", "8"], "Did you mean '--context'?"),
        (["--range", "blocks.*.attention", "--no-detail"], "Leave out --no-detail"),
        (["--range", "forward", "--by", "module"], "--range and --by show two things"),
        (["--size", "hugs"], "has no size 'hugs'"),
        (["--recipe", "precison=bf16"], "Did you mean 'precision'?"),
        (["--mode", "train"], "Known: infer, forward"),
        (["--schedule", "1", "2", "0", "1"], "must be 1 or more"),
        (["--schedule", "1", "2"], "expected 4 arguments"),
        (["--device", "tpu"], "no device 'tpu'"),
        (["--timeout", "0"], "more than 0"),
        (["--batch", "0"], "batch must be at least 1"),
    ],
)
def test_typos_are_one_sentence_and_start_nothing(tmp_path, capsys, monkeypatch, words, said):
    def start(*args):
        pytest.fail("a worker was started")

    monkeypatch.setattr("steplab.cli.profile.TrialRunner", start)
    assert main(["profile", *words, "--store", str(tmp_path)]) == 2
    assert said in capsys.readouterr().err


def test_a_foreign_summary_is_refused_at_once(tmp_path, capsys, monkeypatch):
    (tmp_path / "summary.csv").write_text("seq_len,ms\n1,2\n")
    monkeypatch.setattr("steplab.cli.profile.TrialRunner", lambda *a: pytest.fail("started"))
    assert main(["profile", "--store", str(tmp_path)]) == 2
    assert "other columns" in capsys.readouterr().err
    assert (tmp_path / "summary.csv").read_text() == "seq_len,ms\n1,2\n"


class Stub:
    """A worker whose Run is given."""

    def __init__(self, **outcome):
        self.outcome = outcome

    def __call__(self, timeout, function):
        return self

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        pass

    def environment(self):
        return Environment("0", "3.11", "Linux", "cpu", 2, None)

    def trial(self, spec, environment, *, progress, plan, folder):
        return Run("an-id", spec, environment, **self.outcome)


@pytest.mark.parametrize(
    ("status", "code"), [("oom", 4), ("crashed", 4), ("timeout", 4), ("unsupported", 3)]
)
def test_a_failure_is_a_stored_status_and_one_sentence(tmp_path, capsys, monkeypatch, status, code):
    stub = Stub(status=status, reason="something went wrong.")
    monkeypatch.setattr("steplab.cli.profile.TrialRunner", stub)
    assert main(["profile", "--store", str(tmp_path)]) == code
    assert capsys.readouterr().err.endswith(f"steplab: {status}: something went wrong.\n")
    assert Store(tmp_path).load("last").status == status
    assert not (tmp_path / "summary.csv").exists()


def test_traces_that_cannot_be_read_are_kept(profiled, tmp_path, capsys, monkeypatch):
    """Recorded first, read later: a damaged file must not cost the others."""
    root, _, run = profiled

    class Damaging(Stub):
        def trial(self, spec, environment, *, progress, plan, folder):
            for name in run.artifacts:
                shutil.copy(root / "store" / "runs" / run.id / name, folder)
            (folder / "trace_1.json.gz").write_bytes(b"\x1f\x8bnot a trace")
            return run

    monkeypatch.setattr("steplab.cli.profile.TrialRunner", Damaging())
    assert main(["profile", *SMALL, "--store", str(tmp_path)]) == 2
    assert "trace_1.json.gz" in capsys.readouterr().err
    kept = tmp_path / "runs" / run.id
    assert (kept / "trace_2.json.gz").is_file() and (kept / "run.json").is_file()


def test_help_shows_the_flags_of_the_workload(capsys):
    with pytest.raises(SystemExit):
        main(["profile", "--help"])
    said = capsys.readouterr().out
    assert "--schedule WAIT WARMUP ACTIVE REPEAT" in said and "--context" in said


def test_the_command_line_leaves_torch_out():
    code = "import sys, steplab.cli.profile; sys.exit('torch' in sys.modules)"
    source = Path(__file__).parents[2] / "src"
    assert subprocess.run([sys.executable, "-c", code], cwd=source, check=False).returncode == 0


@pytest.mark.slow
def test_every_rank_is_recorded(tmp_path, capsys):
    words = "profile gpt --size tiny --batch 1 --context 32 --steps 1 --warmup 1 --device cpu"
    words += " --schedule 0 1 1 1 --layers 1 --ranks 2 --recipe parallel=fsdp"
    assert main([*words.split(), "--store", str(tmp_path)]) == 0
    run = Store(tmp_path).load("last")
    assert {"trace_1.json.gz", "rank1_trace_1.json.gz"} <= set(run.artifacts)
    assert len(run.ranks) == 2
    out = capsys.readouterr().out
    assert "the same files of the other ranks" in out
    assert "all-gather" in out and "waited for" in out  # the tables of collectives and of ranks
