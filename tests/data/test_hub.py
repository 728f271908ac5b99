import errno
import sys

import numpy as np
import pytest

from steplab.core.errors import Unsupported, UserError
from steplab.data import hub
from steplab.data.formats import open_series
from steplab.data.formats.time300b import write_time300b

from .stub_hub import Offline, fake_hub


@pytest.fixture
def repository(tmp_path):
    root = tmp_path / "hub"
    for name, count in (("energy/bull", 3), ("energy/sun", 2), ("web/clicks", 4)):
        write_time300b(root / name, [np.arange(5.0)] * count, max_elements_per_file=10)
    (root / "README.md").write_text("about")
    (root / "pictures").mkdir()
    (root / "pictures" / "x.png").write_text("no dataset")
    return root


@pytest.fixture
def served(repository, monkeypatch):
    module = fake_hub(repository)
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    return module


def test_domains_and_datasets_are_listed(served):
    files = hub.list_files()
    domains = hub.partitions(files)
    assert [(part.name, part.datasets) for part in domains] == [("energy", 2), ("web", 1)]
    assert domains[1].size == sum(f.size for f in files if f.path.startswith("web/"))
    datasets = hub.partitions(files, "energy")
    assert [(part.name, part.datasets) for part in datasets] == [
        ("energy/bull", 1), ("energy/sun", 1),
    ]  # fmt: skip
    assert sum(part.size for part in datasets) == domains[0].size


@pytest.mark.parametrize(("name", "series"), [("energy", 5), ("energy/bull/", 3), ("web", 4)])
def test_a_partition_comes_and_opens(served, tmp_path, name, series):
    folder = hub.download(hub.list_files(), name, tmp_path / "out")
    assert folder == tmp_path / "out" / name and len(open_series(folder)) == series
    assert all(path.startswith(name) for path in served.copied)


def test_a_broken_download_continues(repository, tmp_path, monkeypatch):
    broken = fake_hub(repository, fail_after=2)
    monkeypatch.setitem(sys.modules, "huggingface_hub", broken)
    files = hub.list_files()
    with pytest.raises(Unsupported, match=r"could not be read .*: Connection reset by peer"):
        hub.download(files, "energy", tmp_path / "out")
    whole = fake_hub(repository)
    monkeypatch.setitem(sys.modules, "huggingface_hub", whole)
    hub.download(files, "energy", tmp_path / "out")
    assert len(broken.copied) == 2 and not set(broken.copied) & set(whole.copied)
    assert len(open_series(tmp_path / "out" / "energy")) == 5


@pytest.mark.parametrize(
    ("name", "said"), [("enrgy", "Did you mean 'energy'"), ("energy/bul", "'energy/bull'")]
)
def test_an_unknown_partition_names_the_nearest(served, tmp_path, name, said):
    with pytest.raises(UserError, match=said):
        hub.download(hub.list_files(), name, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_disk_that_is_too_small_is_refused_before_the_download(served, tmp_path, monkeypatch):
    class Usage:
        free = 50

    monkeypatch.setattr(hub.shutil, "disk_usage", lambda path: Usage)
    with pytest.raises(UserError, match="50 B free"):
        hub.download(hub.list_files(), "energy", tmp_path / "new" / "out")
    assert not served.copied


def test_a_disk_that_fills_up(served, tmp_path, monkeypatch):
    def full(*args, **more):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(served, "snapshot_download", full)
    with pytest.raises(UserError, match="disk is full"):
        hub.download(hub.list_files(), "energy", tmp_path / "out")


def test_without_the_package_and_without_a_network(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(Unsupported, match=r"huggingface_hub.*steplab\[hub\]"):
        hub.list_files()

    class Api:
        def list_repo_tree(self, *args, **more):
            raise Offline()

    monkeypatch.setitem(sys.modules, "huggingface_hub", type("Hub", (), {"HfApi": Api}))
    with pytest.raises(Unsupported, match=r"Maple728/Time-300B could not be read .*: Offline"):
        hub.list_files()
