"""`steplab tune` from the outside."""

import contextlib
import json
import shlex
from pathlib import Path

import pytest

pytest.importorskip("rich")

from steplab.cli.bench.step import COMMAND
from steplab.cli.command import Parser
from steplab.cli.flags import given_fields
from steplab.cli.main import main
from steplab.cli.step_flags import check_gpus
from steplab.cli.tune import bench_command
from steplab.core import Accelerator, Environment, RunSpec
from steplab.core.errors import UserError
from steplab.techniques.recipes import parse_recipe, read_recipe_file
from steplab.workloads.workload import find_workload

SMALL = "--width 32 --ff-width 64 --layers 2 --heads 2 --context 16 --vocab-size 64".split()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--objective", "speed"], "objective"),
        (["--budget", "0"], "--budget must be more than 0"),
        (["--also-batch", "-1"], "--also-batch must be more than 0"),
        (["--device", "gpu"], "no device"),
        (["--recipe", "compil=whole"], "Did you mean 'compile'?"),
        (["--sizes", "tiny"], "--size"),
        (["--batch", "0"], "batch must be at least 1"),
        (["--batch", "many"], "a number or auto, not 'many'"),
        (["--against", "optimiser=fused"], "Did you mean 'optimizer'?"),
        (["--ranks", "0"], "ranks must be at least 1"),
        (["--ranks", "2", "--backend", "mpi"], "Known: nccl, gloo."),
        (
            ["--ranks", "2", "--recipe", "cuda_graph=step"],
            "2 ranks cannot share a step of this recipe: cuda_graph replays a step",
        ),
    ],
)
def test_a_typo_is_reported_before_anything_starts(words, said, capsys, monkeypatch):
    def no_worker(*args):
        raise AssertionError("a worker was started")

    monkeypatch.setattr("steplab.workers.client.Worker.__init__", no_worker)
    assert main(["tune", "gpt", *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("words", [["tune"], ["profile"], ["bench", "step"], ["bench", "ddp"]])
def test_a_launcher_is_not_needed(words, capsys, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert main(words) == 2
    assert "Leave out the launcher and add --ranks 4." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("device", "backend", "gpus", "said"),
    [
        ("cuda", "", 1, "nccl needs a GPU for each of 2 ranks, but there are 1."),
        ("cuda", "nccl", 1, "nccl needs a GPU for each of 2 ranks, but there are 1."),
        ("cpu", "nccl", 2, "but the device is cpu."),
        ("cuda", "", 2, ""),
        ("cuda", "gloo", 1, ""),
        ("cpu", "", 0, ""),
    ],
)
def test_ranks_that_share_a_gpu_talk_by_gloo(device, backend, gpus, said):
    cards = (Accelerator("NVIDIA H200", 10**9),) * gpus
    machine = Environment("0", "3.11", "Linux", "cpu", 2, None, accelerators=cards)
    spec = RunSpec("gpt", device=device, backend=backend, ranks=2)
    with pytest.raises(UserError, match=said) if said else contextlib.nullcontext():
        check_gpus(spec, machine)


@pytest.mark.slow
def test_a_short_search_ends_with_a_report_and_can_go_on(tmp_path, capsys, monkeypatch):
    """Little time: the baseline, perhaps a rung or two, and what is left is named."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    store = tmp_path / "store"
    words = ["tune", "gpt", *SMALL, "--batch", "2", "--budget", "0.3", "--store", str(store)]
    assert main([*words, "--device", "cpu"]) == 0
    printed = capsys.readouterr()
    assert "performance impact" in printed.out and "stopped:" in printed.out
    (folder,) = (store / "ladders").iterdir()
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "Tuning gpt tiny, " in page and ", batch 2" in page and "numerics against fp64" in page
    ladder = json.loads((folder / "ladder.json").read_text())
    assert ladder["baseline_checks"] and all(c["passed"] for c in ladder["baseline_checks"])
    assert ladder["left"] or ladder["finished"]
    read_recipe_file(folder / "recipe.toml")
    runs = list((store / "runs").glob("[0-9]*/run.json"))
    assert runs, "the baseline is a Run like any other"


def test_the_printed_command_has_size_batch_and_mode():
    config = find_workload("gpt").resolve("xl", {})
    command = bench_command(RunSpec("gpt", config, "xl", batch=4), Path("best.toml"))
    assert command == "steplab bench step gpt --size xl --batch 4 --mode full --recipe best.toml"


@pytest.mark.parametrize("size", ["", "tiny"])
def test_the_printed_command_measures_the_step_that_was_tuned(size, tmp_path):
    config = find_workload("gpt").resolve(size, {"context": 96, "fused_projections": True})
    spec = RunSpec("gpt", config, size, batch=3, accumulate=2, mode="forward+backward", ranks=2)
    path = tmp_path / "with a space.toml"
    path.write_text('[precision]\ndtype = "bf16"\n')
    words = shlex.split(bench_command(spec, path))[3:]
    parser = Parser("steplab bench step", "")
    COMMAND.flags(parser, words)
    args = parser.parse(words)
    assert (args.batch, args.accumulate, args.mode) == ([3], 2, ["forward+backward"])
    assert args.ranks == [2]
    assert args.recipe == [parse_recipe("precision=bf16")]
    assert given_fields(args) == {"context": [96], "fused_projections": [True]}


def test_words_behind_two_dashes_are_for_a_script(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main("tune gpt -- --width 3".split()) == 2
    assert "Words after -- are for a script. Name it: --script train.py" in capsys.readouterr().err
    assert main("tune --script missing.py -- --width 3".split()) == 2
    assert "There is no file missing.py." in capsys.readouterr().err


def test_words_for_a_script_without_two_dashes_say_where_they_belong(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    assert main("tune --script train.py --width 3".split()) == 2
    said = capsys.readouterr().err
    assert "has no flag --width. Words for train.py come after two dashes: -- --width" in said
    assert main("tune --script train.py --budgte 3".split()) == 2
    assert "Did you mean '--budget'?" in capsys.readouterr().err
    assert main("tune gpt --script train.py".split()) == 2
    assert "gpt and --script train.py both name what is tuned." in capsys.readouterr().err


@pytest.mark.slow
def test_a_script_that_fails_by_itself_is_told_by_its_last_words(capsys, tmp_path, monkeypatch):
    """No factory would help it."""
    monkeypatch.chdir(tmp_path)
    script = "import argparse\nargparse.ArgumentParser().parse_args()\n"
    (tmp_path / "train.py").write_text(script)
    assert main("tune --script train.py --store runs -- --wdth 3".split()) == 2
    out, err = capsys.readouterr()
    assert "train.py ended by itself with code 2, before its first backward pass" in err
    assert "unrecognized arguments: --wdth 3" in err and "def make" not in out


@pytest.mark.slow
def test_a_script_that_cannot_be_lifted_gets_the_start_of_a_factory(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import sys\nprint(sys.argv[1:])\n")
    assert main("tune --script train.py --store runs -- --lr 3".split()) == 2
    out, err = capsys.readouterr()
    assert "train.py ended, before its first backward pass" in err and "Traceback" not in err
    assert "def make():" in out and "return steplab.UserModel(" in out
