"""Collectives of one rank: when each began and ended, in which group, and how much it carried.

On a GPU a collective is a kernel of NCCL, described by its own arguments or by those of the host's
event around its launch. On a CPU it is a range of gloo's threads, which does not name its group.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from steplab.costs.collectives import bus_factor
from steplab.costs.op_call import ITEM_BYTES
from steplab.trace.analysis import Floats, Window
from steplab.trace.categories import is_communication_kernel
from steplab.trace.events import Codes, Ints, Trace, at_rows
from steplab.trace.host_calls import find_launches
from steplab.trace.spans import nest
from steplab.trace.windows import step_at

# What collectives are called here, by the letters that every library's spelling has in common.
# The first that is found counts: "reducescatter" has "reduce" in it.
KINDS = {
    "allreduce": "all-reduce",
    "allgather": "all-gather",
    "reducescatter": "reduce-scatter",
    "alltoall": "all-to-all",
    "broadcast": "broadcast",
    "barrier": "barrier",
    "sendrecv": "send and receive",
    "send": "send",
    "recv": "receive",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
}
UNKNOWN = "collective"
KIND_NAMES = (*KINDS.values(), UNKNOWN)
# In which no rank is done before the last one has come.
MOVING = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all")
MEETINGS = (*MOVING, "barrier")
_NOT_LETTERS = re.compile(r"[^a-z]")
_TORCH_DTYPES = {
    "Float": "float",
    "Double": "double",
    "Half": "c10::Half",
    "BFloat16": "c10::BFloat16",
    "Long": "long",
    "Int": "int",
    "Short": "short",
    "Char": "signed char",
    "Byte": "unsigned char",
    "Bool": "bool",
    "Float8_e4m3fn": "c10::Float8_e4m3fn",
    "Float8_e5m2": "c10::Float8_e5m2",
}
UNNAMED = "undefined"  # what torch writes for a group that nobody has described
_NO_MESSAGE = ("wait", "init")  # what the host also records in the form of a collective


@dataclass(frozen=True)
class Collectives:
    """One row per collective, sorted by start; of one rank."""

    start: Ints  # ns: when this rank was ready for it
    end: Ints  # ns
    called: Ints  # ns: when the host launched it
    step: Ints  # number of the step that called it, -1: none
    kind: Codes  # index in KIND_NAMES
    group: Codes  # index in `groups`
    size: Ints  # ranks of the group, 0: unknown
    sent: Floats  # bytes, nan: unknown
    received: Floats  # bytes, nan: unknown
    sequence: Ints  # its number in the group, -1: unknown
    groups: tuple[str, ...]  # "0 [0, 1]"; "": not recorded
    purpose: Codes  # of the group, index in `purposes`
    purposes: tuple[str, ...]  # "mesh_tp", alike on all ranks; "": not recorded

    def __len__(self) -> int:
        return len(self.start)

    @property
    def bytes(self) -> Floats:
        """The whole message of each: the larger of what goes in and what comes out."""
        return np.fmax(self.sent, self.received)

    def of_kind(self, *names: str) -> NDArray[np.bool_]:
        """Which rows are of these kinds."""
        return np.isin(self.kind, [KIND_NAMES.index(name) for name in names])


@dataclass(frozen=True)
class Called:
    """The calls of collectives in the order in which the host made them."""

    step: Ints
    kind: Codes  # index in KIND_NAMES
    group: Codes  # index in `groups`
    bytes: Ints  # of kinds whose ranks all have the same, else -1
    groups: tuple[str, ...]


def collective_kind(name: str) -> str:
    """Return what a collective is called here, by any library's name of it or of its kernel."""
    letters = _NOT_LETTERS.sub("", name.lower())
    return next((kind for word, kind in KINDS.items() if word in letters), UNKNOWN)


def find_collectives(trace: Trace, windows: Sequence[Window]) -> Collectives:
    """Return the collectives of a trace; those of its device, else those of gloo."""
    device, messages = trace.device, trace.messages
    rows = np.flatnonzero(trace.named(device, is_communication_kernel))
    if len(rows):
        launches = find_launches(trace)
        called = np.where(launches.called >= 0, launches.called, device.start)[rows]
        message = _message_of(trace, rows, launches.thread[rows], called)
        start, end, name = device.start[rows], device.end[rows], device.name[rows]
    else:
        message = np.flatnonzero(trace.named(messages, lambda text: text.startswith("gloo:")))
        start, end, name = messages.start[message], messages.end[message], messages.name[message]
        called = start
    kind = _kinds(trace, at_rows(messages.collective, message), name, message)
    group, groups = _groups(trace, message)
    purpose, purposes = _purposes(trace, message)
    size = np.where(message >= 0, at_rows(messages.size, message), 0)
    size = np.where(size > 0, size, trace.place.ranks or 0)
    item = _item_bytes(trace, at_rows(messages.dtype, message))
    sent, received = (
        np.where(count >= 0, count, np.nan) * item
        for count in (at_rows(messages.sent, message), at_rows(messages.received, message))
    )
    gathers = (kind == KIND_NAMES.index("all-gather")) & np.isnan(received) & (size > 0)
    received = np.where(gathers, sent * size, received)
    sequence = at_rows(messages.sequence, message)
    step = step_at(windows, called)
    return Collectives(
        *(start, end, called, step, kind, group, size, sent, received, sequence, groups),
        *(purpose, purposes),
    )


