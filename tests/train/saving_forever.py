"""Forks children that save without end, kills each, and checks what they left behind.

Run as a script: `saving_forever.py <folder> <random kills>`; exits with 0 when all is well.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
from torch import nn

from steplab.train.checkpoint import restore_checkpoint, save_checkpoint
from steplab.train.checkpoint_files import TrainProgress, list_checkpoints, newest_checkpoint

KEEP = 2
FLUSHES_PER_SAVE = 6  # three tensor files, checkpoint.json, the draft, the folder


class Counter:
    """A training whose every number is the step."""

    def __init__(self) -> None:
        self.model = nn.Linear(64, 256)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.scaler = torch.amp.GradScaler("cpu", enabled=False)

    def set(self, step: int) -> None:
        for parameter in self.model.parameters():
            parameter.data.fill_(step)
            keys = ("step", "exp_avg", "exp_avg_sq")
            shapes = ((), parameter.shape, parameter.shape)
            self.optimizer.state[parameter] = {
                key: torch.full(shape, float(step)) for key, shape in zip(keys, shapes, strict=True)
            }

    def save(self, folder: Path, step: int) -> None:
        self.set(step)
        progress = TrainProgress(step, {"window": step}, {})
        save_checkpoint(folder, self.model, self.optimizer, self.scaler, progress, KEEP)

    def check(self, path: Path) -> int:
        """Restore `path` and assert that all of it is of one step."""
        progress = restore_checkpoint(path, self.model, self.optimizer, self.scaler)
        seen = {float(v) for p in self.model.parameters() for v in p.detach().unique()}
        for state in self.optimizer.state.values():
            seen |= {float(v) for tensor in state.values() for v in tensor.unique()}
        assert seen == {float(progress.step)} == {float(progress.position["window"])}, seen
        return progress.step


def die_at_flush(number: int) -> None:
    """Let this process kill itself when it is about to flush for the `number`-th time."""
    flush, left = os.fsync, number

    def fsync(handle: int) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        flush(handle)

    os.fsync = fsync


def killed_child(folder: Path, first: int, flush: int | None, seconds: float) -> None:
    """Fork a child that saves steps first, first + 1, ... and dies in the middle of it."""
    child = os.fork()
    if child == 0:
        if flush is not None:
            die_at_flush(flush)
        training, step = Counter(), first
        while True:
            training.save(folder, step)
            step += 1
    if flush is None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL


def main(folder: Path, random_kills: int) -> None:
    chance, training = random.Random(3), Counter()
    training.save(folder, 0)
    training.save(folder, 1)
    planned: list[int | None] = [*range(1, 3 * FLUSHES_PER_SAVE + 1), *[None] * random_kills]
    done, interrupted, late = 1, 0, 0
    for flush in planned:
        killed_child(folder, done + 1, flush, chance.uniform(0.005, 0.1))
        interrupted += any(p.name.startswith(".draft-") for p in folder.iterdir())
        found = list_checkpoints(folder)
        # One more for every death in a row between the rename and the removal of the oldest.
        late = late + 1 if len(found) > KEEP else 0
        assert KEEP <= len(found) <= KEEP + late, found
        steps = [training.check(path) for path in found]
        assert (
            steps == sorted(steps) and found[-1] == newest_checkpoint(folder) and steps[-1] >= done
        )
        done = steps[-1]
    training.save(folder, done + 1)
    assert len(list(folder.iterdir())) == KEEP, "drafts are left"
    print(f"{len(planned)} kills, {interrupted} of them left a draft, {done} saves")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]))
