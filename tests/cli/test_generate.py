import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("rich")

from steplab.cli.main import main

pytestmark = pytest.mark.usefixtures("in_tmp_path")
ROOT = Path(__file__).parents[2]
TINY = (
    "--width 32 --ff-width 32 --blocks 3 --heads 2 --kv-heads 1 --context 16 --steps-per-epoch 4 "
    "--batch-size 4 --log-every 4 --checkpoint-every 4 --validation-batches 1 --device cpu"
).split()

HELP = """
import contextlib, sys
from steplab.cli.main import main
with contextlib.suppress(SystemExit):
    main(["generate", "--help"])
sys.exit("torch" in sys.modules)
"""


def test_help_needs_no_torch():
    command = [sys.executable, "-c", HELP]
    done = subprocess.run(command, cwd=ROOT / "src", capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "--temperature" in done.stdout


def interrupted(writer, prompt, length, temperature, top_k, seed, tell, warn):
    tell(ord("x"))
    raise KeyboardInterrupt


def test_train_then_resume_then_generate(tmp_path, capsys, monkeypatch):
    folder = ["--checkpoint-dir", str(tmp_path / "run")]
    assert main(["train", "hydra", *TINY, *folder]) == 0
    assert main(["train", "--resume", *folder, "--epochs", "2"]) == 0
    shown = capsys.readouterr().out
    assert "data text=Python's standard library" in shown and "resumed" in shown
    assert re.search(r"validation step=8 val=[0-9.]+$", shown, re.MULTILINE)
    words = ["--checkpoint", str(tmp_path / "run"), "--length", "20", "--device", "cpu"]
    assert main(["generate", *words, "--prompt", "h\u00e9"]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("h\u00e9") and "20 bytes by" in shown.err
    assert "the first after" in shown.err and "bytes/s" in shown.err
    with monkeypatch.context() as patch:
        patch.setattr("steplab.train.generate.TextGenerator.generate", interrupted)
        assert main(["generate", *words]) == 130
    assert capsys.readouterr().out == "def x\n"  # whatever is said next begins a line
    assert main(["generate", *words, "--recipe", "impl.attention=cudnn"]) == 3
    assert capsys.readouterr().out == ""  # nothing half-written before the refusal
    assert main(["train", "megalodon", "--resume", *folder]) == 2
    assert "is a model of hydra, not of megalodon" in capsys.readouterr().err


def test_no_steps_tell_the_size(capsys):
    words = ["--size", "100m", "--steps-per-epoch", "0", "--device", "cpu"]
    assert main(["train", "hydra", *words]) == 0
    assert "params total=85.13M (85,125,142)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--prompt", ""], "prompt is empty"),
        (["--length", "0"], "at least 1"),
        (["--temperature", "-1"], "0 or more"),
        (["--checkpoint", "/nowhere"], "/nowhere"),
        (["--prompt-file", "/nowhere"], "no file /nowhere"),
        (["--prompt-file", "/"], "is a folder"),
        (["--prompt-file", __file__, "--prompt", "x"], "Use one"),
        (["--temperature", "nan"], "0 or more"),
    ],
)
def test_typos_are_reported(words, said, capsys):
    assert main(["generate", *words]) == 2
    assert said in capsys.readouterr().err


def test_a_model_of_series_writes_no_text(tmp_path, capsys):
    words = "--hidden-size 16 --n-decoder-layers 1 --n-head 2 --d-ff 16 --d-expert 8 --device cpu"
    steps = "--steps-per-epoch 1 --batch-size 2 --checkpoint-every 1 --validation-batches 1"
    folder = str(tmp_path / "run")
    assert main(["train", *words.split(), *steps.split(), "--checkpoint-dir", folder]) == 0
    assert main(["generate", "--checkpoint", folder]) == 2
    assert "writes no text" in capsys.readouterr().err
