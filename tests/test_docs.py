"""Every command that README.md and docs/ show is run, as written but tiny, in one folder of files.

A page's words stay; flags that make the command small are added behind them, and of a flag that is
given twice the last one counts. What a command needs (a model, series, a checkpoint, stored Runs)
lies in the folder under the names that the pages use.
"""

import contextlib
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest

import steplab
from steplab.cli.command import Command, Group
from steplab.cli.main import main

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
ALL_PAGES = [*PAGES, *sorted(ROOT.glob("*.md")), *sorted((ROOT / "benchmarks").glob("*.md"))]

STEP = "--batch 2 --steps 1 --warmup 0"
OP = "--repeats 2 --seconds 0.1 --warmup 1"
TSMOE = "--hidden-size 16 --n-decoder-layers 2 --n-head 2 --num-experts 2 --k 1"
TRAIN = f"{TSMOE} --d-ff 16 --d-expert 16 --seq-max-len 96 --batch-size 2 --steps-per-epoch 2"
# What makes a command small, by its first words; the longest that fits is taken.
TINY = {
    "bench step": f"--size tiny --mode full --context 16 --layers 1 --width 32 {STEP}",
    "bench step tsmoe": f"{TSMOE} --mode full {STEP}",
    "bench step examples": f"--width 8 --mode full {STEP}",
    "bench step my_model.py": f"--width 8 --mode full {STEP}",
    "bench attention": f"--batch 1 --heads 2 --context 32 --head-width 16 --dtype fp32 {OP}",
    "bench experts": f"--tokens 64 --width 16 --inner 16 --experts 4 --dtype fp32 {OP}",
    "bench loss": f"--tokens 32 --width 16 --vocabulary 64 --dtype fp32 {OP}",
    "bench ema": f"--batch 1 --context 32 --dtype fp32 {OP}",
    "bench infer": "--size tiny --batch 1 --horizon 1 --context 32 --calls 1 --warmup 0",
    "bench precision": "",
    "bench convergence": f"{TSMOE} --d-ff 16 --d-expert 16 --seq-max-len 96 --batch-size 2 "
    "--steps 20 --validation-batches 1 --reference plain --recipe plain --device cpu",
    "bench collectives": "--op all-reduce --mib 0.1 --world 2 --runs 2 --warmup 1",
    "profile": f"--size tiny --context 16 --layers 1 {STEP} --schedule 0 1 1 1",
    "profile tsmoe": f"--size tiny --recipe plain {TSMOE} {STEP} --schedule 0 1 1 1",
    "profile examples": f"{STEP} --schedule 0 1 1 1",
    "tune": f"{TSMOE} --batch 2 --budget 0.05",
    "tune gpt": "--size tiny --context 16 --layers 1 --batch 2 --budget 0.05",
    "tune tsmoe": f"--size tiny {TSMOE} --recipe plain --batch 2 --budget 0.05 --against plain",
    "tune path": "--width 8 --batch 2 --budget 0.05",
    "tune my_model.py": "--width 8 --batch 2 --budget 0.05",
    "tune examples/own_loop.py": "--width 8 --layers 1 --batch 2 --budget 0.05",
    "train": f"{TRAIN} --log-every 1 --validate-every 0 --checkpoint-every 2",
    # A checkpoint says how large its model is.
    "train --resume": "--validate-every 0",
    "train --from-checkpoint": "--batch-size 2 --steps-per-epoch 2 --validate-every 0",
    "evaluate": "--windows 1 --horizon 4 --context 32",
    "forecast": "--horizon 4",
    "lint": "--batch 2 --steps 2",
    "lint my_model.py": "--batch 2 --steps 2 --width 8",
}
# Commands that end with another code than 0 where there is no GPU or no network, and what they say.
REFUSED = {
    "cuda_graph=step": "CUDA",
    "--impl triton_flash --tiles": "needs an NVIDIA GPU",
    "data download": "huggingface",
}
# Shown by a page, and run by other tests or by hand.
ELSEWHERE = {
    "python3 -m venv": "one of the README's two commands, which CI runs",
    "python benchmarks/": "needs a GPU, or minutes",
}


def commands(page: Path) -> list[str]:
    """Return the commands of a page's bash blocks, without comments, one per `&&`."""
    blocks = re.findall(r"^```bash\n(.*?)^```", page.read_text(), re.M | re.S)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    bare = (re.sub(r"\s+#.*", "", line).strip() for line in lines)
    return [part.strip() for line in bare if line for part in _parts(line)]


def _parts(line: str) -> list[str]:
    return [line] if line.startswith("python3 -m venv") else line.split("&&")


def made_tiny(command: str) -> list[str]:
    """Return the words after `steplab`, with what makes them small behind them."""
    words = command.removeprefix("steplab ")
    fitting = [
        start
        for start in TINY
        if words == start or words.startswith((f"{start} ", f"{start}/", f"{start}:"))
    ]
    return shlex.split(f"{words} {TINY[max(fitting, key=len)]}" if fitting else words)


