"""The wall clock jumps: what was saved last stays last, and a live draft is never an old one."""

import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from steplab.core import RunSpec
from steplab.store import Store, pack_runs, unpack_runs
from steplab.store.store import STALE_SECONDS
from steplab.tune.folder import LadderFolder, open_ladder
from steplab.tune.options import TuneOptions
from steplab.tune.progress import SearchClock
from tests.store.test_store import ENVIRONMENT, make_run

FUTURE = "20991231-235959-000000-gpt--ffffff"


def test_last_is_the_run_that_was_saved_last_though_the_clock_went_back(store):
    store.save(replace(make_run(), id=FUTURE))
    run = make_run()
    store.save(run)
    assert store.ids()[-1] == FUTURE and store.resolve("last") == run.id
    store.delete(run.id)
    assert store.resolve("last") == FUTURE


@pytest.mark.parametrize("note", [b"", b"nonsense", b"\xff\x00", b"../../etc"])
def test_a_damaged_note_is_no_note(store, note):
    run = make_run()
    store.save(run)
    (store.root / "last").write_bytes(note)
    assert store.resolve("last") == run.id


def test_a_note_that_is_a_pipe_is_no_note(store):
    run = make_run()
    store.save(run)
    (store.root / "last").unlink()
    os.mkfifo(store.root / "last")
    assert store.resolve("last") == run.id


def test_runs_of_a_pack_are_not_what_was_measured_last(store, tmp_path):
    far = Store(tmp_path / "far")
    far.save(replace(make_run(), id=FUTURE))
    pack_runs(far, [FUTURE], tmp_path / "far.zip")
    run = make_run()
    store.save(run)
    unpack_runs(store, tmp_path / "far.zip")
    assert FUTURE in store.ids() and store.resolve("last") == run.id


def test_a_jump_by_days_sweeps_no_draft_that_is_being_written(store):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    mine = store.draft_path("profile")
    other = mine.with_name(mine.name.replace(f"-{os.getpid()}-", f"-{dead.pid}-"))
    far = mine.with_name(".draft-00000000-1-run-abcd")  # of another machine
    young = other.with_name(f"{other.name}-young")
    for draft in (mine, other, far, young):
        draft.mkdir(parents=True)
    long_ago = time.time() - 2 * STALE_SECONDS
    for draft in (mine, other, far):
        os.utime(draft, (long_ago, long_ago))
    store.save(make_run())
    assert sorted(store.runs.glob(".*")) == sorted([mine, young])


def test_a_clock_that_is_behind_the_disk_sweeps_nothing_young(store, monkeypatch):
    """On a network folder the times are the server's; ours may be a week ahead."""
    draft = store.runs / ".draft-00000000-1-run-abcd"
    draft.mkdir(parents=True)
    monkeypatch.setattr(time, "time", lambda: 2e9)
    store.save(make_run())
    assert draft.exists()


def test_an_unfinished_ladder_is_found_behind_a_finished_one_of_the_future(store):
    spec, options = RunSpec("gpt"), TuneOptions()
    folder, ladder = open_ladder(store, spec, ENVIRONMENT, options)
    stamp = ladder.id.split("-", 2)[2]
    later = LadderFolder(folder.path.with_name(f"20991231-235959-{stamp}"))
    later.save(replace(ladder, id=later.path.name, finished=True))
    assert open_ladder(store, spec, ENVIRONMENT, options)[1].id == ladder.id


def test_a_ladder_whose_process_was_killed_before_it_was_written_is_none(store):
    spec, options = RunSpec("gpt"), TuneOptions()
    folder, ladder = open_ladder(store, spec, ENVIRONMENT, options)
    (folder.path / "ladder.json").unlink()
    assert open_ladder(store, spec, ENVIRONMENT, options)[1].id != ladder.id
    shutil.rmtree(store.root)


def test_budgets_do_not_look_at_the_wall_clock(monkeypatch):
    clock = SearchClock(60.0, time.monotonic())
    for jump in (-1e6, 1e6):
        monkeypatch.setattr(time, "time", lambda jump=jump: 1.7e9 + jump)
        assert 59.0 < clock.left <= 60.0 and clock.elapsed < 1.0
