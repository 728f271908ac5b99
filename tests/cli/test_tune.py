"""`steplab tune` from the outside."""

import contextlib
import json
import shlex
from dataclasses import replace
from pathlib import Path
from unittest.mock import MagicMock

import pytest

pytest.importorskip("rich")

from steplab.cli.bench.step import COMMAND
from steplab.cli.command import Parser
from steplab.cli.flags import given_fields
from steplab.cli.main import main
from steplab.cli.step_flags import check_gpus
from steplab.cli.tune import _refusal, _spec, bench_command
from steplab.core import Accelerator, Environment, RunSpec
from steplab.core.errors import UserError
from steplab.core.ladder import Ladder
from steplab.techniques.recipes import parse_recipe, read_recipe_file
from steplab.tune.report import OutcomeFiles
from steplab.workloads.script.lift import Survey
from steplab.workloads.workload import find_workload
from tests.compare.sides import ENVIRONMENT

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
    command = bench_command(RunSpec("gpt", config, "xl", batch=4), Path("best.toml"), ENVIRONMENT)
    assert command == "steplab bench step gpt --size xl --batch 4 --mode full --recipe best.toml"


@pytest.mark.parametrize("size", ["", "tiny"])
def test_the_printed_command_measures_the_step_that_was_tuned(size, tmp_path):
    config = find_workload("gpt").resolve(size, {"context": 96, "fused_projections": True})
    spec = RunSpec("gpt", config, size, batch=3, accumulate=2, mode="forward+backward", ranks=2)
    spec = replace(spec, clip=0.0, seed=7)
    path = tmp_path / "with a space.toml"
    path.write_text('[precision]\ndtype = "bf16"\n')
    card = Accelerator("NVIDIA H200", 10**9)
    words = shlex.split(bench_command(spec, path, replace(ENVIRONMENT, accelerators=(card,))))[3:]
    parser = Parser("steplab bench step", "")
    COMMAND.flags(parser, words)
    args = parser.parse(words)
    assert (args.batch, args.accumulate, args.mode) == ([3], 2, ["forward+backward"])
    assert args.ranks == [2]
    assert (args.clip, args.seed, args.device) == (0.0, 7, "cpu")
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


@pytest.mark.parametrize("against", [[], ["--against", "compile=whole"]])
def test_the_search_knows_what_a_script_has_already(against, capsys, tmp_path, monkeypatch):
    """Also where the winner is compared with something else."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    own, asked = parse_recipe("precision=bf16"), []

    def found(spec, options, *rest):
        asked.append(options)
        return Ladder("id", spec, ENVIRONMENT, winner=own, own=options.own), MagicMock()

    worker = MagicMock()
    worker.return_value.__enter__.return_value.environment.return_value = ENVIRONMENT
    monkeypatch.setattr("steplab.cli.tune.ReferenceWorker", worker)
    monkeypatch.setattr("steplab.cli.tune.WorkerPool", MagicMock())
    monkeypatch.setattr("steplab.cli.tune.lift_script", lambda spec, *rest: (spec, own))
    monkeypatch.setattr("steplab.cli.tune.tune", found)
    files = OutcomeFiles(Path("report.html"), Path("r.toml"))
    monkeypatch.setattr("steplab.cli.tune.write_outcome", lambda *rest: files)
    assert main(["tune", "--script", "train.py", "--store", "runs", *against]) == 0
    assert asked[0].own == own
    assert asked[0].against == (parse_recipe("compile=whole") if against else None)
    printed = capsys.readouterr().out
    assert "train.py has this already: nothing to gain" in printed
    assert "in your own loop" not in printed


@pytest.mark.slow
def test_a_script_that_fails_by_itself_is_told_by_its_last_words(capsys, tmp_path, monkeypatch):
    """No factory would help it."""
    monkeypatch.chdir(tmp_path)
    script = "import argparse\nargparse.ArgumentParser().parse_args()\n"
    (tmp_path / "train.py").write_text(script)
    assert main("tune --script train.py --store runs -- --wdth 3".split()) == 2
    out, err = capsys.readouterr()
    assert "train.py ended by itself with code 2 before its first backward pass. " in err
    assert "unrecognized arguments: --wdth 3. See that" in err and "def make" not in out


@pytest.mark.slow
def test_a_script_that_never_trains_gets_no_start_of_a_factory(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("import sys\nprint(sys.argv[1:])\n")
    assert main("tune --script train.py --store runs -- --lr 3".split()) == 2
    out, err = capsys.readouterr()
    assert "train.py ended before its first backward pass. Its last words: ['--lr', '3']. " in err
    assert "Traceback" not in err and "def make" not in out


def test_a_refusal_is_a_sentence_with_what_to_do(capsys):
    """Words of the script end with a full stop; a start is announced where there is one."""
    early = Survey(refusal="t.py ended early.", remedy="See to it.", ended=True)
    told = str(_refusal(early, ["one", "the flag is required: --data"]))
    assert told == "t.py ended early. Its last words: the flag is required: --data. See to it."
    assert str(_refusal(early, ["no data."])).endswith("words: no data. See to it.")
    assert str(_refusal(early, [])) == "t.py ended early. See to it."
    assert capsys.readouterr().out == ""
    known = Survey(refusal="t.py clips by value.", beginning="def make():")
    told = str(_refusal(known, ["loss 0.3"]))
    assert told == "t.py clips by value. Write it as a factory; a start is printed above."
    assert capsys.readouterr().out == "def make():\n"


@pytest.mark.parametrize(
    ("words", "norm", "line"),
    [
        ("my_model.py:make", 1.0, "optimizer)"),
        ("my_model.py:make --clip 1", 1.0, "optimizer, clip=1)"),
        ("my_model.py:make --clip 0", 0.0, "optimizer)"),
        ("--script my_model.py --clip 0.5", 0.5, "optimizer, clip=0.5)"),
        ("--script my_model.py", 0.0, "optimizer)"),
    ],
)
def test_only_a_clip_that_was_asked_for_goes_into_the_loop(
    words, norm, line, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_model.py").write_text("def make(): ...\n")

    def found(args, *rest):
        ladder = Ladder("id", _spec(args, "cpu"), ENVIRONMENT, winner=parse_recipe("compile=loss"))
        assert ladder.spec.clip == norm
        return ladder, OutcomeFiles(Path("report.html"), Path("r.toml"))

    for name in ("ReferenceWorker", "WorkerPool"):
        monkeypatch.setattr(f"steplab.cli.tune.{name}", MagicMock())
    monkeypatch.setattr("steplab.cli.tune.search", found)
    assert main(["tune", *words.split()]) == 0
    out = capsys.readouterr().out
    recipe = str(tmp_path / "r.toml")  # the loop may run in another folder
    assert f"  step = steplab.optimize(model, loss, {recipe!r}, {line}\n" in out
    asked = words.endswith("make")
    assert ("clipped to the norm 1, the default" in out) == asked
    assert ("--clip 0 " in out) == (norm == 0)
