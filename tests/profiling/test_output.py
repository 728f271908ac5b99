"""summary.csv: appended by many, never truncated, one header."""

import csv
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from steplab.core import Budget, Category, Environment, Memory, Profile, Run, RunSpec, StepBudget
from steplab.core.errors import UserError
from steplab.profiling.output import COLUMNS, summary_cells, summary_file

SOURCE = Path(__file__).parents[2] / "src"


def a_run(name: str = "a") -> Run:
    step = StepBudget(
        3, 2.5, {"kernels": 2.0}, (Category("copy", 1.0, 4), Category("matmul bf16", 1.0, 7))
    )
    profile = Profile((1, 2, 3, 1), ("trace_1.json.gz",), budget=Budget((step,), on_device=False))
    environment = Environment("0", "3.11", "Linux", "a CPU, with a comma", 2, None)
    spec = RunSpec("gpt", {"context": 16}, "tiny")
    return Run(name, spec, environment, memory=Memory(1, 2**30, None, None, ""), profile=profile)


def append(folder: Path, run: Run) -> None:
    summary_file(folder, "--out").append(summary_cells(run, Path("x/trace_1.json.gz")))


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "summary.csv").open() as file:
        return list(csv.DictReader(file))


def test_a_row_says_what_was_seen(tmp_path):
    append(tmp_path / "new", a_run())
    path = tmp_path / "new" / "summary.csv"
    assert path.read_text().splitlines()[0] == ",".join(COLUMNS)
    (row,) = rows(path.parent)
    assert row["device"] == "a CPU, with a comma" and row["context"] == "16"
    assert (row["profiled_ms"], row["kernels_per_step"], row["peak_gib"]) == ("2.5", "11", "1.0")
    assert row["step_ms"] == "" and row["trace"] == "x/trace_1.json.gz"


def test_rows_are_added_and_none_is_lost(tmp_path):
    for name in "abc":
        append(tmp_path, replace(a_run(), id=name))
    assert [row["run"] for row in rows(tmp_path)] == ["a", "b", "c"]
    assert [path.name for path in tmp_path.iterdir()] == ["summary.csv"]


def test_many_at_once(tmp_path):
    script = (
        "import sys; from pathlib import Path\n"
        "from steplab.profiling.output import summary_cells, summary_file\n"
        "from steplab.core import Environment, Run; from steplab.core import RunSpec\n"
        "environment = Environment('0', '3.11', 'Linux', 'c' * 9000, 2, None)\n"
        "for i in range(40):\n"
        "    run = Run(f'{sys.argv[2]}-{i}', RunSpec('gpt'), environment)\n"
        "    summary_file(Path(sys.argv[1]), '--out').append(summary_cells(run, Path('t')))\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    children = [
        subprocess.Popen([*command, str(n)], env={"PYTHONPATH": str(SOURCE)}) for n in range(3)
    ]
    assert all(child.wait() == 0 for child in children)
    seen = [row["run"] for row in rows(tmp_path)]
    assert sorted(seen) == sorted(f"{n}-{i}" for n in range(3) for i in range(40))


def test_a_summary_of_somebody_else_is_refused(tmp_path):
    summary = summary_file(tmp_path, "--out")
    summary.check()
    (tmp_path / "summary.csv").write_text("dtype,seq_len,ms_per_step\n")
    with pytest.raises(UserError, match="other columns"):
        summary.check()
    (tmp_path / "summary.csv").unlink()
    append(tmp_path, a_run())
    summary.check()