SHOWN = sorted({(page.name, command) for page in PAGES for command in commands(page)})


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return a folder with what the pages talk about: models, series, a checkpoint, stored Runs."""
    folder = tmp_path_factory.mktemp("reader")
    shutil.copytree(ROOT / "examples", folder / "examples")
    model = (ROOT / "examples" / "own_model.py").read_text()
    (folder / "path" / "to").mkdir(parents=True)
    (folder / "my_model.py").write_text(model.replace("def recurrent(", "def make("))
    (folder / "path/to/model.py").write_text(model.replace("def recurrent(", "def factory("))
    for name in ("mine.toml", "first_design.toml"):
        (folder / name).write_text('[optimizer]\nimpl = "fused"\n\n[compile]\nscope = "blocks"\n')
    hours = np.datetime64("2024-01-01T00") + np.arange(200)
    rows = [f"shop{i},{hour},{i + np.sin(k):.4f}" for i in range(4) for k, hour in enumerate(hours)]
    for name in ("shops.csv", "mine.csv"):
        (folder / name).write_text("\n".join(["unique_id,ds,y", *rows]))
    for name in ("web", "more", "my_series"):
        (folder / name).mkdir()
        np.save(folder / name / "walk.npy", np.random.default_rng(0).normal(size=300).cumsum())
    with contextlib.chdir(folder):
        shown = (
            "steplab train",
            "steplab profile",
            "steplab profile --seed 1",
            "steplab bench step",
        )
        for command in shown:  # the last one is a sweep, for --group
            assert main(made_tiny(command)) == 0
        trace = next(Path("steplab-runs/runs").glob("*/trace_1.json.gz"))
        shutil.copy(trace, "somebody_elses.json.gz")
    return folder


def named(words: list[str]) -> list[str]:
    """Put the names of this folder in the place of a page's: a checkpoint, two Runs, a sweep."""
    runs = sorted(path.name for path in Path("steplab-runs/runs").iterdir())
    here = {"PATH": "checkpoints", "A": runs[0], "B": runs[1], "20261115": "20"}
    here["checkpoints/step-00002400"] = "checkpoints"
    return [here.get(word, word) for word in words]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("command", sorted({command for _, command in SHOWN}))
def test_a_page_shows_a_command_that_runs(command, folder, tmp_path, monkeypatch, capsys):
    for start, reason in ELSEWHERE.items():
        if command.startswith(start):
            pytest.skip(reason)
    monkeypatch.chdir(folder)
    words = named(made_tiny(command))
    if words[0] == "train" and "--resume" not in words:  # a new run; `checkpoints` has one already
        words += ["--checkpoint-dir", str(tmp_path)]
    code = main(words)
    said = capsys.readouterr()
    if "--fail" in words:  # something is found in this model, which is what the flag is for
        assert code == 1 and said.out
        return
    for words, reason in REFUSED.items():
        if words in command and code:
            assert reason in said.err
            return
    assert code == 0, said.err
    assert said.out


@pytest.mark.slow
def test_the_examples_of_the_reference_run(tmp_path, monkeypatch):
    """In the order of the page; those that need a GPU or a checkpoint are only compiled."""
    text = (ROOT / "docs" / "api.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.M | re.S)
    monkeypatch.chdir(tmp_path)
    (make,) = (block for block in blocks if "def make(" in block)
    (tmp_path / "my_model.py").write_text(f"import steplab, torch\n{make}")
    names: dict[str, object] = {"__name__": "reference"}
    for block in blocks:
        code = compile(block, "api.md", "exec")
        if '"cuda"' not in block and "Forecaster" not in block:
            exec(code, names)
    shown = set(re.findall(r"steplab\.(\w+)", "".join(blocks)))
    told = set(re.findall(r"\*\*`(\w+)`\*\*", text))
    assert shown | told >= set(steplab.__all__)


def mentioned(page: Path) -> list[str]:
    """Return the commands in a page's sentences and in its blocks that are not run."""
    text = page.read_text()
    inline = re.findall(r"`(steplab [a-z][^`]*)`", text)
    fenced = re.findall(r"^```(\w*)\n(.*?)^```", text, re.M | re.S)
    blocks = "\n".join(body for kind, body in fenced if kind in ("", "text"))
    lines = re.findall(r"^steplab [a-z].*", blocks.replace("\\\n", " "), re.M)
    bare = [re.sub(r"\s+#.*", "", command) for command in (*inline, *lines)]
    return [one for one in bare if re.search(r" --[\w-]+ [^-]", one) and not OPEN.search(one)]


# A word that stands for others, or what needs transformers.
OPEN = re.compile(r"\b[A-Z_]+\b|\.\.\.|<|[{}]|--hf")
MENTIONED = sorted({command for page in ALL_PAGES for command in mentioned(page)})


@pytest.mark.parametrize("command", MENTIONED)
def test_a_command_that_is_only_mentioned_has_flags_that_exist(command, tmp_path, monkeypatch):
    """It is parsed, not run. Of a flag that is given twice only the last would count."""
    monkeypatch.chdir(tmp_path)
    model = (ROOT / "examples" / "own_model.py").read_text()
    Path("my_model.py").write_text(model.replace("def recurrent(", "def make("))
    shutil.copytree(ROOT / "examples", "examples")
    shutil.copytree(ROOT / "src/steplab/recipes", "recipes")
    for name in ("mine.toml", "recipe.toml"):
        Path(name).write_text('[optimizer]\nimpl = "fused"\n')
    Path("train.py").touch()
    words = shlex.split(command)[1:]
    flags = [word for word in words if word.startswith("--")]
    assert len(set(flags)) == len(flags)
    monkeypatch.setattr(Group, "load", load_without_running)
    assert main(words) == 0


load = Group.load


def load_without_running(group: Group, name: str) -> Command | Group:
    """Return the command with its flags alone."""
    found = load(group, name)
    return found if isinstance(found, Group) else Command(found.flags, lambda args: 0)


def test_no_block_of_a_page_is_overlooked():
    """Blocks are fenced as `bash` exactly; a command in another fence would not be run."""
    for page in PAGES:
        assert not re.findall(r"^```(sh|shell|console|zsh)\b", page.read_text(), re.M), page
    assert len(SHOWN) > 50
