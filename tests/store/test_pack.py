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
