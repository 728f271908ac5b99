import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import pytest

from steplab.core.codec import decode, encode, read_word
from steplab.core.errors import UserError

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import given
from hypothesis import strategies as st


@dataclass(frozen=True)
class Leaf:
    values: tuple[float, ...]
    kind: Literal["a", "b"] = "a"


@dataclass(frozen=True)
class Tree:
    name: str
    leaf: Leaf | None = None
    parts: Mapping[str, Leaf] = field(default_factory=dict)
    count: int = 0
    flag: bool = False


floats = st.floats(allow_nan=False)
leaves = st.builds(Leaf, st.lists(floats).map(tuple), st.sampled_from(["a", "b"]))
trees = st.builds(
    Tree,
    st.text(),
    st.none() | leaves,
    st.dictionaries(st.text(), leaves, max_size=3),
    st.integers(-(2**64) + 1, 2**64 - 1),
    st.booleans(),
)


@given(trees)
def test_what_is_written_is_read_back(tree):
    text = json.dumps(encode(tree), allow_nan=False)
    assert decode(Tree, json.loads(text)) == tree


def test_nan_survives_strict_json():
    text = json.dumps(encode(Leaf((math.nan, math.inf, -math.inf))), allow_nan=False)
    back = decode(Leaf, json.loads(text))
    assert math.isnan(back.values[0]) and back.values[1:] == (math.inf, -math.inf)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"name": "x", "cuont": 1}, "Did you mean 'count'"),
        ({}, "lacks name"),
        ({"name": 3}, "record.name must be str"),
        ({"name": "x", "count": True}, "must be a number"),
        ({"name": "x", "leaf": {"values": [], "kind": "c"}}, "record.leaf.kind"),
        ({"name": "x", "leaf": {"values": "no"}}, "must be a list"),
        ([], "must be an object"),
    ],
)
def test_wrong_data_is_reported_with_its_place(data, message):
    with pytest.raises(UserError, match=message):
        decode(Tree, data)


def test_words():
    assert read_word(int, "3", "x") == 3
    assert read_word(bool, "True", "x") is True
    assert read_word(float | None, "1e3", "x") == 1000.0
    with pytest.raises(UserError, match="x needs int, not 'three'"):
        read_word(int, "three", "x")
    with pytest.raises(UserError, match="true or false"):
        read_word(bool, "yes", "x")


@dataclass(frozen=True)
class Span:
    ends: tuple[float, float]
    count: int = 0


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"ends": [1.0]}, "must have 2 items, not 1"),
        ({"ends": [1, 10**400]}, "out of range"),
        ({"ends": [1, 2], "count": 10**30}, "out of range"),
        ({"ends": [1, 2], "count": "x" * 10**6}, "must be int, not str"),
        ({"ends": [1, 2], "x\x1b[2J" * 10**5: 1}, "has an unknown key"),
    ],
)
def test_hostile_values_are_one_short_sentence(data, message):
    with pytest.raises(UserError, match=message) as error:
        decode(Span, data)
    assert len(str(error.value)) < 300 and str(error.value).isprintable()
