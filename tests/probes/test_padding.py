"""How much of a batch is padding, by its masks and lengths."""

import pytest
import torch

from steplab.probes.padding import padding_of

MASK = torch.tensor([[1, 1, 1, 1], [1, 0, 0, 0]])
IDS, LENGTHS = torch.zeros(2, 4, dtype=torch.long), torch.tensor([4, 1])


def test_padding_is_what_the_attention_mask_leaves_out():
    told = "attention_mask"
    assert padding_of([{told: MASK}]) == (3 / 8, told)
    assert padding_of([{told: MASK}, {told: MASK[:1]}]) == (3 / 12, told)
    assert padding_of([{told: MASK.bool()}]) == (3 / 8, told)
    assert padding_of([{"lengths": LENGTHS, "x": IDS, told: MASK}]) == (3 / 8, told)
    causal = torch.ones(4, 4).tril()[None]  # no mask of padding
    assert padding_of([{told: causal}]) == (0.0, "")
    assert padding_of([{"x": MASK}]) == padding_of([MASK]) == (0.0, "")


def test_padding_is_what_a_key_padding_mask_marks():
    name = "src_key_padding_mask"
    assert padding_of([{name: MASK == 0}]) == (3 / 8, name)
    assert padding_of([{name: MASK.float()}]) == (0.0, "")  # added to scores: what counts is open


@pytest.mark.parametrize("name", ["lengths", "length", "src_lens", "seq_len"])
def test_padding_is_what_is_behind_the_lengths(name):
    assert padding_of([{"x": IDS, name: LENGTHS}]) == (3 / 8, name)
    # Padded to the longest: the targets are of another length.
    assert padding_of([{"y": torch.zeros(2, 6), "x": IDS, name: LENGTHS}]) == (3 / 8, name)
    # Padded to a fixed length, with features behind it.
    assert padding_of([{"x": torch.zeros(2, 5, 3), name: LENGTHS}]) == (5 / 10, name)


def test_what_only_looks_like_lengths_tells_nothing():
    nothing = (0.0, "")
    assert padding_of([{"x": IDS, "labels": LENGTHS}]) == nothing
    assert padding_of([{"x": IDS, "lengths": LENGTHS.float()}]) == nothing
    assert padding_of([{"x": IDS, "lengths": LENGTHS + 1}]) == nothing  # longer than any sequence
    assert padding_of([{"x": IDS[:, :0], "lengths": LENGTHS}]) == nothing
    both = {"x": torch.zeros(2, 6), "y": torch.zeros(2, 8), "lengths": LENGTHS}
    assert padding_of([both]) == nothing  # of which of them?
