"""Ledger: everything that a step does on the device, in the order in which the host asks for it."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from steplab.core.run import MEMORY_KINDS
from steplab.estimate.allocator import Block, CachingAllocator
from steplab.estimate.calls import Call, describe
from steplab.estimate.fake_card import FakeStream
from steplab.parallel.silent import SilentGroup
from steplab.probes.communication import NAMESPACES, collective_kind, message_bytes

# Ops that hand out what is there already: no kernel runs.
FREE = frozenset(
    """view _unsafe_view reshape _reshape_alias t transpose permute expand slice select split
    split_with_sizes unsqueeze squeeze alias detach as_strided unbind narrow view_as empty
    empty_like empty_strided new_empty new_empty_strided lift_fresh _to_dense diagonal unfold chunk
    is_same_size movedim chunk_cat_noop set_ resize_ record_stream""".split()
)
QUIET = ("prim", "prims", "profiler")


@dataclass(frozen=True)
class Kernel:
    """A call that runs on the device."""

    call: Call
    phase: str
    stream: int
    calls: int = 1  # of operators by the host since the kernel before, this one among them
    is_own: bool = False  # an op of ours, whose call is Python
    is_compiled: bool = False  # inside a compiled module
    graphs: int = 0  # compiled graphs that the host has entered since the kernel before

    @property
    def fusible(self) -> bool:
        """Whether a compiler can make it a part of its neighbor: it moves numbers only."""
        return self.is_compiled and not self.is_own and not self.call.flops


@dataclass(frozen=True)
class Sent:
    """A collective: it begins when its stream has come so far, and runs beside it."""

    op: str
    ranks: int
    bytes: int
    phase: str
    stream: int
    number: int
    stride: int = 1  # between the numbers of the group's ranks


@dataclass(frozen=True)
class Mark:
    """An event: it is reached when `stream` has done, and waited for, all that stands before."""

    stream: int
    number: int


@dataclass(frozen=True)
class Wait:
    """From here on `stream` waits until a Mark is reached or a collective has ended."""

    stream: int
    number: int


Entry = Kernel | Sent | Mark | Wait


class Ledger(TorchDispatchMode):
    """Notes kernels, collectives, waits and memory of what runs inside.

    Storages are followed from the op that makes them until the last tensor on them is gone, and
    placed by the rules of torch's allocator.
    """

    supports_higher_order_operators = True

    def __init__(self, scratch: Any = None) -> None:
        super().__init__()
        self.entries: list[Entry] = []
        self.allocator = CachingAllocator()
        self.scratch = (
            scratch  # a Call -> bytes that its kernels need for themselves; None: nothing
        )
        self.streams: list[FakeStream] = [FakeStream(self, 0)]
        self.stream = 0
        self.phase = ""
        self.moments: list[tuple[int, int]] = []  # (storage's number, bytes or minus them)
        self.born: dict[int, str] = {}  # storage's number -> phase
        self._blocks: dict[int, tuple[Block | None, int, Any]] = {}  # by the storage's address
        self._numbers = 0
        self._marks = 0  # events and collectives so far
        self._calls = 0
        self.is_compiled = False  # whether what runs now is inside a compiled module
        self.entered = 0  # compiled graphs since the last kernel
        self.fed: set[int] = set()  # storages that products and opaque ops inside them have read
        # What compiled ops that only move numbers made: storage's number -> those it was made of.
        self.made_of: dict[int, tuple[int, ...]] = {}
        self.alive_after_forward: set[int] = set()

    # Streams, as fake_card asks for them.

    def new_stream(self) -> FakeStream:
        """Return a new stream."""
        self.streams.append(FakeStream(self, len(self.streams)))
        return self.streams[-1]

    @contextlib.contextmanager
    def on_stream(self, stream: FakeStream | None) -> Iterator[None]:
        """Run what is inside on another stream; None: on the present one."""
        before = self.stream
        self.stream = before if stream is None else stream.number
        try:
            yield
        finally:
            self.stream = before

    def set_stream(self, stream: FakeStream) -> None:
        """Run what follows on another stream."""
        self.stream = stream.number

    def mark(self, stream: int) -> int:
        """Note an event on a stream; return its number."""
        self._marks += 1
        self.entries.append(Mark(stream, self._marks))
        return self._marks

    def wait(self, stream: int, number: int) -> None:
        """Note that a stream waits for an event or a collective."""
        self.entries.append(Wait(stream, number))

    def launched(self, name: str, args: Sequence[Any]) -> None:
        """Note a kernel that Triton launches: each of its tensors is read or written once.

        A tuple of tensors may be filled up with one of them.
        """
        tensors = {id(t): t for t in tree_leaves(list(args)) if isinstance(t, Tensor)}.values()
        moved = float(sum(t.nbytes for t in tensors if t.device.type == "cuda"))
        self._note(Call(f"triton {name}", (math.log2(max(moved, 1.0)),), 0.0, moved))

    @contextlib.contextmanager
    def watch(self, phase: str) -> Iterator[None]:
        """Run a phase of the step."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before
            if phase == "forward":
                alive = {number for _, number, _ in self._blocks.values()}
                self.alive_after_forward = {n for n in alive if self.born[n] == phase}

    # Ops.

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the op, then note it."""
        kwargs = dict(kwargs or {})
        if any(hasattr(kind, "full_tensor") for kind in types):
            return NotImplemented
        out = func(*args, **kwargs)
        if isinstance(func, HigherOrderOperator) or func.namespace in QUIET:
            return out
        self._calls += 1
        fresh = self._made(out)
        if func.namespace in NAMESPACES:  # noted by the group, which is told when somebody waits
            return out
        name = func._overloadpacket.__name__
        is_free = name in FREE or (name == "_to_copy" and _shares(args[0], out))
        if not is_free and _on_device(args, kwargs, out):
            call = describe(func, args, kwargs, out)
            if self.scratch is not None:
                self._use_scratch(self.scratch(call))
            kernel = self._note(call, func.namespace == "steplab")
            if kernel.fusible:
                self.made_of |= dict.fromkeys(fresh, tuple(self._known(args, kwargs)))
            elif kernel.is_compiled:
                self.fed.update(self._known(args, kwargs))
        return out

    def _note(self, call: Call, is_own: bool = True) -> Kernel:
        calls, self._calls = max(self._calls, 1), 0
        entered, self.entered = self.entered, 0
        kernel = Kernel(call, self.phase, self.stream, calls, is_own, self.is_compiled, entered)
        self.entries.append(kernel)
        return kernel

    def _known(self, args: Any, kwargs: Any) -> Iterator[int]:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and leaf.device.type == "cuda":
                found = self._blocks.get(leaf.untyped_storage()._cdata)
                if found is not None:
                    yield found[1]

    def sent(self, name: str, group: SilentGroup, arguments: list[Any]) -> Callable[[], None]:
        """Note a collective; return what to call when somebody waits for it."""
        kind = collective_kind(name)
        if kind is None:
            return lambda: None
        self._marks += 1
        number, size = self._marks, message_bytes(kind, arguments)
        where = (self.phase, self.stream, number, group.stride)
        self.entries.append(Sent(kind, group.size(), size, *where))

        def waited() -> None:
            self.wait(self.stream, number)

        return waited

    # Memory.

    def _made(self, out: Any) -> list[int]:
        """Follow what an op returns; return the numbers of the storages that are new."""
        before = self._numbers
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor) and tensor.device.type == "cuda":
                self.follow(tensor)
        return list(range(before + 1, self._numbers + 1))

    def follow(self, tensor: Tensor) -> int:
        """Give a tensor's storage memory, unless it has it already; return the storage's number."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._blocks:
            return self._blocks[key][1]
        self._numbers += 1
        number = self._numbers
        gone = weakref.ref(storage, lambda _: self._free(key))
        self._blocks[key] = (self._take(number, storage.nbytes()), number, gone)
        self.born[number] = self.phase
        return number

    def _take(self, number: int, size: int) -> Block | None:
        block = self.allocator.allocate(size, self.stream)
        if block is not None:
            self.moments.append((number, block.size))
        return block

    def _free(self, key: int) -> None:
        block, number, _ = self._blocks.pop(key)
        if block is not None:
            self.moments.append((number, -block.size))
            self.allocator.release(block)

    def resized(self, storage: Any, size: int) -> None:
        """Follow a storage whose bytes are given back or taken again, as sharding does."""
        key = storage._cdata
        if key not in self._blocks:
            return
        block, number, gone = self._blocks[key]
        if block is not None:
            self.moments.append((number, -block.size))
            self.allocator.release(block)
        self._blocks[key] = (self._take(number, size), number, gone)

    def _use_scratch(self, size: int) -> None:
        block = self.allocator.allocate(size, self.stream)
        if block is not None:
            self.moments += [(0, block.size), (0, -block.size)]
            self.allocator.release(block)

    def begin(self) -> None:
        """Begin to note: forget the kernels so far and look for the peak anew."""
        self.entries.clear()
        self.allocator.reset_peaks()
        held: dict[int, int] = {}
        for number, size in self.moments:
            held[number] = held.get(number, 0) + size
        self.moments = [(number, size) for number, size in held.items() if size]

    def leave_out(self, numbers: set[int]) -> int:
        """Take storages out of the account; return the bytes of the peak without them."""
        self.moments = [moment for moment in self.moments if moment[0] not in numbers]
        now = most = 0
        for _, size in self.moments:
            now += size
            most = max(most, now)
        return most

    def at_peak(self, kinds: Mapping[int, str]) -> dict[str, int]:
        """Return the bytes by kind at the moment of the most; `kinds` by the storage's number."""
        now = most = 0
        at = 0
        for index, (_, size) in enumerate(self.moments):
            now += size
            if now > most:
                most, at = now, index
        live: dict[int, int] = {}
        for number, size in self.moments[: at + 1]:
            live[number] = live.get(number, 0) + size
        found = dict.fromkeys(MEMORY_KINDS, 0)
        for number, size in live.items():
            default = "activations" if self.born.get(number) == "forward" else "temporaries"
            found[kinds.get(number, default)] += size
        return found


def _shares(tensor: Tensor, out: Tensor) -> bool:
    """Whether nothing was copied, because it was there already."""
    return bool(tensor.untyped_storage()._cdata == out.untyped_storage()._cdata)


def _on_device(args: Any, kwargs: Any, out: Any) -> bool:
    leaves = tree_leaves((args, kwargs, out))
    return any(isinstance(t, Tensor) and t.device.type == "cuda" for t in leaves)


@contextlib.contextmanager
def following(ledger: Ledger) -> Iterator[None]:
    """Let the ledger see what no op shows: resized storages, and waits for collectives."""
    resize = torch.UntypedStorage.resize_

    def resize_(storage: Any, size: int) -> Any:
        done = resize(storage, size)
        ledger.resized(storage, size)
        return done

    before = SilentGroup.watch
    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
    SilentGroup.watch = ledger.sent
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
        SilentGroup.watch = before
