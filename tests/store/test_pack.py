import os
import tracemalloc
import zipfile

import pytest

from steplab.core.errors import UserError
from steplab.core.input_file import set_memory_limit
from steplab.store import Store, pack_runs, unpack_runs
from steplab.store.pack import _unpack_file
from tests.store.hostile_packs import HOSTILE, good_pack
from tests.store.test_store import make_run


@pytest.fixture
def packed(store, tmp_path):
    runs = [make_run(), make_run()]
    for run in runs:
        store.save(run, {"trace.json": b"{}"})
    target = tmp_path / "runs.zip"
    pack_runs(store, [run.id for run in runs], target)
    return runs, target


def test_runs_travel(packed, tmp_path):
    runs, target = packed
    other = Store(tmp_path / "elsewhere")
    assert unpack_runs(other, target) == (2, 0)
    assert unpack_runs(other, target) == (0, 2)
    assert other.load(runs[0].id).artifacts == ("trace.json",)


def test_an_existing_pack_is_kept(packed, store):
    runs, target = packed
    before = target.read_bytes()
    with pytest.raises(UserError, match="already exists"):
        pack_runs(store, [runs[0].id], target)
    assert target.read_bytes() == before


@pytest.mark.parametrize("name", ["../evil/run.json", "/etc/run.json", "a/b/run.json", "run.json"])
def test_names_that_leave_the_store_are_refused(tmp_path, name):
    bad = tmp_path / "bad.zip"
    with zipfile.ZipFile(bad, "w") as archive:
        archive.writestr(name, "{}")
    with pytest.raises(UserError):
        unpack_runs(Store(tmp_path / "s"), bad)
    assert not (tmp_path / "s").exists()


def test_truncated_foreign_and_missing_packs(packed, tmp_path):
    _, target = packed
    cut = tmp_path / "cut.zip"
    cut.write_bytes(target.read_bytes()[:-40])
    text = tmp_path / "text.zip"
    text.write_text("hello")
    empty = tmp_path / "empty.zip"
    zipfile.ZipFile(empty, "w").close()
    with pytest.raises(UserError, match="holds no Runs"):
        unpack_runs(Store(tmp_path / "s"), empty)
    for path, words in ((cut, "damaged"), (text, "not a pack"), (tmp_path / "no.zip", "no file")):
        with pytest.raises(UserError, match=words):
            unpack_runs(Store(tmp_path / "s"), path)


@pytest.mark.parametrize(
    "name", ["evil.py", "evil.pyc", "lib.so", "a.pth", "b.PY", "run.sh", "noend", "x.svg", ".py"]
)
def test_a_pack_with_anything_but_data_is_refused(packed, tmp_path, name):
    runs, target = packed
    with zipfile.ZipFile(target, "a") as archive:
        archive.writestr(f"{runs[0].id}/{name}", "open('sentinel', 'w')")
    with pytest.raises(UserError, match="contains"):
        unpack_runs(Store(tmp_path / "s"), target)
    assert not (tmp_path / "s").exists()


def test_code_and_pages_in_a_runs_folder_are_not_packed(store, tmp_path):
    run = make_run()
    folder = store.save(run, {"page.html": b"<script>", "trace_1.json.gz": b"", "a.txt": b""})
    (folder / "model.py").write_text("raise SystemExit")
    target = tmp_path / "runs.zip"
    pack_runs(store, [run.id], target)
    with zipfile.ZipFile(target) as archive:
        names = sorted(name.partition("/")[2] for name in archive.namelist())
    assert names == ["a.txt", "run.json", "trace_1.json.gz"]


def test_the_page_of_an_older_pack_is_left_out(packed, tmp_path):
    """A stranger's page would run in a browser; it can be drawn anew from the Run."""
    runs, target = packed
    with zipfile.ZipFile(target, "a") as archive:
        archive.writestr(f"{runs[0].id}/page.html", "<script>alert(1)</script>")
    other = Store(tmp_path / "elsewhere")
    assert unpack_runs(other, target) == (2, 0)
    assert other.load(runs[0].id).artifacts == ("trace.json",)
    assert not list(other.root.rglob("*.html"))


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_pack_is_one_sentence_and_leaves_nothing(kind, store, tmp_path):
    make, words = HOSTILE[kind]
    bad = tmp_path / "bad.zip"
    bad.write_bytes(make())
    kept = store.save(make_run())
    with pytest.raises(UserError, match=words) as error:
        unpack_runs(store, bad)
    assert str(error.value).isprintable() and len(str(error.value)) < 500
    assert list(store.runs.iterdir()) == [kept]


def test_a_folder_and_a_pipe_are_no_packs(store, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, kind in ((tmp_path, "a folder"), (tmp_path / "pipe", "a pipe")):
        with pytest.raises(UserError, match=f"is {kind}"):
            unpack_runs(store, path)


def test_what_a_pack_unpacks_to_is_counted_and_not_believed(store, tmp_path, monkeypatch):
    monkeypatch.setattr("steplab.store.pack.LARGEST_UNPACKED", 10_000)
    fits, bomb = tmp_path / "fits.zip", tmp_path / "bomb.zip"
    fits.write_bytes(good_pack(a=b"x" * 4000, b=b"x" * 4000))
    bomb.write_bytes(good_pack(a=b"x" * 5000, b=b"x" * 5001))
    assert unpack_runs(store, fits) == (1, 0)
    before = sorted(store.runs.iterdir())
    with pytest.raises(UserError, match="unpacks to more than"):
        unpack_runs(store, bomb)
    with zipfile.ZipFile(bomb) as archive:  # as if the headers had said nothing
        info = archive.infolist()[-1]
        target = tmp_path / "trace.json"
        with pytest.raises(UserError, match="unpacks to more than"):
            _unpack_file(archive, info, target, 5000, store, "bomb")
    assert sorted(store.runs.iterdir()) == before, "no draft is left either"


def test_a_record_that_would_fill_the_memory_is_not_read(store, tmp_path):
    bomb = tmp_path / "bomb.zip"
    bomb.write_bytes(good_pack(make_run(reason="x" * 10_000)))
    set_memory_limit(100_000)
    try:
        with pytest.raises(UserError, match="--max-memory"):
            unpack_runs(store, bomb)
    finally:
        set_memory_limit(None)


def test_artifacts_are_moved_and_not_held_in_memory(store, tmp_path):
    source = tmp_path / "big.zip"
    source.write_bytes(good_pack(trace=bytes(60 << 20)))
    tracemalloc.start()
    try:
        assert unpack_runs(store, source) == (1, 0)
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()
    (run_id,) = store.ids()
    assert (store.runs / run_id / "trace.json").stat().st_size == 60 << 20


def test_links_are_not_packed(store, tmp_path):
    folder = store.save(make_run())
    (folder / "secret.txt").symlink_to("/etc/passwd")
    with pytest.raises(UserError, match="is not a regular file"):
        pack_runs(store, [folder.name], tmp_path / "x.zip")
    assert not (tmp_path / "x.zip").exists()


def test_a_pack_that_nobody_could_unpack_is_not_written(store, tmp_path, monkeypatch):
    monkeypatch.setattr("steplab.store.pack.LARGEST_UNPACKED", 100)
    folder = store.save(make_run())
    with pytest.raises(UserError, match="Name fewer"):
        pack_runs(store, [folder.name], tmp_path / "x.zip")


def test_a_file_from_before_1980_is_packed(store, tmp_path):
    folder = store.save(make_run())
    os.utime(folder / "run.json", (0, 0))
    assert pack_runs(store, [folder.name], tmp_path / "x.zip") == 1
