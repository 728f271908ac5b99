"""Folders that lack what a local disk has: locks, flushed folders, renamed folders, hard links."""

import errno
import fcntl
import os
import shutil

import pytest

from steplab.core.atomic import sync_folder
from steplab.core.errors import UserError
from steplab.report.summary_file import SummaryFile
from steplab.store import Store
from steplab.train.checkpoint import save_checkpoint
from steplab.train.checkpoint_files import (
    TrainProgress,
    list_checkpoints,
    lock_checkpoint_folder,
)
from tests.store.test_store import make_run
from tests.train.small_training import Training


def failing(code: int):
    def fail(*args, **kwargs):
        raise OSError(code, os.strerror(code))

    return fail


def without_flushed_folders(monkeypatch, code):
    """Let fsync fail for folders alone, as it does on some network mounts."""
    flush = os.fsync

    def fsync(handle):
        if os.path.isdir(f"/proc/self/fd/{handle}"):
            raise OSError(code, os.strerror(code))
        flush(handle)

    monkeypatch.setattr(os, "fsync", fsync)


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP, errno.ENOSYS])
def test_a_folder_that_cannot_be_flushed_is_no_error(store, tmp_path, monkeypatch, code):
    without_flushed_folders(monkeypatch, code)
    store.check_writable()
    run = make_run()
    store.save(run)
    assert store.load("last").id == run.id
    save_checkpoint(tmp_path / "c", *Training().parts, TrainProgress(1, {}, {}), keep=1)
    assert len(list_checkpoints(tmp_path / "c")) == 1


def test_a_flush_that_fails_for_another_reason_is_one(tmp_path, monkeypatch):
    without_flushed_folders(monkeypatch, errno.EIO)
    with pytest.raises(OSError, match="Input/output"):
        sync_folder(tmp_path)


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL])
def test_a_folder_without_locks_is_used_without_one(tmp_path, monkeypatch, code):
    monkeypatch.setattr(fcntl, "flock", failing(code))
    with lock_checkpoint_folder(tmp_path):
        pass


def test_a_lock_that_fails_for_another_reason_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", failing(errno.EIO))
    with pytest.raises(UserError, match="cannot be locked"), lock_checkpoint_folder(tmp_path):
        pass


@pytest.mark.parametrize("code", [errno.EXDEV, errno.EBUSY, errno.ENOTEMPTY, errno.EPERM])
def test_where_folders_cannot_be_renamed_it_is_said_before_anything_is_measured(
    store, tmp_path, monkeypatch, code
):
    monkeypatch.setattr(os, "rename", failing(code))
    with pytest.raises(UserError, match="--store"):
        store.check_writable()
    with pytest.raises(UserError, match="--checkpoint-dir"), lock_checkpoint_folder(tmp_path / "c"):
        pass
    assert not list(store.runs.glob(".*")) and not list((tmp_path / "c").glob(".draft*"))


def test_an_old_checkpoint_that_cannot_be_removed_does_not_spoil_the_new_one(tmp_path, monkeypatch):
    """Its rename fails while somebody reads it over the network; the next save tries again."""
    training = Training()
    for step in (1, 2):
        save_checkpoint(tmp_path, *training.parts, TrainProgress(step, {}, {}), keep=1)
    rename = os.rename

    def busy(source, target):
        if "step-00000002" in str(source):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        return rename(source, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "rename", busy)
        written = save_checkpoint(tmp_path, *training.parts, TrainProgress(3, {}, {}), keep=1)
    assert written.name == "step-00000003" and len(list_checkpoints(tmp_path)) == 2
    save_checkpoint(tmp_path, *training.parts, TrainProgress(4, {}, {}), keep=1)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step-00000004"]


def test_a_deleted_run_is_gone_though_its_files_are_held(store, monkeypatch):
    """NFS keeps files that somebody has open, so that their folder is not empty."""
    run = make_run()
    store.save(run)
    remove = shutil.rmtree

    def held(path, ignore_errors=False, **options):
        if not ignore_errors:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))
        remove(path / "nothing", ignore_errors=True)

    monkeypatch.setattr(shutil, "rmtree", held)
    store.delete(run.id)
    assert store.ids() == []


def test_a_stale_draft_of_somebody_else_does_not_spoil_a_save(store, monkeypatch):
    store.save(make_run())
    (store.runs / ".draft-old").write_text("")
    os.utime(store.runs / ".draft-old", (0, 0))
    unlink = os.unlink

    def theirs(path, **options):
        if str(path).endswith("-old"):
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))
        unlink(path, **options)

    monkeypatch.setattr(os, "unlink", theirs)
    run = make_run()
    store.add(run)
    assert run.id in store.ids()


def test_a_summary_without_hard_links(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "link", failing(errno.EPERM))
    summary = SummaryFile(tmp_path, ("date", "run"))
    for run in ("a", "b"):
        summary.append(("2026", run))
    assert summary.path.read_text().splitlines() == ["date,run", "2026,a", "2026,b"]
    assert [p.name for p in tmp_path.iterdir()] == ["summary.csv"]


def test_a_read_only_store_can_be_read(store, monkeypatch):
    run = make_run()
    store.save(run)
    for name in ("mkdir", "rename", "replace", "unlink", "fsync"):
        monkeypatch.setattr(os, name, failing(errno.EROFS))
    other = Store(store.root)
    assert other.load("last").id == run.id and len(list(other.all())) == 1
    for change in (other.check_writable, lambda: other.save(make_run())):
        with pytest.raises(UserError, match="no permission to write"):
            change()
    with pytest.raises(UserError, match="no permission to write"):
        other.delete(run.id)
    assert other.ids() == [run.id]
