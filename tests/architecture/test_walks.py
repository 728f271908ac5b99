"""How many files a newcomer has to open to follow a command, counted over the real commands.

`python -m pytest tests/architecture/test_walks.py -s` prints the walks of DESIGN.md. The files of
the model under measurement (kernels, modules, workloads) are left out: they are another subject.
"""

import re
import statistics
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.architecture.walks import SOURCE, walk

DESIGN = (SOURCE.parents[1] / "DESIGN.md").read_text()

MODEL = ("kernels/", "modules/", "workloads/")
GPT = "--size tiny --layers 1 --context 16 --batch 2"
TSMOE = "--hidden-size 16 --n-decoder-layers 1 --n-head 2 --num-experts 2 --d-ff 16 --d-expert 8"
TRAIN = f"{TSMOE} --seq-max-len 40 --horizons 1,8 --batch-size 2 --steps-per-epoch 4 --log-every 2"

# A rung of `tune`: what the search does to try one recipe, and the worker that measures it.
RUNG = ("tune/climb.py:_try", "verify/candidate.py")


@dataclass(frozen=True)
class Followed:
    """Commands, of which the last is followed; what it calls; what is left out; the most files."""

    commands: tuple[str, ...]
    most: int
    left_out: tuple[str, ...] = ()
    within: tuple[str, ...] = ()
    always: bool = True  # whether it passes through as many files whatever it measures


WALKS = {
    "bench step": Followed((f"bench step gpt {GPT} --mode full --steps 2 --warmup 1",), 52),
    "explain": Followed(
        (f"profile gpt {GPT} --steps 2 --warmup 1", "explain"), 55, ("findings/rules/",)
    ),
    # 46 files, and 5 more for the Run that it stores: the probes of `bench` and the store.
    "train": Followed((f"train {TRAIN} --checkpoint-every 2 --validation-batches 1",), 51),
    # Fewer where no rung wins: a winner is profiled. Without the page of that profile, and without
    # the errors of a recipe that does not end in time on a busy machine. Three more where the rung
    # compiles, which depends on what the machine is expected to gain most by.
    "tune, one rung": Followed(
        (f"tune gpt {GPT} --budget 1",),
        73,
        ("techniques/", "trace/", "report/", "core/errors.py"),
        RUNG,
        False,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WALKS)
def test_a_command_crosses_few_files(name, tmp_path: Path):
    followed = WALKS[name]
    for number, words in enumerate(followed.commands):
        folder = tmp_path / str(number)
        folder.mkdir()
        store = [] if words.startswith("train") else ["--store", str(tmp_path / "store")]
        found = walk([*words.split(), *store], folder, followed.within)
    found = found.without((*MODEL, *followed.left_out))
    print(f"\n**{name}**, {len(found)} files\n\n{found}")
    assert 0 < len(found) <= followed.most, f"{name} crosses {len(found)} files"
    passed = {*found.command, *found.workers}
    assert passed == told(name) if followed.always else passed <= told(name)


def told(name: str) -> set[str]:
    """Return the files that DESIGN.md lists for a walk."""
    (section,) = re.findall(rf"^\*\*{name}\*\*, (.*?)^(?:\*\*|###)", DESIGN, re.M | re.S)
    return set(re.findall(r"`([\w/]+\.py)`", section))


# Rows of the table "Before and after".
ROWS = {
    "bench step": "files that `bench step` passes through",
    "explain": "files that `explain` passes through, plus the rules",
    "train": "files that `train` passes through",
    "tune, one rung": "files that one rung of `tune` passes through",
}


def now(row: str) -> int:
    """Return the last number of a row, which is today's."""
    (line,) = (line for line in DESIGN.splitlines() if line.startswith(f"| {row} |"))
    return int(line.split("|")[-2])


@pytest.mark.parametrize("name", WALKS)
def test_the_table_has_the_counts_of_the_walks(name):
    assert f"\n**{name}**, {now(ROWS[name])} files" in DESIGN
    assert now(ROWS[name]) == WALKS[name].most == len(told(name))


def test_the_table_has_the_sizes_of_the_files():
    """To within 5 %, so that not every new file is an edit."""
    lines = [len(path.read_text().splitlines()) for path in SOURCE.rglob("*.py")]
    assert now("source files") == pytest.approx(len(lines), rel=0.05)
    assert now("median lines of a file") == pytest.approx(statistics.median(lines), rel=0.05)
    assert now("files under 40 lines") == pytest.approx(sum(n < 40 for n in lines), rel=0.05)
