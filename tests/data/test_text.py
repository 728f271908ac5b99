import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steplab.core.errors import UserError
from steplab.data.loader import Loader, TextBatch
from steplab.data.sampling import Position
from steplab.data.series import fingerprint
from steplab.data.text import TextFiles, TextWindows, is_text, open_text, python_sources


def write(folder, *contents):
    paths = []
    for number, content in enumerate(contents):
        path = folder / f"{number}.txt"
        path.write_bytes(content)
        paths.append(path)
    return paths


@settings(max_examples=40)
@given(
    st.lists(st.binary(max_size=12), min_size=1, max_size=5), st.integers(1, 9), st.integers(1, 9)
)
def test_windows_are_those_of_all_files_joined(tmp_path_factory, contents, length, stride):
    joined = b"".join(contents)
    paths = write(tmp_path_factory.mktemp("text"), *contents)
    if len(joined) <= length:
        with pytest.raises(UserError, match=r"no text|do not fill"):
            TextWindows(TextFiles("some", paths), length, stride)
        return
    windows = TextWindows(TextFiles("some", paths), length, stride)
    starts = range(0, len(joined) - length, stride)
    assert len(windows) == len(starts)
    for number, start in enumerate(starts):
        tokens, targets = windows.read(number)
        assert bytes(tokens.tolist()) == joined[start : start + length]
        assert bytes(targets.tolist()) == joined[start + 1 : start + length + 1]
        assert tokens.dtype == targets.dtype == np.int64
    with pytest.raises(IndexError):
        windows.read(len(starts))


def test_a_folder_is_read_in_the_order_of_its_paths(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / ".hidden").mkdir()
    for name, content in {
        "z.txt": "last",
        "b/one.md": "\u00fcber",
        "a.txt": "first ",
        "empty.txt": "",
        ".hidden/x.txt": "not this",
        ".also": "nor this",
    }.items():
        (tmp_path / name).write_text(content, encoding="utf-8")
    (tmp_path / "b" / "picture.png").write_bytes(b"\x89PNG\0\xff")
    found = open_text(tmp_path)
    assert [path.name for path in found.paths] == ["a.txt", "z.txt", "one.md"]
    assert len(found.notes) == 1 and "1 files" in found.notes[0]
    assert bytes(found.read(2, 0, 5)) == "\u00fcber".encode()


def test_what_is_text(tmp_path):
    plain, cut, latin, zero = write(
        tmp_path,
        b"plain",
        ("x" + "\u00fc" * 2**16).encode(),  # a character lies across the bytes looked at
        "caf\u00e9 noir".encode("latin-1"),
        b"zero \0 byte",
    )
    assert is_text(plain) and is_text(cut)
    assert not is_text(latin) and not is_text(zero)
    with pytest.raises(UserError, match="not UTF-8"):
        open_text(latin)


@pytest.mark.parametrize("name", ["missing", "empty"])
def test_nothing_to_read_is_an_error(tmp_path, name):
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"There is no file|holds no text"):
        open_text(tmp_path / name)


def test_a_file_that_shrinks_is_an_error(tmp_path):
    files = open_text(write(tmp_path, b"0123456789")[0])
    files.paths[0].write_bytes(b"012")
    with pytest.raises(UserError, match="became shorter"):
        files.read(0, 0, 10)


def test_pythons_own_sources_are_split():
    train, held_out = python_sources(held_out=False), python_sources(held_out=True)
    assert not set(train.paths) & set(held_out.paths)
    assert 0.04 < len(held_out) / (len(train) + len(held_out)) < 0.06
    assert train.lengths.sum() > 5_000_000
    assert any(path.name == "argparse.py" for path in [*train.paths, *held_out.paths])


def test_a_loader_goes_on_where_it_was(tmp_path):
    (path,) = write(tmp_path, bytes(range(65, 91)) * 40)
    windows = TextWindows(open_text(path), 8, 8)
    with Loader(windows, 4, 7, "cpu") as loader:
        batches = [next(loader) for _ in range(50)]  # more than one epoch
        assert isinstance(batches[0], TextBatch)
    with Loader(windows, 4, 7, "cpu") as loader:
        for _ in range(20):
            next(loader)
        position = loader.position
    assert position == Position(0, 80)
    with Loader(windows, 4, 7, "cpu", position=position, workers=3) as loader:
        for expected in batches[20:]:
            found = next(loader)
            assert torch.equal(found.tokens_BT, expected.tokens_BT)
            assert torch.equal(found.targets_BT, expected.targets_BT)
            assert torch.equal(found.tokens_BT[:, 1:], found.targets_BT[:, :-1])


def test_other_text_has_another_fingerprint(tmp_path):
    one, other = write(tmp_path, b"some text", b"some tent")
    assert fingerprint(open_text(one)) != fingerprint(open_text(other))
