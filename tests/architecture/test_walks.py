"""How many files a newcomer has to open to follow a command, counted over the real commands.

`python -m pytest tests/architecture/test_walks.py -s` prints the walks of DESIGN.md. The files of
the model under measurement (kernels, modules, workloads) are left out: they are another subject.
"""

from pathlib import Path

import pytest

from tests.architecture.walks import walk

MODEL = ("kernels/", "modules/", "workloads/")
GPT = "--size tiny --layers 1 --context 16 --batch 2"
TSMOE = "--hidden-size 16 --n-decoder-layers 1 --n-head 2 --num-experts 2 --d-ff 16 --d-expert 8"
TRAIN = f"{TSMOE} --seq-max-len 40 --horizons 1,8 --batch-size 2 --steps-per-epoch 4 --log-every 2"

# name: (commands, of which the last is counted; packages left out besides the model; most files)
WALKS = {
    "bench step": ([f"bench step gpt {GPT} --mode full --steps 2 --warmup 1"], (), 45),
    "explain": (
        [f"profile gpt {GPT} --steps 2 --warmup 1", "explain"],
        ("findings/rules/",),
        44,
    ),
    "train": ([f"train {TRAIN} --checkpoint-every 2 --validation-batches 1"], (), 42),
    "tune": (
        [f"tune gpt {GPT} --budget 0.6"],
        ("findings/", "techniques/", "trace/", "report/", "cli/"),
        60,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WALKS)
def test_a_command_crosses_few_files(name, tmp_path: Path):
    commands, left_out, most = WALKS[name]
    for number, words in enumerate(commands):
        folder = tmp_path / str(number)
        folder.mkdir()
        store = [] if words.startswith("train") else ["--store", str(tmp_path / "store")]
        files = walk([*words.split(), *store], folder)
    files = [file for file in files if not file.startswith((*MODEL, *left_out))]
    print(f"\n{name}: {len(files)} files\n  " + "\n  ".join(files))
    assert len(files) <= most, f"{name} crosses {len(files)} files"
