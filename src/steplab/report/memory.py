"""The memory of a step as tables: by kind, by allocation, saved for backward."""

from __future__ import annotations

from collections import defaultdict
from typing import TextIO

from steplab.core import Allocation, Column, MemoryTimeline, Table
from steplab.core.run import MEMORY_KINDS
from steplab.core.units import bytes_, fold_layer_numbers, milliseconds, percent
from steplab.report.terminal import print_table

MIB = 2**20
LISTED_AT_PEAK = 10
LISTED_MODULES = 10


def memory_tables(timeline: MemoryTimeline) -> tuple[Table, ...]:
    """Return who held the memory at the peak: by kind, by allocation, and saved by module."""
    tables = (_kinds(timeline), _at_peak(timeline), _saved(timeline))
    return tuple(table for table in tables if table.rows)


def print_memory(timeline: MemoryTimeline, file: TextIO | None = None) -> None:
    """Print all tables of a timeline to stdout or `file`."""
    for table in memory_tables(timeline):
        print_table(table, file)


def peak_phase(timeline: MemoryTimeline) -> str:
    """Return the phase in which the peak lies; "between phases" for none."""
    for name, (begin, end) in timeline.phases_ms.items():
        if begin <= timeline.peak_ms <= end:
            return name
    return "between phases"


def _kinds(timeline: MemoryTimeline) -> Table:
    columns = (
        Column("kind"),
        Column("at the peak", "MiB"),
        Column("share"),
        Column("most", "MiB"),
        Column("before the step", "MiB"),
        Column("after", "MiB"),
    )
    rows = []
    for kind in MEMORY_KINDS:
        held, at_peak = timeline.bytes_by_kind[kind], timeline.peak_by_kind[kind]
        sizes = (max(held) / MIB, held[0] / MIB, held[-1] / MIB)
        rows.append((kind, *_part(at_peak, timeline.peak_bytes), *sizes))
    title = (
        f"memory: peak {bytes_(timeline.peak_bytes)} in {peak_phase(timeline)}, "
        f"{milliseconds(timeline.peak_ms)} into the step ({timeline.source})"
    )
    return Table(title, columns, tuple(rows), "\n".join([*_reserved(timeline), *timeline.notes]))


def _reserved(timeline: MemoryTimeline) -> list[str]:
    """Say how much of the reserved memory was free at the peak, and in how large pieces."""
    reserved, largest = timeline.reserved_bytes, timeline.largest_free_block
    if reserved is None or largest is None:
        return []
    free = reserved - timeline.peak_bytes
    text = f"reserved at the peak: {bytes_(reserved)}, of which {bytes_(free)} free"
    if free <= 0:
        return [text]
    scattered = percent(1 - min(1.0, largest / free))
    return [f"{text}; largest free block {bytes_(largest)} (fragmentation {scattered})"]


def _at_peak(timeline: MemoryTimeline) -> Table:
    """Leave out what is not known of any of them: the CUDA allocator knows no operators."""
    names = ("kind", "shape", "dtype", "module", "op", "line")
    columns = (Column("size", "MiB"), *map(Column, names))
    rows = [_allocation(one) for one in timeline.at_peak[:LISTED_AT_PEAK]]
    kept = [number for number in range(len(columns)) if any(row[number] for row in rows)]
    return Table(
        "largest allocations at the peak",
        tuple(columns[number] for number in kept),
        tuple(tuple(row[number] for number in kept) for row in rows),
    )


def _allocation(one: Allocation) -> tuple[float | str, ...]:
    shape = "" if one.shape is None else " x ".join(map(str, one.shape)) or "scalar"
    return (one.bytes / MIB, one.kind, shape, one.dtype, one.module, one.op, one.line)


def _saved(timeline: MemoryTimeline) -> Table:
    """One row per kind of place: repeated blocks share one (`blocks.*.attention`)."""
    groups: dict[str, list[int]] = defaultdict(list)
    for name, size in timeline.saved_by_module.items():
        groups[fold_layer_numbers(name)].append(size)
    total = sum(timeline.saved_by_module.values())
    ordered = sorted(groups.items(), key=lambda item: -sum(item[1]))
    rows = [(name, len(sizes), *_part(sum(sizes), total)) for name, sizes in ordered]
    rest = [size for _, sizes in ordered[LISTED_MODULES:] for size in sizes]
    if rest:
        rows = [*rows[:LISTED_MODULES], ("the rest", len(rest), *_part(sum(rest), total))]
    return Table(
        f"saved for backward by module: {bytes_(total)}",
        (Column("module"), Column("places"), Column("saved", "MiB"), Column("share")),
        tuple(rows),
    )


def _part(size: int, total: int) -> tuple[float, str]:
    return size / MIB, percent(size / total if total else 0.0)
