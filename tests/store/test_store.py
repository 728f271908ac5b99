import errno
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from steplab.core import Environment, Run, RunSpec, new_run_id
from steplab.core.errors import UserError
from steplab.store import Store

ENVIRONMENT = Environment("0", "3.11", "Linux", "cpu", 2, None)
SOURCE = Path(__file__).parents[2] / "src"


def make_run(**changes) -> Run:
    spec = RunSpec("gpt")
    return Run(new_run_id(spec), spec, ENVIRONMENT, **changes)


def test_saved_runs_are_loaded_by_id_part_and_last(store):
    runs = [make_run() for _ in range(3)]
    for run in runs:
        store.save(run, {"trace.txt": b"abc"})
    loaded = store.load(runs[0].id)
    assert loaded.artifacts == ("trace.txt",) and loaded.spec == runs[0].spec
    assert store.load(runs[1].id[-6:]).id == runs[1].id
    assert store.load("last").id == max(run.id for run in runs)
    assert (store.runs / runs[0].id / "trace.txt").read_bytes() == b"abc"


def test_a_short_id_is_the_run_it_stands_for(store):
    """Where two end alike, or one begins as another ends, the whole id stands for itself."""
    names = ("1-gpt-aaaaaa", "2-gpt-aaaaaa", "3-gpt-bbbbbb", "4-gpt-cccccc", "cccccc-5", "own")
    for name in names:
        store.save(replace(make_run(), id=name))
    short = store.short_ids()
    assert [name for name in names if short[name] != name] == ["3-gpt-bbbbbb", "cccccc-5"]
    assert all(store.load(short[name]).id == name for name in names)


def test_unknown_and_ambiguous_names(store):
    with pytest.raises(UserError, match="no Runs"):
        store.load("last")
    a, b = make_run(), make_run()
    store.save(a)
    store.save(b)
    with pytest.raises(UserError, match="fits 2 Runs"):
        store.load(a.id[:4])
    with pytest.raises(UserError, match="There is no Run"):
        store.load("zzz")
    assert store.load(b.id[2:-2]) == b, "a part in the middle"


def test_an_unknown_name_is_answered_by_the_three_nearest(store):
    runs = [make_run() for _ in range(6)]
    for run in runs:
        store.save(run)
    wanted = runs[3].id
    with pytest.raises(UserError) as raised:
        store.load(wanted[:-1] + "z")
    said = str(raised.value)
    assert wanted in said and sum(run.id in said for run in runs) == 3
    assert said.count(". ") == 0 and said.endswith(".")


def test_a_run_is_never_overwritten(store):
    run = make_run()
    store.save(run)
    with pytest.raises(UserError, match="already"):
        store.save(run)


def test_a_damaged_run_does_not_hide_the_others(store):
    good, bad = make_run(), make_run()
    store.save(good)
    store.save(bad)
    (store.runs / bad.id / "run.json").write_text('{"steplab_')
    found = dict(store.all())
    assert found[good.id] == good and isinstance(found[bad.id], UserError)


def test_deleted_runs_are_gone(store):
    run = make_run()
    store.save(run)
    store.delete(run.id)
    assert store.ids() == [] and list(store.runs.iterdir()) == []


def test_several_writers(store):
    runs = [make_run() for _ in range(40)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(store.save, runs))
    assert store.ids() == sorted(run.id for run in runs)


def test_kill_at_any_moment_leaves_whole_runs_only(store):
    """A process that saves without end is killed at random moments, several times."""
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from steplab.core import Environment, Run, new_run_id\n"
        "from steplab.core import RunSpec\n"
        "from steplab.store import Store\n"
        "store = Store(sys.argv[2]); spec = RunSpec('gpt')\n"
        "environment = Environment('0', '3.11', 'Linux', 'cpu', 2, None)\n"
        "print('ready', flush=True)\n"
        "while True:\n"
        "    store.save(Run(new_run_id(spec), spec, environment), {'blob.bin': bytes(200_000)})\n"
    )
    for delay in (0.02, 0.05, 0.11):
        command = [sys.executable, "-c", script, str(SOURCE), str(store.root)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            process.stdout.readline()
            time.sleep(delay)
            process.send_signal(signal.SIGKILL)
    found = list(store.all())
    assert found
    for run_id, run in found:
        assert isinstance(run, Run)
        assert (store.runs / run_id / "blob.bin").stat().st_size == 200_000


@pytest.mark.parametrize(
    ("code", "words"), [(errno.ENOSPC, "disk is full"), (errno.EROFS, "no permission")]
)
def test_full_and_read_only_disks_are_one_sentence(store, monkeypatch, code, words):
    run = make_run()
    store.save(run)

    def fail(descriptor):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(UserError, match=words):
        store.save(make_run())
    with pytest.raises(UserError, match="--store"):
        store.check_writable()
    monkeypatch.undo()
    assert store.ids() == [run.id]


def test_a_file_in_the_way_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="Cannot write to"):
        Store(tmp_path / "file").check_writable()


def test_stale_drafts_are_swept(store):
    store.save(make_run())
    stale = store.runs / ".draft-old"
    stale.mkdir()
    os.utime(stale, (0, 0))
    fresh = store.runs / ".draft-new"
    fresh.mkdir()
    store.save(make_run())
    assert not stale.exists() and fresh.exists()
