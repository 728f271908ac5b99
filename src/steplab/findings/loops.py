"""Loops in Python: one operator over and over, or one input by many narrow weights in a row.

And that of `copy.deepcopy` over many tensors, by the storages that it hands out.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

import numpy as np

from steplab.core.units import fold_layer_numbers
from steplab.costs.op_call import OpCall
from steplab.findings.matmuls import matmuls
from steplab.findings.module_calls import turning_lines
from steplab.findings.rows import Mask, Rows
from steplab.trace.analysis import UNATTRIBUTED
from steplab.trace.budget import data_ranges
from steplab.trace.events import Codes, Ints, Trace
from steplab.trace.lines import LINE_RANGE

NOT_FORWARD = ("backward", "optimizer", "clip")
# Layers of a model are modules of their own; gradient accumulation rarely exceeds this.
MIN_TURNS = 24
MIN_SIBLINGS = 64  # modules of one list that one line calls: a deep model has fewer layers
NARROW = 128  # columns of a product that a tile of the device could have twice over
MIN_PRODUCTS = 8  # in a row
MIN_TENSORS = 24
PAUSE = 1_000_000  # ns between two tensors of one copy: a large one takes that
HANDS_OUT = "aten::set_"
PER_TENSOR = 2  # of it: the new storage gets a tensor of bytes, and the new tensor its storage
_IN_LIST = re.compile(r"((?:.*\.)?\d+\..*)\.\d+(?:\..*)?")  # a list inside a list


@dataclass(frozen=True)
class PythonLoop:
    """What a loop runs in the forward pass, or to clip gradients."""

    line: str
    op: str  # the operator that it calls and that takes most
    turns: int  # calls of it in one step
    whole: Mask  # what the function around it calls as often, backward included


def python_loops(rows: Rows) -> list[PythonLoop]:
    """Return the line that a loop calls most from, one of each function, most calls first.

    Of one module, or of many in one list.
    """
    labels = rows.work.labels
    folded = dict[str, int]()
    lists = [folded.setdefault(fold_layer_numbers(label), len(folded)) for label in labels]
    siblings = np.array(lists, np.int64)[rows.work.module]
    found = _loops(rows, rows.work.module, MIN_TURNS)
    known = {loop.line for loop in found}
    return found + [one for one in _loops(rows, siblings, MIN_SIBLINGS) if one.line not in known]


def _loops(rows: Rows, modules: Codes | Ints, least: int) -> list[PythonLoop]:
    """Return lines that call one operator of one of these modules at least so many times."""
    work = rows.work
    forward = rows.labeled("phase", lambda label: label not in NOT_FORWARD) | _clipping(rows, least)
    forward &= ~_fetching(rows)
    backward = rows.labeled("phase", lambda label: label == "backward")
    # All kernels of a replayed graph have one launch: they are no turns.
    replayed = np.diff(work.launched, prepend=-1) == 0
    chosen = np.flatnonzero(forward & (work.line > 0) & ~(replayed & (work.launched >= 0)))
    if not len(chosen):
        return []
    # By name: a loop over weights calls one operator with many shapes.
    key = np.stack([work.function, work.line, modules, work.op], axis=0)
    key = key[:, chosen].astype(np.int64)
    distinct, counts = np.unique(key, axis=1, return_counts=True)
    found: dict[int, PythonLoop] = {}
    for column in np.argsort(-counts, kind="stable").tolist():
        turns = int(counts[column]) // rows.steps
        function, line, module, op = distinct[:, column].tolist()
        name = work.labels[op]
        if turns < least or len(found) >= 3:
            break
        if function not in found and UNATTRIBUTED not in (name, work.labels[line]):
            here = forward & (work.line == line) & (modules == module)
            asked = _asked_most(rows, here, least)
            if asked is not None:
                whole = _turning(rows, (forward | backward) & (work.function == function))
                found[function] = PythonLoop(work.labels[line], *asked, whole)
    return list(found.values())


def _fetching(rows: Rows) -> Mask:
    """Return what runs while a batch is fetched: samples of a dataset are no loop of a model."""
    mask: Mask = np.zeros(len(rows.work), dtype=bool)
    has_op = (rows.work.op_row >= 0) & rows.inside
    start = rows.source.ops.start[rows.work.op_row[has_op]]
    mask[has_op] = data_ranges(rows.source).within(start, start + 1) > 0
    return mask


def _clipping(rows: Rows, least: int) -> Mask:
    """Return the work of clipping on lines that run at least so many times in a step.

    Torch has a loop of its own over the weights, which one call of the line runs.
    """
    spans, clip = rows.source.lines, rows.labeled("phase", lambda label: label == "clip")
    if not len(spans) or not clip.any():
        return clip & False
    times = Counter(spans.name.tolist())
    often = {rows.source.text(n).removeprefix(LINE_RANGE) for n, t in times.items() if t >= least}
    return clip & rows.labeled("line", often.__contains__)


def _asked_most(rows: Rows, mask: Mask, least: int) -> tuple[str, int] | None:
    """Return what the code calls at least so many times and takes most time in, and how often.

    None where torch has the loop, as in `nn.GRU`. Innermost operators do not tell: they are views.
    """
    often = {name: n for name, n in rows.asked_calls(mask).items() if n >= least}
    spent = {name: rows.ms(mask & rows.asked_for(name.__eq__)) for name in often}
    name = max(spent, key=spent.__getitem__, default="")
    return (name, often[name]) if name else None


def _turning(rows: Rows, mask: Mask, turns: int = MIN_TURNS) -> Mask:
    """Return the rows of lines that come at least so many times in a step."""
    counts = np.bincount(rows.work.line[mask], minlength=len(rows.work.labels))
    return mask & (counts >= turns * rows.steps)[rows.work.line]


@dataclass(frozen=True)
class NarrowProducts:
    """Products of one input with many narrow weights, one after the other: heads in a loop."""

    name: str  # "layers.*.heads.*", or a line where the modules have no names
    products: int  # in a row
    inputs: int
    width: int
    whole: Mask  # with what is around them
    lines: tuple[str, ...]  # of the loop, where it calls modules


def narrow_products(rows: Rows) -> NarrowProducts | None:
    """Return the narrow products that follow each other with nothing wide between; None: none."""
    known = matmuls(rows)
    backward = rows.labeled("phase", lambda label: label == "backward")
    chosen = np.flatnonzero(rows.of_calls(known) | rows.within(_convolves))
    chosen = chosen[np.argsort(rows.work.start[chosen], kind="stable")]
    # A product that launches several kernels is one.
    chosen = chosen[np.diff(rows.work.op_row[chosen], prepend=-1) != 0]
    runs: list[list[int]] = []
    last: tuple[int, int] | None = None
    for row in chosen.tolist():
        one = known.get(int(rows.call[row]))
        if one is None or backward[row]:
            last = None  # a network, or its gradients, lies between: one model that is called again
            continue
        given = (one.m, one.k) if one.n <= NARROW and one.k >= 4 * one.n else None
        if given is not None and given == last:
            runs[-1].append(row)
        elif given is not None:
            runs.append([row])
        # Products of activations, such as a head's own attention, are no weights.
        last = given if one.batch == 1 else last
    long = [run for run in runs if len(run) >= MIN_PRODUCTS]
    if not long:
        return None
    longest = max(long, key=len)
    name, whole = _around_products(rows, [row for run in long for row in run])
    one = known[int(rows.call[longest[0]])]
    ops, (first, last) = rows.source.ops, rows.work.op_row[[longest[0], longest[-1]]].tolist()
    times = int(ops.start[first]), int(ops.start[last])
    lines = tuple(turning_lines(rows.source, int(ops.thread[first]), *times))
    return NarrowProducts(name, len(longest), one.k, one.n, whole, lines)


def _convolves(call: OpCall) -> bool:
    return "convolution" in call.name


def _around_products(rows: Rows, products: list[int]) -> tuple[str, Mask]:
    """Return the name and all work of the lists of modules, else of the lines of the functions."""
    labels, work = rows.work.labels, rows.work
    found = [_IN_LIST.fullmatch(labels[code]) for code in np.unique(work.module[products])]
    lists = tuple({one[1] for one in found if one is not None})
    if lists and None not in found:
        heads = tuple(f"{path}." for path in lists)
        name = fold_layer_numbers(f"{lists[0]}.0")
        return name, rows.labeled("module", lambda label: label.startswith(heads))
    inside = rows.inside & np.isin(work.function, np.unique(work.function[products]))
    return labels[work.line[products[0]]], _turning(rows, inside, MIN_PRODUCTS)


def stretches_of_copying(trace: Trace) -> tuple[Ints, Ints]:
    """Return where in time (ns) many tensors in a row get a storage: begin and end of each."""
    rows = np.flatnonzero(trace.named(trace.ops, HANDS_OUT.__eq__))
    start = np.sort(trace.ops.start[rows])
    if not len(start):
        return start, start
    cut = np.flatnonzero(np.diff(start) > PAUSE) + 1
    first, last = np.append(0, cut), np.append(cut, len(start)) - 1
    many = last - first + 1 >= PER_TENSOR * MIN_TENSORS
    return start[first[many]], start[last[many]]


def deep_copied(rows: Rows) -> Mask:
    """Return the work that operators in those stretches launched."""
    begin, end = stretches_of_copying(rows.source)
    mask: Mask = np.zeros(len(rows.work), dtype=bool)
    if not len(begin):
        return mask
    has_op = (rows.work.op_row >= 0) & rows.inside
    at = rows.source.ops.start[rows.work.op_row[has_op]]
    place = np.searchsorted(begin, at, "right") - 1
    mask[has_op] = (place >= 0) & (at <= end[np.maximum(place, 0)])
    return mask
