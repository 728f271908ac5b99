"""Who holds how much memory when: one further step, every allocation of it booked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from steplab.errors import MeasurementError
from steplab.probes.allocations.blocks import (
    Block,
    Finder,
    build_blocks,
    name_kinds,
    saved_by_module,
)
from steplab.probes.allocations.cpu import cpu_recording
from steplab.probes.allocations.cuda import cuda_recording
from steplab.probes.allocations.curve import bytes_by_position, thinned
from steplab.probes.allocations.recording import Recording
from steplab.probes.allocations.segments import largest_gap, reserved_ranges
from steplab.probes.allocations.witness import Witness
from steplab.probes.compilation import graph_count
from steplab.probes.probe import Subject
from steplab.record.memory_timeline import KINDS, Allocation, MemoryTimeline
from steplab.units import bytes_

LISTED = 20
SLOWED = "recording slows the step: its times show order, not speed"
COMPILED = (
    "compiled modules: hooks see what a graph takes, saves and gives, not the modules inside it"
)


def record_memory(subject: Subject) -> MemoryTimeline:
    """Run one more step and book every allocation of it by who holds it.

    Weights are parameters and buffers; gradients and optimizer state are what parameters and
    the optimizer point to; activations were made by forward and saved for backward, or lived on
    into it; temporaries were freed in the phase that made them. The fetch of the batch is the
    phase `data`. A step that is compiled must have run before.
    """
    witness = Witness(subject.step)
    graphs = graph_count()
    if subject.on_cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    with cuda_recording() if subject.on_cuda else cpu_recording() as recording, witness.watching():
        with witness.phase("data"):
            batches = next(subject.feed)
        subject.step(batches)
    if graph_count() != graphs:
        raise MeasurementError(
            "The step was compiled while its memory was recorded.", "Let it run some steps before."
        )
    counted = torch.cuda.max_memory_allocated() if subject.on_cuda else None
    return timeline_of(recording, witness, counted)


def timeline_of(recording: Recording, witness: Witness, counted: int | None) -> MemoryTimeline:
    """Join what the allocator did with what the witness saw.

    `counted` is the peak by the allocator's own counter, None where it has none.
    """
    blocks, finder = _booked(recording, witness)
    table = bytes_by_position(blocks, len(recording.changes))
    totals = table.sum(axis=1)
    kept, peak = thinned(totals), int(totals.argmax())
    times_ms = [0.0, *(_ms(change.time_ns, witness) for change in recording.changes)]
    at_peak = [block for block in blocks if block.is_live(peak)]
    reserved, largest_free = _reserved(recording, at_peak, peak)
    return MemoryTimeline(
        times_ms=tuple(times_ms[position] for position in kept),
        bytes_by_kind={k: tuple(table[kept, i].tolist()) for i, k in enumerate(KINDS)},
        phases_ms=_phases_ms(witness),
        peak_bytes=int(totals[peak]),
        peak_ms=times_ms[peak],
        peak_by_kind=dict(zip(KINDS, table[peak].tolist(), strict=True)),
        at_peak=_largest(at_peak),
        largest=_largest([block for block in blocks if block.made >= 0]),
        saved_by_module=saved_by_module(witness.sightings, witness.phases, finder),
        reserved_bytes=reserved,
        largest_free_block=largest_free,
        source=recording.source,
        notes=_notes(recording, witness, int(totals[peak]), counted),
    )


def _booked(recording: Recording, witness: Witness) -> tuple[list[Block], Finder]:
    """Return all blocks with their kinds and modules, and what finds them."""
    changes = recording.changes
    held = witness.held if recording.held is None else recording.held
    blocks = build_blocks(held, changes)
    finder = Finder(blocks, changes)
    name_kinds(blocks, witness.sightings, witness.phases, finder)
    for block in blocks:
        if block.made >= 0 and not block.module:
            block.module = witness.module_at(changes[block.made].time_ns)
    return blocks, finder


def _ms(moment_ns: int, witness: Witness) -> float:
    return max(0, moment_ns - witness.begin_ns) / 1e6


def _phases_ms(witness: Witness) -> dict[str, tuple[float, float]]:
    """Return begin and end of every phase; a further micro-batch has `forward 2`, and so on."""
    spans: dict[str, tuple[float, float]] = {}
    passes: Counter[str] = Counter()
    for phase in witness.phases:
        passes[phase.name] += 1
        turn = passes[phase.name]
        name = phase.name if turn == 1 else f"{phase.name} {turn}"
        spans[name] = (_ms(phase.begin_ns, witness), _ms(phase.end_ns, witness))
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
    recording: Recording, witness: Witness, peak_bytes: int, counted: int | None
) -> tuple[str, ...]:
    notes = [SLOWED, *recording.notes]
    if witness.compiled:
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
