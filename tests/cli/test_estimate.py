"""steplab estimate as a user runs it."""

import io
import json
import re
from dataclasses import replace

import pytest
from rich.console import Console

from steplab.cli import estimate
from steplab.cli.bench import step as bench_step
from steplab.cli.command import Parser
from steplab.cli.estimate import _memory
from steplab.cli.main import main
from steplab.core import Memory, Samples
from steplab.core.run import Accelerator
from steplab.report.terminal import _draw
from steplab.store import Store
from steplab.store.predictions import predictions
from tests.compare.sides import ENVIRONMENT, run_of

TINY = ["estimate", "gpt", "--size", "tiny", "--layers", "2", "--batch", "2"]


def test_without_a_batch_it_is_the_step_that_bench_step_measures():
    batches = []
    for command in (estimate.COMMAND, bench_step.COMMAND):
        parser = Parser("", "")
        command.flags(parser, ["gpt"])
        batches.append(parser.get_default("batch"))
    assert batches == [4, [4]]


def test_a_table_over_ranks_with_cost_and_memory(tmp_path, capsys):
    words = [*TINY, "--ranks", "1", "8", "--tokens", "1e9", "--price", "2.5"]
    assert main([*words, "--store", str(tmp_path), "--out", str(tmp_path / "t.json")]) == 0
    shown = capsys.readouterr().out
    assert "largest batch that fits" in shown and "counted" in shown and "modelled" in shown
    assert (tmp_path / "t.json").is_file()
    assert len(list((tmp_path / "predictions").glob("*.json"))) == 2


def test_no_number_is_cut_on_a_narrow_terminal(tmp_path, capsys):
    """The smallest parts of the memory are left out, and named."""
    assert main([*TINY, "--ranks", "1", "8", "--store", str(tmp_path)]) == 0
    out = Console(file=io.StringIO(), width=100)
    _draw(_memory(list(predictions(Store(tmp_path))), [892_546] * 2), out)
    text = out.file.getvalue()
    assert text.count("892,546") == 2 and "weights" in text
    assert max(map(len, text.splitlines())) <= 100
    assert "no room for: reserved" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--on", "h900"], "no card 'h900'"),
        (["--network", "carrier-pigeon"], "no link 'carrier-pigeon'"),
        (["--tokens", "-1"], "--tokens must be more than 0"),
        (["--price", "2.5"], "--price needs --tokens"),
        (["--batch", "10000000"], "batch 10000000, full never fits: a rank on the H200 SXM needs"),
        (["--ranks", "0"], "--ranks and --per-machine must be at least 1"),
        (["--calibration"], "no Run of any of these steps"),
        (["--on", "here", "--plan"], "--plan counts on a card that is named"),
        (
            ["--on", "here", "--device", "cpu", "--ranks", "2"],
            "Run steplab bench collectives first",
        ),
        (["--on", "here", "--device", "cuda"], "torch sees no GPU"),
    ],
)
def test_bad_input_is_one_sentence(words, said, tmp_path, capsys):
    assert main([*TINY, *words, "--store", str(tmp_path)]) == 2
    assert said in capsys.readouterr().err


def test_a_model_that_never_fits_is_told_with_what_it_needs(tmp_path, capsys):
    words = ["estimate", "gpt", "--size", "2.7b", "--layers", "4", "--on", "t4", "--batch", "1"]
    code = main([*words, "--vocab-size", "500000", "--store", str(tmp_path)])
    assert code == 2
    assert "has 14." in capsys.readouterr().err


def test_an_op_that_needs_values_is_one_sentence_with_its_line(tmp_path, capsys):
    file = tmp_path / "my_model.py"
    file.write_text(
        "import torch, steplab\n"
        "def make():\n"
        "    def batches(size):\n"
        "        while True:\n"
        "            yield torch.randn(size, 4)\n"
        "    def loss(model, x):\n"
        "        kept = torch.nonzero(x.flatten() > 0)\n"
        "        return model(x).sum() * len(kept)\n"
        "    return steplab.UserModel(torch.nn.Linear(4, 4), batches, loss)\n"
    )
    assert main(["estimate", f"{file}:make", "--store", str(tmp_path / "store")]) == 3
    said = capsys.readouterr().err
    assert re.search(r"aten\.nonzero\.default at .*my_model\.py:7 .*needs values", said)
    assert "Traceback" not in said


def test_a_model_that_raises_is_one_sentence_with_its_line(tmp_path, capsys):
    file = tmp_path / "my_model.py"
    file.write_text(
        "import torch, steplab\n"
        "class Net(torch.nn.Linear):\n"
        "    def forward(self, x):\n"
        "        return super().forward(x) + self.nothing\n"
        "def make():\n"
        "    batches = lambda size: [torch.randn(size, 4)]\n"
        "    return steplab.UserModel(Net(4, 4), batches, lambda model, x: model(x).mean())\n"
    )
    assert main(["estimate", f"{file}:make", "--store", str(tmp_path)]) == 4
    said = capsys.readouterr().err
    assert "its step fails: AttributeError: 'Net' object has no attribute 'nothing'" in said
    assert "my_model.py:4 (forward)" in said and "Traceback" not in said


