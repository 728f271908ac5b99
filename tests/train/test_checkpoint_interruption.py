import errno
import os
import resource
import subprocess
import sys

import pytest

from steplab.core.errors import UserError
from steplab.train.checkpoint import restore_checkpoint, save_checkpoint
from steplab.train.checkpoint_files import TrainProgress, list_checkpoints, newest_checkpoint
from tests.train import saving_forever
from tests.train.small_training import Training, same


@pytest.mark.slow
def test_killed_at_every_flush_and_at_random_moments(tmp_path):
    command = [sys.executable, saving_forever.__file__, str(tmp_path), "30"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("48 kills")


@pytest.fixture
def training(tmp_path):
    training = Training()
    for step in (1, 2):
        training.run(step - 1, step)
        save_checkpoint(tmp_path, *training.parts, TrainProgress(step, {}, {}), keep=2)
    return training


@pytest.mark.parametrize("failing", range(1, 7))
def test_a_full_disk_at_every_flush(tmp_path, training, monkeypatch, failing):
    flush, calls = os.fsync, []

    def fsync(handle):
        calls.append(handle)
        if len(calls) == failing:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        flush(handle)

    before = training.content()
    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(UserError, match="the disk is full"):
        save_checkpoint(tmp_path, *training.parts, TrainProgress(3, {}, {}), keep=1)
    assert not list(tmp_path.glob(".*"))
    # At the sixth flush the third one is complete; what may be lost is only its name.
    assert [p.name for p in list_checkpoints(tmp_path)][:2] == ["step-00000001", "step-00000002"]
    for path in list_checkpoints(tmp_path):
        restore_checkpoint(path, *Training().parts)
    restore_checkpoint(newest_checkpoint(tmp_path), *training.parts)
    assert same(before, training.content())


def test_a_file_that_cannot_grow(tmp_path, training):
    """The kernel itself refuses the write: a limit on the size of files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(UserError, match=r"Cannot write to .*File too large"):
            save_checkpoint(tmp_path, *training.parts, TrainProgress(3, {}, {}), keep=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


def test_a_place_that_is_a_file(tmp_path, training):
    (tmp_path / "taken").write_text("")
    with pytest.raises(UserError, match=r"Cannot write to .*taken"):
        save_checkpoint(tmp_path / "taken", *training.parts, TrainProgress(3, {}, {}), keep=1)


def test_an_interrupt_leaves_no_draft(tmp_path, training, monkeypatch):
    def interrupted(handle):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_checkpoint(tmp_path, *training.parts, TrainProgress(3, {}, {}), keep=1)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]
