import zipfile

import pytest

from steplab.core.errors import UserError
from steplab.store import Store, pack_runs, unpack_runs
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
