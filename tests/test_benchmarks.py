"""Scripts that measure GPUs say so where there is none."""

import importlib
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from steplab.bench.loss_gap import LossGap, Pair, Training
from steplab.bench.op_accuracy import Accuracy
from steplab.core import Counters, Samples, Table
from steplab.core.errors import UserError
from steplab.kernels.dispatch import impls, ops
from steplab.report.export import write_table
from tests.compare.sides import run_of

FOLDER = Path(__file__).parents[1] / "benchmarks"
NEED_A_GPU = [
    *("attention_tiles", "cuda_graphs", "ema_kernels"),
    *(
        "experts_kernels",
        "flagship",
        "fp8_questions",
        "hydra_first",
        "hydra_notes",
        "loss_kernels",
        "megalodon_notes",
        "norms_kernels",
    ),
]


NEEDED_WORDS = {"fp8_questions": ["folder"]}


@pytest.mark.parametrize("name", NEED_A_GPU)
def test_without_a_gpu_a_script_ends_with_one_sentence(name, monkeypatch, capsys):
    for needed in ("triton", "rich", "msgspec"):
        pytest.importorskip(needed)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *NEEDED_WORDS.get(name, [])])
    monkeypatch.syspath_prepend(FOLDER)
    script = importlib.import_module(name)
    with pytest.raises(SystemExit) as ended:
        script.main()
    printed = capsys.readouterr()
    assert ended.value.code == 3 and not printed.out
    assert printed.err.startswith(f"{name}.py: There is nothing to measure: torch sees no GPU.")
    assert printed.err.count("\n") == 1


def test_device_time_is_counted_without_steplab(monkeypatch):
    """Two streams, a copy, and a host that is ahead of the device by more than a step."""
    monkeypatch.syspath_prepend(FOLDER)
    counted = importlib.import_module("public_traces")

    def event(cat, name, ts, dur, correlation=0):
        return {
            "cat": cat,
            "name": name,
            "ts": ts,
            "dur": dur,
            "args": {"correlation": correlation},
        }

    marks = [event("user_annotation", f"ProfilerStep#{n}", 1000 * n, 1000) for n in (1, 2, 3)]
    calls = [event("cuda_runtime", "cudaLaunchKernel", 1000 * n + 9, 5, n) for n in (1, 2, 3)]
    kernels = [event("kernel", "k", 1000 * n + 20, 500, n) for n in (1, 2, 3)]
    beside = [event("kernel", "k", 2100, "600.5", 2), event("gpu_memcpy", "m", 2700, 100, 2)]
    found = counted.count([*marks, *calls, *kernels, *beside])
    assert [step.kernels for step in found] == [0.5, 0.6805, 0.5]
    assert (found[1].busy, found[1].summed, found[1].wall) == (0.78, 1.1005, 1.0)
    late = [event("kernel", "k", 2500 * n + 2000, 2500, n) for n in (1, 2, 3)]
    before = [event("kernel", "k", 1000 * n + 50, 900, 90 + n) for n in (1, 2, 3)]
    behind = counted.count([*marks, *calls, *late, *before])
    assert [(step.number, step.wall) for step in behind] == [(2, 2.5), (3, 2.5)]


