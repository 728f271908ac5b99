import importlib
import os
import subprocess
import sys

import pytest

pytest.importorskip("rich")

import steplab
from steplab.cli.command import Group
from steplab.cli.main import main


def test_a_parameter_that_is_called_as_a_flag(tmp_path, capsys):
    own = tmp_path / "own.py"
    own.write_text("def make(steps: int = 3): pass\n")
    assert main(["bench", "step", f"{own}:make"]) == 2
    assert "steplab bench step's own flag --steps. Rename the parameter." in capsys.readouterr().err


def test_help_lists_the_commands(capsys):
    assert main([]) == 0
    out = capsys.readouterr().out
    for name in ("bench", "env", "runs"):
        assert f"\n  {name}" in out


def test_groups_have_help_too(capsys):
    assert main(["bench", "--help"]) == 0
    out = capsys.readouterr().out
    assert "step" in out and "precision" in out and "collectives" in out


def test_flags_come_from_the_config(capsys):
    with pytest.raises(SystemExit) as end:
        main(["bench", "step", "--help"])
    assert end.value.code == 0
    out = capsys.readouterr().out
    assert (
        "workload" in out
        and "--ff-width" in out
        and "--fused-projections" in out
        and "[768]" in out
    )
    assert "default: ==SUPPRESS==" not in out


def test_version(capsys):
    import steplab

    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == f"steplab {steplab.__version__}"


def test_env_is_worth_pasting(capsys):
    import json

    assert main(["env"]) == 0
    text = capsys.readouterr().out
    assert "torch" in text and "cores" in text
    # Its own version; the commit of the folder that one stands in is of something else.
    assert text.splitlines()[0].split() == ["steplab", steplab.__version__]
    assert main(["env", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cores"] >= 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["bnech"], "Did you mean 'bench'"),
        (["bench", "stpe"], "Did you mean 'step'"),
        (["--verson"], "no flag"),
        (["bench", "step", "--contxt", "64"], "Did you mean '--context'"),
        (["bench", "step", "--cont", "64"], "Did you mean '--context'"),
        (["bench", "step", "--size", "smal"], "Did you mean 'small'"),
        (["bench", "step", "--context", "100000"], "--max-context 100000"),
        (["bench", "step", "--context", "many"], "--context needs int"),
        (["bench", "step", "--batch", "0"], "batch must be at least 1"),
        (["bench", "step", "--mode", "ful"], "Known: infer"),
        (["bench", "step", "--device", "tpu"], "no device 'tpu'"),
        (["bench", "step", "--recipe", "precision=bf17"], "Did you mean 'bf16'"),
        (["bench", "step", "--recipe", "compile=blocks", "--alternate", "2"], "two cells"),
        (["bench", "step", "gtp"], "Did you mean 'gpt'"),
        (["bench", "step", "--steps", "2", "mine.py:make"], "right after the command"),
        (["bench", "step", "--alternate", "-2"], "1 round or more, not -2"),
        (["bench", "step", "--alternate", "0"], "1 round or more, not 0"),
        (["compare", "last", "last", "--rerun", "0"], "--rerun and --timeout must be more than 0"),
        (["bench", "step", "--out", "table.txt"], "Use a suffix"),
        (["bench", "step", "--mfu-peak-tflops", "0"], "more than 0 TFLOP/s"),
        (["bench", "step", "--timeout", "-1"], "more than 0 seconds"),
        (["runs", "--status", "okk"], "Did you mean 'ok'"),
        (["runs", "--newest", "-1"], "negative"),
        (["runs", "--pack", "none.zip"], "no Run to pack"),
        (["bench", "step", "nowhere.py:make"], "no file nowhere.py"),
        (["runs", "--delete"], "every Run"),
        (["runs", "nothing"], "no Runs"),
        (["runs", "--unpack", "nowhere.zip"], "no file"),
        (["runs", "--frobnicate"], "no flag --frobnicate"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_2(words, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(words) == 2
    error = capsys.readouterr().err
    assert said in error and error.startswith("steplab: ")
    assert "Traceback" not in error and len(error.strip().splitlines()) == 1


def test_no_gpu_though_asked_for(capsys, tmp_path):
    import torch

    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert main(["bench", "step", "--device", "cuda", "--store", str(tmp_path)]) == 2
    assert "torch sees no GPU" in capsys.readouterr().err


def test_a_store_that_cannot_be_written(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    assert main(["bench", "step", "--store", str(tmp_path / "file")]) == 2
    assert "--store" in capsys.readouterr().err


@pytest.mark.parametrize("package", ["steplab.cli", "steplab.cli.bench", "steplab.cli.data"])
def test_help_shows_the_first_line_of_each_docstring_without_importing(package):
    group = Group(package)
    for name in group.names():
        module = importlib.import_module(f"{package}.{name}")
        assert module.__doc__.splitlines()[0] == group.summary(name) != ""


def test_help_imports_no_command():
    code = (
        "import sys; from steplab.cli.main import main; main(['--help'])\n"
        "sys.exit('steplab.cli.compare' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def test_a_terminal_of_another_encoding_is_no_error():
    code = "from steplab.cli.main import main; main(['--version']); print(chr(0x65e5))"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=environment)
    assert done.returncode == 0 and rb"\u65e5" in done.stdout


def test_a_complaint_does_not_repeat_a_whole_file(tmp_path, capsys):
    path = tmp_path / "recipe.json"
    path.write_text('{"' + "x" * 100_000 + '": 1}')
    assert main(["bench", "step", "--recipe", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("steplab: ") and len(error) < 2_000
