"""Ranks that fail by themselves, as processes: what the user is told, and how it ends."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("safetensors")

from steplab.core import TrainSettings, TrainSpec
from steplab.train.checkpoint_files import newest_checkpoint
from steplab.train.loop import Trainer
from steplab.train.stop import Stop
from steplab.workloads.user_model import load_user_model
from tests.train.tiny_runs import SHAPE, silent

# Rank 1 runs out of memory at first; started again, it does not come back from the loss.
MODEL = f"""
import os, time
import steplab, torch
from steplab.workloads.workload import find_workload

def make(seq_max_len: int = 40):
    entry = find_workload("tsmoe")
    inner = entry.open(entry.resolve("tiny", {SHAPE}))
    def loss(model, batch):
        if os.environ.get("RANK") == "1":
            if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.00 GiB.")
            time.sleep(600)  # stuck
        return inner.loss(model, batch)
    return steplab.UserModel(inner.model(), lambda size: [], loss, seq_max_len)
"""
STUCK = 1 + next(i for i, line in enumerate(MODEL.splitlines()) if "stuck" in line)
HANG_S = 12  # longer than ranks need from their meeting to their first step, on a busy machine too


@pytest.mark.slow
def test_a_rank_out_of_memory_then_one_that_hangs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my_model.py").write_text(MODEL)
    entry = load_user_model("my_model.py:make")
    settings = TrainSettings(
        steps_per_epoch=2, batch_size=2, accumulate=2, validate_every=0, validation_batches=0
    )
    spec = TrainSpec(entry.name, entry.resolve("", {}), settings=settings, source=entry.source)
    Trainer(spec, silent()).run(Stop())
    saved = newest_checkpoint(Path("checkpoints"))
    words = "train --resume --model my_model.py:make --epochs 2 --ranks 2 --max-restarts 1"
    done = subprocess.run(
        [sys.executable, "-m", "steplab", *words.split(), "--hang-timeout", str(HANG_S)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=HANG_S + 100,
    )
    memory, again, hang = done.stderr.splitlines()
    assert re.match(r"steplab: rank 1 of 2 on \S+: Out of memory in step 3: CUDA out of", memory)
    assert again == "steplab: restart 1 of 1."
    assert f"No step has ended for {HANG_S} s: rank 0 on" in hang
    assert re.search(r"waits in all_reduce \(number \d+\) of step 3, at gradients\.py:\d+", hang)
    assert re.search(rf"rank 1 on \S+ has not begun it and stands at \S+:{STUCK} \(loss\)", hang)
    assert done.returncode == 1
    assert newest_checkpoint(Path("checkpoints")) == saved
