import io
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest

from steplab.core import Allocation, MemoryTimeline
from steplab.core.codec import decode, encode
from steplab.core.run import MEMORY_KINDS
from steplab.report.charts.memory import memory_svg
from steplab.report.memory import memory_tables, print_memory

MIB = 2**20
BIG = Allocation(8 * MIB, "activations", (4, 512, 1024), "float32", "model.py:9 (forward)", "head")


def timeline(**changes) -> MemoryTimeline:
    held = dict.fromkeys(MEMORY_KINDS, (0, 0, 0))
    held |= {"weights": (4 * MIB,) * 3, "activations": (0, 10 * MIB, 0)}
    at_peak = {kind: values[1] for kind, values in held.items()}
    made = MemoryTimeline(
        times_ms=(0.0, 2.0, 5.0),
        bytes_by_kind=held,
        phases_ms={"forward": (0.5, 3.0), "backward": (3.0, 6.0)},
        peak_bytes=14 * MIB,
        peak_ms=2.0,
        peak_by_kind=at_peak,
        at_peak=(BIG,),
        largest=(BIG,),
        saved_by_module={"blocks.0.up": 3 * MIB, "blocks.1.up": 5 * MIB, "head": 2 * MIB},
        source="cuda allocator",
        notes=("a note",),
    )
    return replace(made, **changes)


def heights(svg: str, color: str) -> list[float]:
    """The vertical coordinates of one layer's upper edge."""
    path = re.search(rf'fill="{color}" d="([^"]*)"', svg)
    assert path is not None
    return [float(y) for y in re.findall(r"V([\d.]+)", path.group(1))]


def test_the_record_survives_json():
    assert decode(MemoryTimeline, encode(timeline()), "memory") == timeline()


def test_tables_say_who_held_the_peak():
    kinds, at_peak, saved = memory_tables(timeline())
    assert "14.0 MiB in forward, 2.000 ms into the step" in kinds.title
    assert [row[0] for row in kinds.rows] == list(MEMORY_KINDS)
    rows = {row[0]: row[1:] for row in kinds.rows}
    assert rows["activations"] == (10.0, "71.4 %", 10.0, 0.0, 0.0)
    assert sum(row[1] for row in kinds.rows) == 14.0
    assert at_peak.rows[0][:4] == (8.0, "activations", "4 x 512 x 1024", "float32")
    assert [column.name for column in at_peak.columns][4:] == ["module", "line"]  # no op is known
    assert saved.rows == (("blocks.*.up", 2, 8.0, "80.0 %"), ("head", 1, 2.0, "20.0 %"))


def test_fragmentation_is_reported_where_an_allocator_reserves():
    note = memory_tables(timeline(reserved_bytes=24 * MIB, largest_free_block=MIB))[0].note
    assert "24.0 MiB, of which 10.0 MiB free" in note
    assert "largest free block 1.00 MiB (fragmentation 90.0 %)" in note
    assert "a note" in note
    full = timeline(reserved_bytes=14 * MIB, largest_free_block=0)
    assert "fragmentation" not in memory_tables(full)[0].note
    assert "reserved" not in memory_tables(timeline())[0].note


def test_what_is_not_there_has_no_table():
    out = io.StringIO()
    print_memory(timeline(saved_by_module={}, at_peak=()), out)
    assert "activations" in out.getvalue()
    assert "saved for backward" not in out.getvalue()


def test_many_modules_are_summed_up():
    saved = {f"part_{name}": 1024 for name in "abcdefghijklmnop"}
    rows = memory_tables(timeline(saved_by_module=saved))[-1].rows
    assert rows[-1][0] == "the rest" and sum(row[1] for row in rows) == 16


def test_drawing_stacks_the_kinds_up_to_the_peak():
    svg = memory_svg(timeline())
    ElementTree.fromstring(svg)
    floor = 338.0
    weights, top = heights(svg, "#0072b2"), heights(svg, "#cc79a7")
    dot = re.search(r'<circle class="dot" cx="([\d.]+)" cy="([\d.]+)"', svg)
    assert dot is not None
    # The uppermost layer reaches the peak's mark, and the weights lie at 4 of 14 parts of it.
    assert min(top) == float(dot.group(2))
    assert (floor - weights[0]) / (floor - min(top)) == pytest.approx(4 / 14, abs=1e-3)
    assert all(f">{word}<" in svg for word in ("forward", "backward", *MEMORY_KINDS))
    assert "peak 14.0 MiB at 2.000 ms" in svg


def test_drawing_is_light_and_dark_and_needs_nothing_from_outside():
    svg = memory_svg(timeline())
    assert "prefers-color-scheme: dark" in svg
    assert re.findall(r"https?://[^\"]*", svg) == ["http://www.w3.org/2000/svg"]


def test_drawing_escapes_names():
    hostile = timeline(phases_ms={"<script>alert(1)</script>": (0.0, 6.0)}, source='"<b>')
    svg = memory_svg(hostile)
    ElementTree.fromstring(svg)
    assert "<script" not in svg and "<b>" not in svg


@pytest.mark.parametrize("size", [0, 1, 700, 3 * 2**10, 5 * 2**30, 130 * 2**30])
def test_axis_fits_every_size(size):
    held = dict.fromkeys(MEMORY_KINDS, (0, 0, 0)) | {"other": (0, size, 0)}
    at_peak = {kind: values[1] for kind, values in held.items()}
    svg = memory_svg(timeline(bytes_by_kind=held, peak_bytes=size, peak_by_kind=at_peak))
    ElementTree.fromstring(svg)
    ticks = re.findall(r'text-anchor="end">([\d.e+-]+) (?:B|KiB|MiB|GiB)<', svg)
    assert 2 <= len(ticks) <= 8