@pytest.mark.slow
def test_a_plan_puts_the_best_first(tmp_path, capsys, store):
    words = ["estimate", "gpt", "--size", "tiny", "--layers", "1", "--plan", "--ranks", "2"]
    words += ["--tokens", "1e9", "--price", "2.5", "--store", str(store.root)]
    assert main([*words, "--out", str(tmp_path / "plans.json")]) == 0
    shown = capsys.readouterr().out
    assert "plans, the fastest per token first" in shown and "time against cost" in shown
    names = ("plans.json", "plans.1.json")
    plans, best = (json.loads((tmp_path / name).read_text()) for name in names)
    speed = [column["name"] for column in plans["columns"]].index("tokens/s")
    speeds = [row[speed] for row in plans["rows"]]
    assert speeds == sorted(speeds, reverse=True)
    assert best["rows"][0] == plans["rows"][0]
    assert len(list(predictions(store))) == len(plans["rows"])


def test_a_run_of_a_predicted_step_shows_the_error(tmp_path, capsys, store):
    words = [*TINY, "--store", str(store.root)]
    assert main(words) == 0
    found = next(predictions(store))
    gpu = replace(ENVIRONMENT, accelerators=(Accelerator("NVIDIA H200", 141 * 10**9),))
    steps = Samples((found.step_ms / 1.1,) * 10, "ms")
    run = run_of()
    run = replace(
        run,
        spec=replace(found.spec, steps=33, warmup=3),  # measured in another way, the same step
        environment=gpu,
        clock=replace(run.clock, step=steps),
        memory=Memory(0, int(found.peak_bytes / 1.02), None, None, "cuda allocator"),
    )
    for name in ("aaa", "bbb"):
        store.save(replace(run, id=f"20250101-{name}"))
    capsys.readouterr()
    assert main(["compare", "aaa", "bbb", "--store", str(store.root)]) == 0
    assert "off by +10.0 % in time, memory +2.0 %" in capsys.readouterr().out
    assert main(["estimate", "--calibration", "--store", str(store.root)]) == 0
    shown = capsys.readouterr().out
    assert "2 of 2 inside the 80 % interval" in shown and "10.0 %" in shown


@pytest.mark.parametrize(("busy", "host_factor"), [(0.5, 1.5), (0.99, 1.0)])
def test_shards_are_told_at_the_pace_of_the_measured_step_on_one_rank(
    busy, host_factor, tmp_path, capsys, store
):
    words = [*TINY, "--store", str(store.root)]
    assert main(words) == 0
    alone = next(predictions(store))
    host = Samples((1.5 * alone.host_ms,) * 10, "ms")
    run = run_of()
    run = replace(
        run,
        id="20250101-single",
        spec=alone.spec,
        environment=replace(ENVIRONMENT, accelerators=(Accelerator("NVIDIA H200", 141 * 10**9),)),
        clock=replace(run.clock, step=host, host=host),
        ran=replace(run.ran, device_busy_ms=busy * 1.5 * alone.host_ms),
    )
    sharded = [*words, "--recipe", "parallel=fsdp", "--ranks", "2"]
    assert main(sharded) == 0
    expected = next(one for one in predictions(store) if one.spec.ranks == 2)
    store.save(run)
    capsys.readouterr()
    assert main(sharded) == 0
    told = next(one for one in predictions(store) if one.spec.ranks == 2)
    assert told.host_ms == pytest.approx(host_factor * expected.host_ms)
    kernels = run.ran.device_busy_ms / alone.device_ms
    assert told.device_ms == pytest.approx(kernels * expected.device_ms)
    assert f"at the pace of {run.id}: kernels {kernels:.2f}" in capsys.readouterr().out


@pytest.mark.slow
def test_rank_0_is_measured_here_and_its_messages_are_modelled(tmp_path, capsys, store):
    where = ["--store", str(store.root)]
    assert main(["bench", "collectives", "--world", "2", "--mib", "0.1", "1", "--device", "cpu",
                 "--runs", "3", *where]) == 0  # fmt: skip
    words = [*TINY, "--on", "here", "--device", "cpu", "--ranks", "2", *where]
    assert main([*words, "--recipe", "parallel=fsdp"]) == 0
    shown = capsys.readouterr().out
    assert "kernel times are measured: rank 0 of 2 in a group that does nothing" in shown
    assert "measured; bench collectives on 2 ranks" in shown
    found = next(predictions(store))
    assert found.low_ms < found.step_ms < found.high_ms
    assert {one.op for one in found.sent} == {"all-gather", "all-reduce", "reduce-scatter"}
    assert found.known_by["memory"] == "measured" and found.peak_bytes > 0
