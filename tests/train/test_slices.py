"""Slices: who writes which, and how they become tensors again."""

import json
import re

import pytest

pytest.importorskip("safetensors")
import torch

from steplab.core.errors import UserError
from steplab.train.slices import Held, Slice, choose_writers
from steplab.train.tensor_files import OFFSETS_KEY, SavedTensors, write_tensors


def test_every_slice_is_written_once_and_the_bytes_are_spread():
    replicated = [Held(f"layer.{i}", (0, 0), 100) for i in range(12)]
    held = [[*replicated, Held("table", (rank * 8, 0), 64)] for rank in range(4)]
    chosen = choose_writers(held)
    flat = [each for own in chosen for each in own]
    assert len(flat) == len(set(flat)) == 12 + 4
    assert all(("table", (rank * 8, 0)) in chosen[rank] for rank in range(4))
    assert [len(own) for own in chosen] == [4, 4, 4, 4]


def test_a_slice_with_one_holder_is_written_by_it():
    held = [[Held("a", (0,), 4)], [Held("a", (0,), 4), Held("exp_avg/a", (0,), 4)]]
    assert choose_writers(held) == [{("a", (0,))}, {("exp_avg/a", (0,))}]


def test_of_rounded_and_whole_weights_the_whole_ones_are_written():
    assert choose_writers([[Held("a", (0,), 2)], [Held("a", (0,), 4)]]) == [set(), {("a", (0,))}]


WHOLE = torch.arange(7 * 6, dtype=torch.float32).reshape(7, 6)


@pytest.fixture
def grid(tmp_path):
    """A tensor cut into rows of 3, 3 and 1 and columns of 4 and 2, one file each; and a scalar."""
    files = []
    for row, rows in ((0, 3), (3, 3), (6, 1)):
        for column, columns in ((0, 4), (4, 2)):
            part = WHOLE[row : row + rows, column : column + columns]
            files.append(tmp_path / f"{row}-{column}.safetensors")
            write_tensors(files[-1], {"w": part}, {"w": (row, column)})
    files.append(tmp_path / "scalar.safetensors")
    write_tensors(files[-1], {"step": torch.tensor(3.0)}, {"step": ()})
    return files


def test_slices_are_read_as_one_tensor(grid):
    with SavedTensors(grid) as saved:
        assert saved.shapes == {"w": (7, 6), "step": ()}
        assert saved.dtypes == {"w": torch.float32, "step": torch.float32}
        assert torch.equal(saved.read("w"), WHOLE) and saved.read("step") == 3
        for first in range(8):
            for rows in range(8 - first):
                part = Slice((first, 1), (rows, 4))
                assert torch.equal(saved.read("w", part), WHOLE[first : first + rows, 1:5])


def test_whole_tensors_are_slices_of_their_own(tmp_path):
    write_tensors(tmp_path / "whole.safetensors", {"w": WHOLE, "none": torch.empty(0, 3)})
    with SavedTensors([tmp_path / "whole.safetensors"]) as saved:
        assert torch.equal(saved.read("w"), WHOLE) and saved.read("none").shape == (0, 3)
        assert torch.equal(saved.read("w", Slice((2, 0), (3, 6))), WHOLE[2:5])


@pytest.mark.parametrize(
    ("offsets", "shapes"),
    [
        ([(0, 0), (0, 0)], [(3, 6), (3, 6)]),  # one slice twice
        ([(0, 0), (2, 0)], [(3, 6), (3, 6)]),  # an overlap
        ([(0, 0), (4, 0)], [(3, 6), (3, 6)]),  # a gap
        ([(3, 0)], [(3, 6)]),  # the beginning is missing
        ([(0, 0), (10**15, 0)], [(3, 6), (3, 6)]),  # petabytes, by its offsets
        ([(0, 0), (3, 0)], [(3, 6), (3, 5)]),  # a corner is missing
        ([(0, 0), (3,)], [(3, 6), (3, 6)]),  # the offsets of another tensor
        ([(0, 0), (3,)], [(3, 6), (3,)]),
        ([(0, 0), (-3, 0)], [(3, 6), (3, 6)]),
    ],
)
def test_slices_that_make_no_tensor_are_refused_before_anything_is_allocated(
    tmp_path, offsets, shapes
):
    files = []
    for number, (offset, shape) in enumerate(zip(offsets, shapes, strict=True)):
        files.append(tmp_path / f"{number}.safetensors")
        write_tensors(files[-1], {"w": torch.zeros(shape)}, {"w": offset})
    with pytest.raises(UserError, match=r"is damaged: .* w "):
        SavedTensors(files)


def test_slices_of_two_dtypes_are_refused(tmp_path):
    files = [tmp_path / "0.safetensors", tmp_path / "1.safetensors"]
    write_tensors(files[0], {"w": torch.zeros(2)}, {"w": (0,)})
    write_tensors(files[1], {"w": torch.zeros(2, dtype=torch.int64)}, {"w": (2,)})
    with pytest.raises(UserError, match="different dtypes"):
        SavedTensors(files)


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"w": 3}', '{"w": {"saved_offsets": "ab"}}', '{"w": {"saved_offsets": [1.5]}}',
     '{"w": {"saved_offsets": [true]}}', '{"w": {}}', "[" * 5000],
)  # fmt: skip
def test_hostile_offsets_are_one_sentence(tmp_path, text):
    from safetensors.torch import save_file

    file = tmp_path / "w.safetensors"
    save_file({"w": torch.zeros(3)}, file, {OFFSETS_KEY: text})
    with pytest.raises(UserError) as error:
        SavedTensors([file])
    assert str(file) in str(error.value) and "\n" not in str(error.value)


def test_the_header_speaks_as_torch_does(grid):
    text = re.search(rb'"DCP_SHARDING_INFO":"(.*?[^\\])"', grid[3].read_bytes())
    assert json.loads(text[1].decode().replace('\\"', '"')) == {"w": {"saved_offsets": [3, 4]}}
