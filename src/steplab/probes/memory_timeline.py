"""Who holds how much memory when: one more step, with every allocation attributed to its holder.

A position is a number of changes: at position p the first p allocations and frees have happened.
Clocks resolve a microsecond, in which a device may see several changes; positions are exact.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray

from steplab.core import Allocation, MemoryTimeline
from steplab.core.errors import MeasurementError
from steplab.core.run import MEMORY_KINDS
from steplab.core.units import bytes_
from steplab.probes.allocator import (
    Change,
    Recording,
    cpu_recording,
    cuda_recording,
    largest_gap,
    reserved_ranges,
)
from steplab.probes.compilation import graph_count
from steplab.probes.holders import holding_places, plain_addresses
from steplab.probes.known_tensors import known_addresses
from steplab.probes.probe import Subject
from steplab.probes.tensor_tracker import SAVED, Phase, TensorRecord, TensorTracker

LASTING = ("weights", "gradients", "optimizer state")
LISTED = 20  # allocations in each list
SLOWED = "recording slows the step: its times show order, not speed"
COMPILED = (
    "compiled modules: hooks see what a graph takes, saves and gives, not the modules inside it"
)
MAX_POINTS = 2000  # of the curve, for drawing

Ints = NDArray[np.int64]


def record_memory(subject: Subject) -> MemoryTimeline:
    """Run one more step and attribute every allocation of it to what holds it.

    Weights are parameters and buffers; gradients and optimizer state are what parameters and the
    optimizer point to; activations were allocated in forward and saved for backward, or lived on
    into it; temporaries were freed in the phase that allocated them. Fetching the batch is the
    phase `data`. A compiled step must have run before.
    """
    tracker = TensorTracker(subject.step)
    graphs = graph_count()
    if subject.on_cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    with cuda_recording() if subject.on_cuda else cpu_recording() as recording, tracker.tracking():
        with tracker.phase("data"):
            batches = next(subject.feed)
        subject.step(batches)
    if graph_count() != graphs:
        raise MeasurementError(
            "The step was compiled while its memory was recorded.", "Run some steps before."
        )
    counted = torch.cuda.max_memory_allocated() if subject.on_cuda else None
    return timeline_of(recording, tracker, counted, known_addresses(batches))


def timeline_of(
    recording: Recording,
    tracker: TensorTracker,
    counted: int | None,
    known: Set[int] = frozenset(),
) -> MemoryTimeline:
    """Combine what the allocator did with what the tracker saw.

    `counted` is the peak by the allocator's own counter, None where it has none; `known` has the
    addresses of what may be held when a step has ended.
    """
    blocks, finder = _attributed_blocks(recording, tracker)
    table = bytes_by_position(blocks, len(recording.changes))
    totals = table.sum(axis=1)
    kept, peak = thinned(totals), int(totals.argmax())
    times_ms = [0.0, *(_ms(change.time_ns, tracker) for change in recording.changes)]
    at_peak = [block for block in blocks if block.is_live(peak)]
    reserved, largest_free = _reserved(recording, at_peak, peak)
    kept_on = _kept(blocks, known)
    return MemoryTimeline(
        times_ms=tuple(times_ms[position] for position in kept),
        bytes_by_kind={k: tuple(table[kept, i].tolist()) for i, k in enumerate(MEMORY_KINDS)},
        phases_ms=_phases_ms(tracker),
        peak_bytes=int(totals[peak]),
        peak_ms=times_ms[peak],
        peak_by_kind=dict(zip(MEMORY_KINDS, table[peak].tolist(), strict=True)),
        at_peak=_largest(at_peak),
        largest=_largest([block for block in blocks if block.allocated >= 0]),
        saved_by_module=saved_by_module(tracker.records, tracker.phases, finder),
        reserved_bytes=reserved,
        largest_free_block=largest_free,
        source=recording.source,
        notes=_notes(recording, tracker, int(totals[peak]), counted),
        growth_bytes=int(totals[-1] - totals[0]),
        kept_bytes=sum(block.bytes for block in kept_on),
        kept_state_bytes=_held_plainly(kept_on),
        kept=_largest(kept_on),
        kept_by=holding_places({block.address for block in kept_on}) if kept_on else (),
    )


def _attributed_blocks(
    recording: Recording, tracker: TensorTracker
) -> tuple[list[Block], BlockFinder]:
    """Return all blocks with their kinds and modules, and an index to find them."""
    changes = recording.changes
    held = tracker.held if recording.held is None else recording.held
    blocks = build_blocks(held, changes)
    finder = BlockFinder(blocks, changes)
    name_kinds(blocks, tracker.records, tracker.phases, finder)
    for block in blocks:
        if block.allocated >= 0 and not block.module:
            block.module = tracker.module_at(changes[block.allocated].time_ns)
    return blocks, finder


def _kept(blocks: Sequence[Block], known: Set[int]) -> list[Block]:
    """Return what the step allocated and left behind, without what is known to be kept."""
    left = [block for block in blocks if block.allocated >= 0 and block.freed is None]
    ordered = sorted(known)

    def is_known(block: Block) -> bool:
        first = bisect_left(ordered, block.address)
        return ordered[first : first + 1] < [block.address + block.bytes] and first < len(ordered)

    return [block for block in left if block.kind not in LASTING and not is_known(block)]


def _held_plainly(kept: Sequence[Block]) -> int:
    """Return the bytes of blocks that tensors without a graph hold by themselves."""
    plain = plain_addresses() if kept else set()
    return sum(block.bytes for block in kept if block.address in plain)


def _ms(moment_ns: int, tracker: TensorTracker) -> float:
    return max(0, moment_ns - tracker.begin_ns) / 1e6


def _phases_ms(tracker: TensorTracker) -> dict[str, tuple[float, float]]:
    """Return start and end of every phase; the second micro-batch has `forward 2`, and so on."""
    spans: dict[str, tuple[float, float]] = {}
    passes: Counter[str] = Counter()
    for phase in tracker.phases:
        passes[phase.name] += 1
        count = passes[phase.name]
        name = phase.name if count == 1 else f"{phase.name} {count}"
        spans[name] = (_ms(phase.begin_ns, tracker), _ms(phase.end_ns, tracker))
    return spans


def _reserved(
    recording: Recording, at_peak: Sequence[Block], peak: int
) -> tuple[int | None, int | None]:
    """Return what the allocator had reserved at the peak, and the largest free piece of it."""
    if recording.segments is None:
        return None, None
    ranges = reserved_ranges(recording.segments, peak)
    used = [(block.address, block.address + block.bytes) for block in at_peak]
    return sum(end - begin for begin, end in ranges), largest_gap(ranges, used)


def _largest(blocks: Sequence[Block]) -> tuple[Allocation, ...]:
    chosen = sorted(blocks, key=lambda block: -block.bytes)[:LISTED]
    return tuple(
        Allocation(b.bytes, b.kind, b.shape, b.dtype, b.line, b.module, b.op) for b in chosen
    )


def _notes(
    recording: Recording, tracker: TensorTracker, peak_bytes: int, counted: int | None
) -> tuple[str, ...]:
    notes = [SLOWED, *recording.notes]
    if tracker.compiled:
        notes.append(COMPILED)
    if counted is not None:
        if counted < peak_bytes:
            raise MeasurementError(
                f"The allocations of the step add up to {bytes_(peak_bytes)}, but the allocator "
                f"counted {bytes_(counted)} at most."
            )
        more = bytes_(counted - peak_bytes)
        notes.append(f"the allocator counts {bytes_(counted)} at its peak: {more} are rounding")
    return tuple(notes)


@dataclass
class Block:
    """A piece of memory from its allocation to its free, and the kind of thing it held."""

    address: int
    bytes: int
    allocated: int = -1  # index of the change that allocated it; -1: it was there before
    freed: int | None = None  # index of the change that freed it; None: it was not freed
    line: str = ""
    op: str = ""
    kind: str = ""
    shape: tuple[int, ...] | None = None
    dtype: str = ""
    module: str = ""

    def is_live(self, position: int) -> bool:
        """Whether it was held after `position` changes."""
        return self.allocated < position and (self.freed is None or position <= self.freed)


def build_blocks(held: Mapping[int, int], changes: Sequence[Change]) -> list[Block]:
    """Pair allocations with their frees. `held` is what was there before: address -> bytes."""
    live = {address: Block(address, size) for address, size in held.items()}
    blocks = list(live.values())
    for number, change in enumerate(changes):
        before = live.pop(change.address, None)
        if before is None and change.bytes < 0:
            # Freed, but not known: it was there before the step.
            before = Block(change.address, -change.bytes)
            blocks.append(before)
        if before is not None:
            before.freed = number
        if change.bytes > 0:
            block = Block(change.address, change.bytes, number, None, change.line, change.op)
            live[change.address] = block
            blocks.append(block)
    return blocks


class BlockFinder:
    """Finds the block that was at an address at a moment."""

    def __init__(self, blocks: Iterable[Block], changes: Sequence[Change]) -> None:
        self._times = [change.time_ns for change in changes]
        self._blocks: dict[int, list[Block]] = defaultdict(list)
        for block in blocks:
            self._blocks[block.address].append(block)

    def position(self, moment_ns: int) -> int:
        """Return how many changes had happened."""
        return bisect_right(self._times, moment_ns)

    def find(self, address: int, moment_ns: int) -> Block | None:
        """Return the block; None for memory of another allocator."""
        position = self.position(moment_ns)
        lives = self._blocks.get(address, [])
        latest = bisect_left(lives, position, key=lambda block: block.allocated) - 1
        return lives[latest] if latest >= 0 and lives[latest].is_live(position) else None


def name_kinds(
    blocks: Sequence[Block],
    records: Iterable[TensorRecord],
    phases: Sequence[Phase],
    finder: BlockFinder,
) -> None:
    """Set the kind of every block, and its shape, dtype and owner where a tensor was seen."""
    saved = set()
    for record in records:
        block = finder.find(record.address, record.time_ns)
        if block is None:
            continue
        if record.role == SAVED:
            saved.add(id(block))
        elif not block.kind:
            block.kind, block.module = record.role, record.module
        if block.shape is None:
            block.shape, block.dtype = record.shape, record.dtype
    borders = PhaseBorders(phases, finder)
    for block in blocks:
        block.kind = block.kind or borders.kind(block, id(block) in saved)


class PhaseBorders:
    """The starts and ends of a step's phases, as positions."""

    def __init__(self, phases: Sequence[Phase], finder: BlockFinder) -> None:
        self.names = [phase.name for phase in phases]
        moments = [moment for phase in phases for moment in (phase.begin_ns, phase.end_ns)]
        self.borders = [finder.position(moment) for moment in moments]

    def part(self, change: int) -> int:
        """Return the index of the part of the step: odd in a phase, even between phases."""
        return bisect_right(self.borders, change)

    def kind(self, block: Block, saved: bool) -> str:
        """Return activations, temporaries or other, by the phases in which the block lived."""
        if block.allocated < 0:
            return "other"
        part = self.part(block.allocated)
        if part % 2 and self.names[part // 2] == "forward":
            following = self.names[part // 2 + 1 : part // 2 + 2]
            crosses = following == ["backward"] and block.is_live(self.borders[part + 1])
            if saved or crosses:
                return "activations"
        brief = block.freed is not None and self.part(block.freed) == part
        return "temporaries" if brief else "other"


def saved_by_module(
    records: Iterable[TensorRecord], phases: Sequence[Phase], finder: BlockFinder
) -> dict[str, int]:
    """Return the bytes saved for backward by each module, most first.

    A tensor counts for the module that saved it first; weights are left out. With several
    micro-batches it is the one that saved most, as each is freed before the next.
    """
    forwards = [phase for phase in phases if phase.name == "forward"]
    starts = [phase.begin_ns for phase in forwards]
    sums: list[dict[str, int]] = [defaultdict(int) for _ in forwards]
    seen: set[tuple[int, int]] = set()
    for record in records:
        if record.role != SAVED:
            continue
        block = finder.find(record.address, record.time_ns)
        batch = bisect_right(starts, record.time_ns) - 1
        key = (batch, id(block) if block else record.address)
        if key not in seen and (block is None or block.kind != "weights"):
            sums[batch][record.module] += record.bytes
        seen.add(key)
    most = max(sums, key=lambda by_module: sum(by_module.values()), default={})
    return dict(sorted(most.items(), key=lambda item: -item[1]))


def bytes_by_position(blocks: Iterable[Block], changes: int) -> Ints:
    """Return the bytes held at every position by kind, shape (changes + 1, kinds)."""
    steps = np.zeros((changes + 1, len(MEMORY_KINDS)), dtype=np.int64)
    column = {kind: number for number, kind in enumerate(MEMORY_KINDS)}
    for block in blocks:
        steps[block.allocated + 1, column[block.kind]] += block.bytes
        if block.freed is not None:
            steps[block.freed + 1, column[block.kind]] -= block.bytes
    return np.cumsum(steps, axis=0)


def thinned(totals: Ints) -> Ints:
    """Return at most MAX_POINTS positions: the first, the last, and the extremes of each stretch.

    The peak is among them, being the highest of its stretch.
    """
    if len(totals) <= MAX_POINTS:
        return np.arange(len(totals))
    kept = {0, len(totals) - 1}
    borders = np.linspace(0, len(totals), (MAX_POINTS - 2) // 2 + 1).astype(int)
    for begin, end in pairwise(borders.tolist()):
        stretch = totals[begin:end]
        kept |= {begin + int(stretch.argmax()), begin + int(stretch.argmin())}
    return np.array(sorted(kept))
