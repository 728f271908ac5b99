"""Damage to an honest input: to its bytes, or to the tree of values that its format holds.

Everything is drawn by hypothesis, so that a failure shrinks to the least damage that causes it.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

MARK = "fuzzmark"  # in everything that would be a name or a program if somebody ran it
MOST_NODES = 20_000  # of a tree that is damaged further: damages must not multiply
DEEP = 5_000  # levels: far more than Python's stack has
NUMBERS: tuple[Any, ...] = (
    0, -1, 1, 2, 255, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**12, 10**30,
    -(2**63), 10**400, 0.5, -0.0, 1e-320, 1e300, -1e300, math.nan, math.inf, -math.inf,
)  # fmt: skip
TEXTS = (
    "", " ", "0", "1e9", "nan", "null", "\x00", "\x1b[31mred\x07\r\n", "a" * 300, "a" * 70_000,
    "\ud800", "\u202eevil", "\U0001d54a" * 40, "é\u0301\uffff", f"../../{MARK}", f"/tmp/{MARK}",
    f"{MARK}.py:make", f"{MARK}:make", f"__import__('os').system('{MARK}')", f"={MARK}()",
    f"<script>{MARK}</script>", "{0.__class__}", "%s%n%d", "torch.float32", "C:\\aux", "~root",
)  # fmt: skip
EMPTY: tuple[Any, ...] = (None, True, False, [], {}, [[]], {"": {}}, [None] * 300, [0] * 20_000)


def one_of(things: tuple[Any, ...]) -> st.SearchStrategy[Any]:
    """Draw one of these; by its number, because hypothesis writes out what it draws from."""
    return st.integers(0, len(things) - 1).map(things.__getitem__)


values = st.one_of(
    one_of(NUMBERS),
    one_of(TEXTS),
    one_of(EMPTY),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    st.recursive(st.none() | st.integers() | st.text(max_size=3), st.lists, max_leaves=6),
)
places = st.floats(0.0, 1.0, exclude_max=True)


@dataclass(frozen=True)
class ByteDamage:
    """One change to bytes, at a place that is a share of their length."""

    kind: str
    place: float
    length: int = 1
    data: bytes = b""

    def apply(self, old: bytes) -> bytes:
        """Return the damaged bytes."""
        at = int(self.place * len(old))
        end = at + self.length
        part = old[at:end]
        return {
            "flip": lambda: (
                old[:at] + bytes(b ^ 1 << self.length % 8 for b in part[:1]) + old[at + 1 :]
            ),
            "cut": lambda: old[:at],
            "drop": lambda: old[:at] + old[end:],
            "repeat": lambda: old[:at] + part * 3 + old[end:],
            "insert": lambda: old[:at] + self.data + old[at:],
            "overwrite": lambda: old[:at] + self.data + old[at + len(self.data) :],
            "swap": lambda: old[at:] + old[:at],
            "double": lambda: old + old,
            "empty": lambda: b"",
            "fill": lambda: old[:at] + bytes(len(part)) + old[end:],
        }[self.kind]()


BYTE_KINDS = (
    "flip",
    "cut",
    "drop",
    "repeat",
    "insert",
    "overwrite",
    "swap",
    "double",
    "empty",
    "fill",
)
PIECES = (
    b"\x00", b"\xff" * 8, b"\x7f\xff\xff\xff", b"\xff\xff\xff\x7f", b"\x00" * 4096, b"\r\n", b",",
    b'"', b"{", b"[" * DEEP, b'{"a":' * DEEP, b"PK\x03\x04", b"PK\x01\x02", b"\x1f\x8b\x08",
    b"\x80\x04\x95", b"\x93NUMPY", b"PAR1", b"1" * 5_000, b"NaN", b"-Infinity", b"\xef\xbb\xbf",
    b"\xed\xa0\x80",
)  # fmt: skip
byte_damage = st.builds(
    ByteDamage,
    st.sampled_from(BYTE_KINDS),
    places,
    st.sampled_from((1, 2, 3, 4, 7, 8, 16, 100, 5_000)),
    one_of(PIECES) | st.binary(max_size=8),
)


@dataclass(frozen=True)
class TreeDamage:
    """One change to a node of a tree of dicts and lists; the node is a share of all of them."""

    kind: str
    place: float
    value: Any = None

    def apply(self, tree: Any) -> Any:
        """Return the tree with the change; it is changed in place where that is possible."""
        nodes, value = list(_nodes(tree)), deepcopy(self.value)
        if not nodes or len(nodes) > MOST_NODES:
            return tree
        parent, key = nodes[int(self.place * len(nodes))]
        change = {
            "replace": lambda: parent.__setitem__(key, value),
            "remove": lambda: parent.__delitem__(key),
            "nest": lambda: parent.__setitem__(key, _nest(parent[key])),
            "add": lambda: _add(parent, key, value),
            "rename": lambda: _rename(parent, key, value),
            "as text": lambda: parent.__setitem__(key, str(parent[key])[:1_000]),
            "as list": lambda: parent.__setitem__(key, [parent[key]] * 2),
            "scale": lambda: parent.__setitem__(key, _scale(parent[key], value)),
            "many": lambda: parent.__setitem__(key, [parent[key]] * 100),
            "everywhere": lambda: _everywhere(nodes, key, value),
        }[self.kind]
        change()
        return tree


TREE_KINDS = ("replace", "remove", "nest", "add", "rename", "as text", "as list", "scale", "many",
              "everywhere")  # fmt: skip
tree_damage = st.builds(TreeDamage, st.sampled_from(TREE_KINDS), places, values)


def _nodes(tree: Any) -> Any:
    """Yield (parent, key) of every value in the tree."""
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        items = node.items() if isinstance(node, dict) else enumerate(node)
        for key, value in list(items):
            yield node, key
            if isinstance(value, (dict, list)):
                waiting.append(value)


def _everywhere(nodes: list[Any], key: Any, value: Any) -> None:
    """Set every value of that key: what one honest event would hide must not be needed."""
    for parent, other in nodes:
        if other == key and isinstance(parent, dict):
            parent[key] = deepcopy(value)


def _nest(value: Any) -> Any:
    for _ in range(300):
        value = [value]
    return value


def _add(parent: Any, key: Any, value: Any) -> None:
    if isinstance(parent, dict):
        parent[f"{key}x"] = value
    else:
        parent.insert(key, value)


def _rename(parent: Any, key: Any, value: Any) -> None:
    if isinstance(parent, dict):
        parent[str(value)] = parent.pop(key)
    else:
        parent.append(parent.pop(key))


def _scale(old: Any, value: Any) -> Any:
    if isinstance(old, bool) or not isinstance(old, (int, float)):
        return old
    try:
        return old * (value if isinstance(value, (int, float)) else -1)
    except OverflowError:
        return math.inf


@dataclass(frozen=True)
class Layer:
    """How the tree of a file is taken out of its bytes, and put back."""

    read: Callable[[bytes], Any]
    write: Callable[[Any], bytes]


UNWRITABLE = (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError)


@dataclass(frozen=True)
class Damage:
    """Changes to one file of an input, and the command that opens the input."""

    file: str
    bytes_: tuple[ByteDamage, ...] = ()
    tree: tuple[TreeDamage, ...] = ()
    command: int = 0

    def apply(self, data: bytes, layer: Layer | None) -> bytes:
        """Return the damaged file; a tree that its format cannot hold stays as it was."""
        if layer is not None and self.tree:
            tree = layer.read(data)
            for change in self.tree:
                tree = change.apply(tree) if isinstance(tree, (dict, list)) else tree
            with contextlib.suppress(*UNWRITABLE):
                data = layer.write(tree)
        for damage in self.bytes_:
            data = damage.apply(data)
        return data


def damages(files: dict[str, Layer | None], commands: int) -> st.SearchStrategy[Damage]:
    """Return a strategy for an input of these files: a tree is damaged where a file has one."""

    def of(name: str) -> st.SearchStrategy[Damage]:
        command = st.integers(0, commands - 1)
        some = st.lists(byte_damage, min_size=1, max_size=3).map(tuple)
        raw = st.builds(Damage, st.just(name), some, st.just(()), command)
        if files[name] is None:
            return raw
        trees = st.lists(tree_damage, min_size=1, max_size=3).map(tuple)
        few = st.lists(byte_damage, max_size=1).map(tuple)
        return (
            st.builds(Damage, st.just(name), few, trees, command)
            | st.builds(Damage, st.just(name), st.just(()), trees, command)
            | raw
        )

    return st.one_of(*map(of, files))