def find_calls(trace: Trace, windows: Sequence[Window], collectives: Collectives) -> Called:
    """Return the order of the calls.

    On a CPU that of the operators that call: gloo has several threads, which may begin two
    collectives in either order.
    """
    if len(trace.device):
        order = np.argsort(collectives.called, kind="stable")
        alike = collectives.of_kind("all-reduce", "reduce-scatter", "broadcast")
        known = alike & np.isfinite(collectives.bytes)
        size = np.where(known, collectives.bytes, -1).astype(np.int64)
        step, kind, group = collectives.step, collectives.kind, collectives.group
        return Called(step[order], kind[order], group[order], size[order], collectives.groups)
    ops = trace.ops
    calls = np.flatnonzero(trace.named(ops, _calls_collective))
    kinds = {code: KIND_NAMES.index(collective_kind(trace.text(code)))
             for code in set(ops.name[calls].tolist())}  # fmt: skip
    kind = np.array([kinds[code] for code in ops.name[calls].tolist()], np.int32)
    unknown = np.full(len(calls), -1, np.int64)
    step = step_at(windows, ops.start[calls])
    return Called(step, kind, np.zeros(len(calls), np.int32), unknown, ("",))


def _calls_collective(name: str) -> bool:
    return name.startswith("c10d::") and collective_kind(name) != UNKNOWN


def _message_of(trace: Trace, rows: Ints, thread: Ints, called: Ints) -> Ints:
    """Return for every kernel the row in Trace.messages that describes it best, -1: none.

    Its own, if that names the group; else the innermost of the host around its launch that does;
    else whatever gives a shape.
    """
    messages = trace.messages
    own = np.full(len(rows), -1, np.int64)
    keys = np.flatnonzero(messages.correlation > 0)
    keys = keys[np.argsort(messages.correlation[keys], kind="stable")]
    if len(keys):
        wanted = trace.device.correlation[rows]
        place = np.minimum(np.searchsorted(messages.correlation[keys], wanted), len(keys) - 1)
        own = np.where(messages.correlation[keys[place]] == wanted, keys[place], -1)
    named = messages.group >= 0
    waits = trace.named(messages, lambda name: False)
    for code in set(messages.collective.tolist()):
        if trace.text(code) in _NO_MESSAGE:
            waits |= messages.collective == code
    of_host = (messages.correlation < 0) & ~waits
    grouped = nest(messages, of_host & named).innermost(thread, called)
    plain = nest(messages, of_host & (messages.sent >= 0)).innermost(thread, called)
    outer = nest(messages, of_host).innermost(thread, called)
    choices = [np.where(at_rows(messages.group, own) >= 0, own, -1), grouped, plain, outer, own]
    found = choices[0]
    for choice in choices[1:]:
        found = np.where(found >= 0, found, choice)
    return found


def _kinds(trace: Trace, collective: Ints, name: Codes, message: Ints) -> Codes:
    """Return kinds by what the message says, else by its name, else by the kernel's name."""
    said = at_rows(trace.messages.name, message)
    cache: dict[tuple[int, int, int], int] = {}

    def kind(codes: tuple[int, int, int]) -> int:
        if codes not in cache:
            texts = (trace.text(code) for code in codes)
            kinds = (collective_kind(text) for text in texts)
            found = next((one for one in kinds if one != UNKNOWN), UNKNOWN)
            cache[codes] = KIND_NAMES.index(found)
        return cache[codes]

    codes = zip(collective.tolist(), said.tolist(), name.tolist(), strict=True)
    return np.array([kind(one) for one in codes], np.int32)


def _groups(trace: Trace, message: Ints) -> tuple[Codes, tuple[str, ...]]:
    """Return the number of each collective's group, and what the groups are called."""
    messages = trace.messages
    pairs = np.stack([at_rows(messages.group, message), at_rows(messages.members, message)])
    distinct, number = np.unique(pairs, axis=1, return_inverse=True)
    names = [f"{trace.text(a)} {trace.text(b)}".strip() for a, b in distinct.T.tolist()]
    return number.ravel().astype(np.int32), tuple(names)


def _purposes(trace: Trace, message: Ints) -> tuple[Codes, tuple[str, ...]]:
    """Return what the group of each collective is for, as whoever made the group has written."""
    distinct, number = np.unique(at_rows(trace.messages.purpose, message), return_inverse=True)
    texts = (trace.text(code) for code in distinct.tolist())
    names = tuple("" if text == UNNAMED else text for text in texts)
    return number.ravel().astype(np.int32), names


def _item_bytes(trace: Trace, dtype: Ints) -> Floats:
    """Return the bytes of one element, nan: unknown."""
    sizes = {code: _bytes_of(trace.text(code)) for code in set(dtype.tolist())}
    return np.array([sizes[code] for code in dtype.tolist()], np.float64)


def _bytes_of(dtype: str) -> float:
    return ITEM_BYTES.get(_TORCH_DTYPES.get(dtype, dtype), float("nan"))


def bus_bandwidth(kind: str, size: int, message: float, ns: float) -> float:
    """Return the bytes per second that the link of a rank carried; nan where that is unknown."""
    if kind not in MOVING or size < 2 or not ns > 0:
        return float("nan")
    return message * bus_factor(kind, size) / (ns * 1e-9)
