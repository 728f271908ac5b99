"""The operators of a watched step, found again in the trace of another."""

import random

import pytest

from steplab.core import Dataflow
from steplab.findings import verdicts
from steplab.findings.verdicts import aligned, letters_of_work
from tests.findings.steps import RecordedOp, cpu_case


def length_of_longest(left: str, right: str) -> int:
    """The definition: a table of lengths."""
    row = [0] * (len(right) + 1)
    for one in left:
        above = row
        row = [0]
        for place, other in enumerate(right):
            row.append(above[place] + 1 if one == other else max(row[-1], above[place + 1]))
    return row[-1]


@pytest.mark.parametrize("seed", range(20))
def test_the_longest_common_subsequence_is_found(seed):
    draw = random.Random(seed)
    left, right = ("".join(draw.choices("abcd", k=draw.randrange(40))) for _ in range(2))
    pairs = list(aligned(left, right))
    assert len(pairs) == length_of_longest(left, right)
    assert all(left[one] == right[other] for one, other in pairs)
    assert pairs == sorted(pairs) and len({one for one, _ in pairs}) == len(pairs)
    assert len({other for _, other in pairs}) == len(pairs)


def test_long_steps_are_aligned_in_blocks(monkeypatch):
    monkeypatch.setattr(verdicts, "BLOCK", 16)
    draw = random.Random(0)
    left = "".join(draw.choices("abcdefgh", k=300))
    right = "".join(one for one in left if draw.random() > 0.05)  # some are missing
    pairs = list(aligned(left, right))
    assert len(pairs) > 0.97 * len(right) and pairs == sorted(pairs)
    assert list(aligned("aaa", "b" * 100)) == []


def test_operators_that_run_in_place_or_only_under_watch_lose_no_others():
    """A recurrent cell: autograd copies and adds anew while it is watched."""
    cell = ("aten::mm", "aten::add_", "aten::mul_")
    done = [RecordedOp(name, 10) for name in cell * 20]
    watched = ("aten::mm", "aten::add", "aten::clone", "aten::mul_") * 20
    names = tuple(dict.fromkeys(watched))
    flow = Dataflow(names, tuple(names.index(name) for name in watched), "r.." + "." * 77)
    rows = cpu_case(done).rows
    assert "r" not in letters_of_work(rows, flow)  # a quarter is not there: too unsure
    few = Dataflow(names, flow.ops[:2] + flow.ops[3:], flow.verdicts[1:])
    some = tuple(number for place, number in enumerate(few.ops) if number != 2 or place < 20)
    flow = Dataflow(names, some, "r" + "." * (len(some) - 1))
    mask = letters_of_work(rows, flow) == "r"
    assert mask.sum() == 1 and mask[0]
