"""How many files a newcomer has to open to follow a command, counted over the real commands.

`python -m pytest tests/architecture/test_walks.py -s` prints the walks of DESIGN.md. The files of
the model under measurement (kernels, modules, workloads) are left out: they are another subject.
"""

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.architecture.walks import walk

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


WALKS = {
    "bench step": Followed((f"bench step gpt {GPT} --mode full --steps 2 --warmup 1",), 52),
    "explain": Followed(
        (f"profile gpt {GPT} --steps 2 --warmup 1", "explain"), 54, ("findings/rules/",)
    ),
    # 46 files, and 5 more for the Run that it stores: the probes of `bench` and the store.
    "train": Followed((f"train {TRAIN} --checkpoint-every 2 --validation-batches 1",), 51),
    # 58 files, and 7 more where the rung wins and is profiled; without the page of that profile.
    "tune, one rung": Followed(
        (f"tune gpt {GPT} --budget 1",), 65, ("techniques/", "trace/", "report/"), RUNG
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
