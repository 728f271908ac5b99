"""What steplab writes to: regular files and new names; nothing else is replaced or waited for."""

import errno
import os
import socket
from pathlib import Path

import pytest

from steplab.core.errors import UserError
from steplab.core.output_file import output_file, output_folder, own_file, write_output


@pytest.fixture
def odd_files(tmp_path):
    """Targets that are no regular files, with the words that name them."""
    os.mkfifo(tmp_path / "pipe")
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(tmp_path / "socket"))
    (tmp_path / "to-pipe").symlink_to("pipe")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "to-full").symlink_to("/dev/full")
    (tmp_path / "folder").mkdir()
    yield {
        tmp_path / "pipe": "is a pipe",
        tmp_path / "socket": "is a socket",
        tmp_path / "to-pipe": "is a pipe",
        tmp_path / "loop": "symbolic links",
        tmp_path / "to-full": "is a device",
        Path("/dev/full"): "is a device",
        tmp_path / "folder": "is a folder",
        tmp_path / "pipe" / "x": "not a directory",
        tmp_path / ("x" * 5000): "too long",
        tmp_path / "a\0b": "not a file name",
    }
    server.close()


def test_only_regular_files_are_written(odd_files, tmp_path):
    before = sorted(tmp_path.iterdir())
    for path, words in odd_files.items():
        with pytest.raises(UserError, match=words) as error:
            write_output(path, b"new", "--page")
        assert "--page" in str(error.value) and len(str(error.value)) < 400
    assert sorted(tmp_path.iterdir()) == before, "nothing was added or replaced"
    assert (tmp_path / "pipe").is_fifo() and (tmp_path / "to-full").is_symlink()


def test_new_names_and_files_are_written_with_the_folders_above(tmp_path):
    path = tmp_path / "new" / "folder" / "x.txt"
    write_output(path, b"one")
    write_output(path, b"two")
    assert path.read_bytes() == b"two" and list(path.parent.iterdir()) == [path]


def test_a_name_of_the_greatest_length_is_written(tmp_path):
    path = tmp_path / ("x" * 255)
    write_output(path, b"one")
    assert path.read_bytes() == b"one"


def test_a_link_stays_and_its_target_is_written(tmp_path):
    (tmp_path / "target").write_bytes(b"old")
    (tmp_path / "link").symlink_to("target")
    (tmp_path / "dangling").symlink_to("created")
    write_output(tmp_path / "link", b"new")
    write_output(tmp_path / "dangling", b"new")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "dangling").is_symlink()
    assert (tmp_path / "target").read_bytes() == (tmp_path / "created").read_bytes() == b"new"


def test_folders_to_write_into(tmp_path):
    (tmp_path / "file").touch()
    assert output_folder(tmp_path) == tmp_path
    assert output_folder(tmp_path / "new") == tmp_path / "new"
    for path, words in (("file", "is a file"), ("/dev/null", "is a device")):
        with pytest.raises(UserError, match=f"{words}, not a folder.*--store"):
            output_folder(tmp_path / path, "--store")


@pytest.mark.parametrize("name", ["x.csv", "new/x.csv"])
def test_a_folder_without_permission_is_refused_before_the_work(tmp_path, monkeypatch, name):
    (tmp_path / "x.csv").touch()

    def refuse(path, **how):  # root may write anywhere, and chmod does not keep it from it
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "touch", refuse)
    with pytest.raises(UserError, match=r"no permission.*--out"):
        output_file(tmp_path / name)


def test_a_folder_in_which_even_root_creates_nothing_is_refused_before_the_work():
    with pytest.raises(UserError, match=r"Cannot write to /proc/new: .*--out"):
        output_file(Path("/proc/new/x.csv"))


def test_trying_a_folder_leaves_nothing_behind(tmp_path):
    output_file(tmp_path / "x.csv")
    assert list(tmp_path.iterdir()) == []


def test_a_link_in_a_strangers_folder_is_not_followed(tmp_path):
    (tmp_path / "metrics.jsonl").symlink_to("/etc/passwd")
    with pytest.raises(UserError, match="is a symbolic link"):
        own_file(tmp_path / "metrics.jsonl", "--checkpoint-dir")
    assert own_file(tmp_path / "new", "--checkpoint-dir") == (tmp_path / "new").resolve()
