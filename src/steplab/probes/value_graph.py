"""The operators of a watched step as a graph: who needs whom, and what that says of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from steplab.probes.compiled_calls import OUTSIDE
from steplab.probes.copied_rows import Places

# What fills memory with one number: it is no work that could have been kept.
FILLS = frozenset(
    f"aten::{name}"
    for name in "zeros ones full empty zeros_like ones_like full_like empty_like new_zeros "
    "new_ones new_full new_empty fill_ zero_ empty_strided new_empty_strided scalar_tensor".split()
)


@dataclass
class WatchedOp:
    """One operator that did something."""

    name: str
    needs: tuple[int, ...]  # the operators that wrote what it reads
    not_zero: tuple[int, ...] = ()  # those of them whose results are not known to be zero
    taken: tuple[int, ...] = ()  # `needs`, without those of which a torch.where takes nothing
    lasts: bool = False  # writes what outlives the step
    backward: int = -1  # the backward pass that runs it, by its number in the process
    read_by_host: bool = False
    number: int = 0  # that equal results share
    mirrored: int | None = None  # the number of what would be its result, transposed
    may_repeat: bool = False  # whether it counts where an earlier one has its number
    constant: bool = False
    unchanged: bool = False  # depends on nothing that steps change
    zeros: str = ""  # ZEROS, or tenths of the rows; of an attention, one of MASKED
    copied: Places = ()  # rows of its result that are copies of others
    casts_back: bool = False
    of_weights: bool = False  # elementwise work on trained weights alone, or a sum of it
    one_number: bool = False  # is all that it makes
    unmoved: float = 0.0  # share of what it updates in place that stays as it was
    elementwise: bool = False
    covers_older: bool = False  # copies a new tensor over one that is older than the step
    readers: int = 0  # operators that read its results
    # Storages of gradients that it could leave out:
    input_gradient: int | None = None
    weight_gradient: int | None = None
    # Of operators that a compiled graph would run, with their gradients:
    call: int = OUTSIDE  # of compiled code
    forward: int | None = None  # of a gradient: the operator that it belongs to
    line: str = ""
    flops: int = 0
    bytes: int = 0  # read and written


def behind(ops: list[WatchedOp], ends: Iterable[int]) -> set[int]:
    """Return the operators that these need, themselves included."""
    found: set[int] = set()
    waiting = list(ends)
    while waiting:
        one = waiting.pop()
        if one not in found:
            found.add(one)
            waiting.extend(ops[one].needs)
    return found


def repeated(ops: list[WatchedOp], needed: set[int]) -> dict[int, int]:
    """Return the operators that make what one before them had made, which the update needs.

    Each with the first that made it. The same two factors in the other order make it transposed.
    What nothing needs is the waste itself: a pass for a metric does not make the next one needless.
    """
    found: dict[int, int] = {}
    made: dict[int | None, int] = {}
    for index in sorted(needed):
        number, mirrored = ops[index].number, ops[index].mirrored
        first = made.get(number, made.get(mirrored))
        if ops[index].may_repeat and first is not None:
            found[index] = first
        made.setdefault(number, index)
    return found


def constants(ops: list[WatchedOp]) -> set[int]:
    """Return the operators that make the same in every step; fills only for others of them."""
    users: dict[int, list[int]] = {}
    for index, op in enumerate(ops):
        for needed in op.needs:
            users.setdefault(needed, []).append(index)
    found: set[int] = set()
    for index in reversed(range(len(ops))):
        fills = ops[index].name in FILLS
        if ops[index].constant and (not fills or set(users.get(index, ())) <= found != set()):
            found.add(index)
    return {i for i in found if ops[i].name not in FILLS or set(users.get(i, ())) <= found}


def penalties(ops: list[WatchedOp]) -> set[int]:
    """Return the operators that make one number out of weights alone, for a loss.

    A weight that is normed or rounded for a layer goes through such operators, too, but from there
    into tensors.
    """
    found: set[int] = set()
    into_tensors: set[int] = set()  # of the forward, by other operators
    into_numbers: set[int] = set()
    for index in reversed(range(len(ops))):
        op = ops[index]
        elsewhere = into_tensors if op.one_number else into_tensors | into_numbers
        if op.of_weights and index not in elsewhere:
            found.add(index)
        elif op.backward < 0:
            (into_numbers if op.one_number else into_tensors).update(op.needs)
    return found


def copied_over(ops: list[WatchedOp], held: set[int]) -> set[int]:
    """Return chains of elementwise operators for a copy over an older tensor, with the copy."""
    found: set[int] = set()
    for index, op in enumerate(ops):
        chain, waiting = set(), list(op.needs) if op.covers_older else []
        while waiting:
            one = waiting.pop()
            maker = ops[one]
            alone = maker.elementwise and maker.readers == 1 and not maker.lasts
            if alone and one not in held and one not in chain:
                chain.add(one)
                waiting.extend(maker.needs)
        found |= {index, *chain} if chain else set()
    return found
