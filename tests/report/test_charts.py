"""What is drawn where: timeline, thinning, roofline."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steplab.hardware.catalog import find_card
from steplab.report.charts.plot import LogScale, Scale, area_path, line_path, nice_step
from steplab.report.charts.roofline import kernel_groups, roofline_chart
from steplab.report.charts.timeline import (
    MAX_BOXES,
    Lane,
    Names,
    step_lanes,
    thin,
    timeline_chart,
)
from tests.report.analyses import KERNELS, STEP_NS, Kernel, analysis_of
from tests.report.reading import Page


def test_lanes_of_a_step():
    lanes = {lane.label: lane for lane in step_lanes(analysis_of())}
    host = ["host phases", "host waits", "thread 100/100"]
    assert list(lanes) == [*host, "stream 0/7", "stream 0/9"]
    assert lanes["host waits"].end - lanes["host waits"].start == 400_000
    phases = lanes["host phases"]
    assert [phases.names[code] for code in phases.name] == ["forward", "backward", "optimizer"]
    assert [phases.classes[code] for code in phases.color] == [
        "p-forward", "p-backward", "p-optimizer"
    ]  # fmt: skip
    assert (lanes["stream 0/7"].end - lanes["stream 0/7"].start).tolist() == [
        2_000_000, 1_000_000, 500_000
    ]  # fmt: skip


def test_many_streams_share_the_last_lane():
    kernels = [Kernel(f"k{i}", i * 1000, 1000 + i, stream=i) for i in range(30)]
    lanes = [lane for lane in step_lanes(analysis_of(kernels)) if "stream" in lane.label]
    assert len(lanes) == 11 and lanes[-1].label == "20 other streams"
    assert sum(len(lane.start) for lane in lanes) == 30


def lane_of(starts, durations):
    order = np.argsort(starts, kind="stable")
    start = np.array(starts, dtype=np.int64)[order]
    codes = np.arange(len(starts), dtype=np.int32)
    ends = start + np.array(durations, dtype=np.int64)[order]
    names = tuple(map(str, codes))
    return Lane("x", start, ends, codes, names, np.zeros_like(codes), ("c-other",))


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 999), st.integers(1, 400)), min_size=1, max_size=80),
    st.integers(1, 40),
)
def test_thinning_loses_no_event(events, most):
    lane = lane_of(*zip(*events, strict=True))
    boxes = thin([lane], 1000, most)[0]
    assert sum(box.count for box in boxes) == len(events)
    for start, end in zip(lane.start, lane.end, strict=True):
        assert any(box.start <= start and end <= box.end for box in boxes)
    assert [box.start for box in boxes] == sorted(box.start for box in boxes)
    assert all(box.end - box.start < 800 + 1000 for box in boxes)


def test_a_hundred_thousand_kernels_are_drawn_as_few_boxes():
    source = np.random.default_rng(0)
    lanes = [lane_of(source.integers(0, 10**8, 50_000), np.full(50_000, 900)) for _ in range(2)]
    boxes = thin(lanes, 10**8)
    assert 1000 < sum(map(len, boxes)) <= MAX_BOXES
    few = lane_of([0, 5, 10**7], [5, 10, 10**6])
    assert [box.count for box in thin([few], 10**8)[0]] == [2, 1]


def test_the_longest_event_names_its_box():
    lane = lane_of([0, 2, 10], [2, 8, 1])
    (box,) = thin([lane], 1000, 5)[0]
    assert (box.name, box.count, box.start, box.end) == (1, 3, 0, 11)


def test_rectangles_lie_where_the_kernels_ran():
    names = Names()
    page = Page(timeline_chart(analysis_of(), names))
    boxes = [a for a in page.all("rect") if "c-matmul-bf16" in a["class"]]
    assert [(a["x"], a["width"]) for a in boxes] == [("10.000%", "20.000%")]
    assert names.texts[int(boxes[0]["data-n"])] == "ampere_bf16_s16816gemm"
    assert boxes[0]["data-d"] == "2.000 ms" and STEP_NS == 10**7
    assert [nice_step(x) for x in (0.0, 0.6, 10, 11, 70)] == [1, 0.1, 2, 2, 20]


def test_the_roofline_places_kernels_by_their_work():
    analysis = analysis_of()
    gemm, elementwise = kernel_groups(analysis)
    assert gemm.intensity == pytest.approx(2000) and gemm.speed == pytest.approx(1e14)
    assert elementwise.intensity == pytest.approx(0.1)
    page = Page(roofline_chart(analysis, find_card("NVIDIA H200")))
    assert len(page.all("circle")) == 2
    assert roofline_chart(analysis, None) == "" == roofline_chart(analysis_of(KERNELS[2:]), None)


def test_a_fast_kernel_stands_below_its_roof_line():
    """A kernel at the peak lies on the level line of that peak."""
    card = find_card("NVIDIA H200")
    flops = card.tflops["bf16"] * 1e12 * 1e-3
    peak = Kernel("peak", 0, 1_000_000, flops=flops, bytes=1e6)
    page = Page(roofline_chart(analysis_of((peak,)), card))
    (dot,) = page.all("circle")
    levels = [a["y1"] for a in page.all("line") if a["class"] == "roof" and a["y1"] == a["y2"]]
    assert dot["cy"] in levels


@pytest.mark.parametrize(("low", "high"), [(0.01, 0.02), (1, 1000), (3, 3), (1e-3, 1e6)])
def test_a_logarithmic_scale_has_ticks_inside(low, high):
    scale = LogScale.around([low, high])
    places = [scale.at(tick) for tick in scale.ticks()]
    assert places == sorted(places) and all(0 <= place <= 100 for place in places)
    assert 0 < scale.at(low) <= scale.at(high) < 100


def test_scales_of_whole_powers_begin_and_end_at_one():
    assert LogScale.whole_powers([2.0, 1000.0], 10, 0, 100).powers(10) == [1, 10, 100, 1000]
    assert LogScale.whole_powers([0.9, 1.1], 2, 0, 100).powers(2) == [0.5, 1, 2]
    assert LogScale.whole_powers([10.0], 10, 0, 100).powers(10) == [10, 100]


def test_linear_scales_have_room_and_round_ticks():
    scale = Scale.around([-10.0, 10.0, float("nan")], 0, 100)
    assert (scale.low, scale.high, scale.at(0.0)) == (-11, 11, 50)
    assert scale.ticks() == [-10, -5, 0, 5, 10] and scale.percent(0) == "50.00%"
    assert Scale.around([3.0]).low < 3 < Scale.around([3.0]).high


def test_paths_have_gaps_where_a_point_is_missing():
    nan = float("nan")
    assert line_path([(0, 1), (1, nan), (2, 3), (3, 4)]) == "M0.0 1.0M2.0 3.0L3.0 4.0"
    assert area_path([(0, 1), (1, 1)], [(0, 2), (1, 2)]) == "M0.0 1.0L1.0 1.0L1.0 2.0L0.0 2.0Z"
