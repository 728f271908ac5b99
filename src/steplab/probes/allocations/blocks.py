"""Blocks: every piece of memory with its life, and the kind of thing that it held.

A position is a number of changes: at position p the first p allocations and frees have happened.
Clocks tell a moment to a microsecond, in which a device may see several changes; positions are
exact.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from steplab.probes.allocations.recording import Change
from steplab.probes.allocations.witness import SAVED, Phase, Sighting


@dataclass
class Block:
    """Memory from one allocation to its free."""

    address: int
    bytes: int
    made: int = -1  # number of the change that made it; -1: it was there before
    freed: int | None = None  # number of the change that freed it; None: none did
    line: str = ""
    op: str = ""
    kind: str = ""
    shape: tuple[int, ...] | None = None
    dtype: str = ""
    module: str = ""

    def is_live(self, position: int) -> bool:
        """Whether it was held after `position` changes."""
        return self.made < position and (self.freed is None or position <= self.freed)


def build_blocks(held: Mapping[int, int], changes: Sequence[Change]) -> list[Block]:
    """Pair allocations with their frees. `held` is what was there before: address to bytes."""
    live = {address: Block(address, size) for address, size in held.items()}
    blocks = list(live.values())
    for number, change in enumerate(changes):
        before = live.pop(change.address, None)
        if before is None and change.bytes < 0:
            # Freed, but never seen: it was there before the step.
            before = Block(change.address, -change.bytes)
            blocks.append(before)
        if before is not None:
            before.freed = number
        if change.bytes > 0:
            block = Block(change.address, change.bytes, number, None, change.line, change.op)
            live[change.address] = block
            blocks.append(block)
    return blocks


class Finder:
    """Finds the block that stood at an address at a moment."""

    def __init__(self, blocks: Iterable[Block], changes: Sequence[Change]) -> None:
        self._times = [change.time_ns for change in changes]
        self._blocks: dict[int, list[Block]] = defaultdict(list)
        for block in blocks:
            self._blocks[block.address].append(block)

    def position(self, moment_ns: int) -> int:
        """Return how many changes had happened."""
        return bisect_right(self._times, moment_ns)

    def find(self, address: int, moment_ns: int) -> Block | None:
        """Return the block, or None: memory of another allocator."""
        position = self.position(moment_ns)
        lives = self._blocks.get(address, [])
        latest = bisect_left(lives, position, key=lambda block: block.made) - 1
        return lives[latest] if latest >= 0 and lives[latest].is_live(position) else None


def name_kinds(
    blocks: Sequence[Block],
    sightings: Iterable[Sighting],
    phases: Sequence[Phase],
    finder: Finder,
) -> None:
    """Set the kind of every block, and its shape, dtype and owner where a tensor was seen."""
    saved = set()
    for sighting in sightings:
        block = finder.find(sighting.address, sighting.time_ns)
        if block is None:
            continue
        if sighting.role == SAVED:
            saved.add(id(block))
        elif not block.kind:
            block.kind, block.module = sighting.role, sighting.module
        if block.shape is None:
            block.shape, block.dtype = sighting.shape, sighting.dtype
    course = Course(phases, finder)
    for block in blocks:
        block.kind = block.kind or course.kind(block, id(block) in saved)


class Course:
    """The phases of a step as positions."""

    def __init__(self, phases: Sequence[Phase], finder: Finder) -> None:
        self.names = [phase.name for phase in phases]
        moments = [moment for phase in phases for moment in (phase.begin_ns, phase.end_ns)]
        self.borders = [finder.position(moment) for moment in moments]

    def part(self, change: int) -> int:
        """Return the number of the part of the step: odd in a phase, even between phases."""
        return bisect_right(self.borders, change)

    def kind(self, block: Block, saved: bool) -> str:
        """Tell activations, temporaries and the rest apart by where a block lived."""
        if block.made < 0:
            return "other"
        part = self.part(block.made)
        if part % 2 and self.names[part // 2] == "forward":
            following = self.names[part // 2 + 1 : part // 2 + 2]
            crosses = following == ["backward"] and block.is_live(self.borders[part + 1])
            if saved or crosses:
                return "activations"
        brief = block.freed is not None and self.part(block.freed) == part
        return "temporaries" if brief else "other"


def saved_by_module(
    sightings: Iterable[Sighting], phases: Sequence[Phase], finder: Finder
) -> dict[str, int]:
    """Return bytes saved for backward by the module that saved them first, most first.

    What the model itself holds is left out. Of several micro-batches it is the one that saved
    most: each is freed before the next.
    """
    forwards = [phase for phase in phases if phase.name == "forward"]
    starts = [phase.begin_ns for phase in forwards]
    sums: list[dict[str, int]] = [defaultdict(int) for _ in forwards]
    seen: set[tuple[int, int]] = set()
    for sighting in sightings:
        if sighting.role != SAVED:
            continue
        block = finder.find(sighting.address, sighting.time_ns)
        turn = bisect_right(starts, sighting.time_ns) - 1
        key = (turn, id(block) if block else sighting.address)
        if key not in seen and (block is None or block.kind != "weights"):
            sums[turn][sighting.module] += sighting.bytes
        seen.add(key)
    most = max(sums, key=lambda by_module: sum(by_module.values()), default={})
    return dict(sorted(most.items(), key=lambda item: -item[1]))