def test_a_cell_of_the_flagship_is_named_or_begun(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    flagship = importlib.import_module("flagship")
    assert flagship.chosen(["ours"]) == ["ours"]
    assert flagship.chosen(["ours, fp8"]) == ["ours, fp8"]
    assert flagship.chosen(["expert", "ours"])[-1] == "ours"
    assert len(flagship.chosen(["ours,"])) == 4 and flagship.chosen([]) == list(flagship.CELLS)
    with pytest.raises(UserError, match="There is no cell 'theirs'"):
        flagship.chosen(["theirs"])


def test_the_flagship_is_told_with_the_clocks_it_ran_at(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    flagship = importlib.import_module("flagship")
    counters = Counters(
        power_w=Samples((690.0,), "W"),
        sm_clock_mhz=Samples((1500.0,), "MHz"),
        sm_clock_max_mhz=1980.0,
        held_back={"its power limit": 1.0},
    )
    read = replace(run_of(), counters=counters, notes=(counters.held_clock,))
    failed = replace(run_of(), clock=None, status="oom", reason="too large")
    table = flagship.tabulated({"ours": read, "theirs": failed}, "flagship", 16)
    names = [column.name for column in table.columns]
    ours, theirs = (dict(zip(names, row, strict=True)) for row in table.rows)
    assert (ours["power"], ours["SM clock"]) == (690.0, 1500.0)
    assert ours["held back by"] == "its power limit" and ours["status"] == "ok"
    assert theirs["SM clock"] is None and theirs["status"] == "oom: too large"
    assert table.note.endswith(f"ours: {counters.held_clock}")


def test_questions_that_find_no_time_are_left_for_the_next_call(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(FOLDER)
    questions = importlib.import_module("fp8_questions")
    asked = []

    def run_part(name, folder, seconds, tiny):
        asked.append((name, seconds))
        return {"gate": "answered: red", "xl": "failed (3): needs torchao"}.get(name, "answered")

    monkeypatch.setattr(questions, "run_part", run_part)
    ticks = iter(range(0, 10_000, 100))
    monkeypatch.setattr(questions, "perf_counter", lambda: next(ticks))
    names = ["gate", "xl", "convergence"]
    gate, xl = (questions.PARTS[name].seconds for name in ("gate", "xl"))
    rows = questions.answered(names, tmp_path, 580, tiny=False)
    seen = ["answered: red", "failed (3): needs torchao", "no time was left"]
    assert [row[-1] for row in rows] == seen
    assert asked == [("gate", gate), ("xl", xl)]
    rows = questions.answered(names, tmp_path, 400, tiny=False)
    assert [row[-1] for row in rows] == ["answered before", *seen[1:]]
    assert asked[2:] == [("xl", xl)]


def test_speed_at_equal_loss_is_told_once_both_are_known(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(FOLDER)
    questions, flagship = (importlib.import_module(name) for name in ("fp8_questions", "flagship"))
    assert questions.loss_matched(tmp_path) == ""
    row = (200.0, 1.0, None, 50.0, 30.0, 9.0, 2.0, 690.0, 1500.0, "its power limit", "ok")
    rows = [(name, *row[:2], rate, *row[3:]) for name, rate in (("ours", 3e5), ("ours, fp8", 36e4))]
    write_table(Table("t", flagship.COLUMNS, tuple(rows)), tmp_path / "flagship.json")
    losses = [Training(0, (1, 2, 3), curve, 1e5) for curve in ((4.0, 3.0, 2.0), (4.0, 3.0, 2.5))]
    gap = LossGap("flagship", "fp8", (Pair(*losses),) * 4, 0.0025)
    write_table(gap.recipe_table(), tmp_path / "convergence.recipes.json")
    # bf16 has a loss of 2.5 after 2.5 of its 3 steps.
    told = questions.loss_matched(tmp_path)
    assert told == "fp8 360,000 tokens/s, loss-matched 300,000: 1.000 times bf16's 300,000"


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(
    "name", ["gate", "flagship", "xl", "small", "hydra", "decode", "convergence"]
)
def test_every_question_can_be_asked(name, tmp_path):
    """The tiny command runs here; the one for the card is refused for want of a GPU only."""
    if torch.cuda.is_available():
        pytest.skip("here it would be measured")
    done = _run(f"fp8_questions.py {tmp_path} {name} --tiny")
    printed = (tmp_path / f"{name}.txt").read_text()
    assert "answered" in done.stdout and done.returncode == 0, done.stdout + done.stderr + printed
    sys.path.insert(0, str(FOLDER))
    try:
        command = importlib.import_module("fp8_questions").command_of(name, tmp_path, tiny=False)
    finally:
        sys.path.remove(str(FOLDER))
    environment = {**os.environ, "PYTHONPATH": str(FOLDER.parent / "src")}
    refused = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert refused.returncode in (2, 3) and "torch sees no GPU" in refused.stderr, refused.stderr


@pytest.mark.slow
@pytest.mark.long
def test_the_cost_of_sharding_is_measured_without_other_ranks():
    done = _run(
        "sharding_cost.py --size tiny --context 16 --device cpu --batch 1 "
        "--recipe optimizer=fused --way parallel=fsdp"
    )
    assert done.returncode == 0, done.stderr
    assert "rank 0 of 8, no communication" in done.stdout and "ok" in done.stdout


@pytest.mark.slow
@pytest.mark.long
def test_implementations_are_compared_with_fp64_at_their_shapes(tmp_path):
    table = tmp_path / "table.csv"
    ops = "router rotary rms_norm timestep_norm"
    done = _run(f"kernel_accuracy.py --tiny --device cpu {ops} --out {table}")
    assert done.returncode == 0, done.stderr
    verdicts = [line.split(",")[-1] for line in table.read_text().splitlines()]
    assert verdicts.count("right") == 8 and verdicts.count("needs a GPU") == 6


def test_every_op_has_a_case_and_every_implementation_a_row(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    accuracy = importlib.import_module("kernel_accuracy")
    accuracy.check_covered()
    monkeypatch.setattr(accuracy, "ops", lambda: [*ops(), "new_op"])
    with pytest.raises(UserError, match=r"no case for new_op\."):
        accuracy.check_covered()
    rows = accuracy.Rows(torch.device("cpu"), 1)
    cases = {
        "embedding": accuracy.embedding_case(rows, "small", 64, 100, 24),
        "feed_forward": accuracy.feed_forward_case(rows, "small", 64, 16, 32, "swiglu", False),
        "grouped_mm": accuracy.grouped_case(rows, "small", 64, 16, 32, trained=False),
        "layer_norm": accuracy.layer_norm_case(rows, "small", 64, 24),
        "top_rows": accuracy.top_rows_case(rows, "small", 2, 64),
    }
    for op, case in cases.items():
        found = {row[2]: row[-1] for row in accuracy.case_rows(op, case, rows.device)}
        assert sorted(found) == impls(op) and found[case.definition] == "right", found
        assert accuracy.WRONG not in found.values(), found


def test_fp8_is_judged_by_the_whole_tensor(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    accuracy = importlib.import_module("kernel_accuracy")
    rounded, wrong = (Accuracy("out", error, 0.01, 30.0) for error in (0.05, 0.2))
    assert accuracy.verdict("fp8", [rounded])[-1] == "right"
    assert accuracy.verdict("fp8", [rounded, wrong])[-1] == accuracy.WRONG
    assert accuracy.verdict("fused", [rounded])[-1] == accuracy.WRONG


def _run(words):
    script, *flags = words.split()
    command = [sys.executable, str(FOLDER / script), *flags]
    environment = {**os.environ, "PYTHONPATH": str(FOLDER.parent / "src")}
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_the_kernel_behind_a_fill_tells_what_it_is_for(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    found = importlib.import_module("step_kernels")
    step = [
        found.Kernel("nvjet_tst_128x256_64x4", 100, 50),
        found.Kernel("Memset (Device)", 151, 1),  # 1 us after the product
        found.Kernel("Memset (Device)", 153, 1),
        found.Kernel("nvjet_tst_splitK", 157, 40),
        found.Kernel("adamw_kernel", 180, 30),  # beside it, on another stream
        found.Kernel("Memset (Device)", 212, 1),
        found.Kernel("triton_red_fused_sum_0", 213, 7),
    ]
    seen = found.summary(step[::-1])
    assert seen["fills"] == {"nvjet_tst_splitK": 2, "triton_red_fused_sum_0": 1}
    assert seen["counts"]["memset"] == 3
    assert seen["idle"]["memset"] == pytest.approx(0.001 + 0.001 + 0.002)
    assert sum(seen["idle"].values()) == pytest.approx(0.004 + 0.003)
    assert sum(seen["kinds"].values()) == pytest.approx(0.130)
    assert (
        found.lines(seen)[2] == "3 fills, before: 2 x nvjet_tst_splitK, 1 x triton_red_fused_sum_0"
    )
    assert found.lines(found.summary([])) == ["no kernels: there is no GPU"]
