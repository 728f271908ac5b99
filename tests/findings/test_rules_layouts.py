"""Rules about images that change their order, expanded rows, wide windows, stacks and queues."""

from dataclasses import replace

import pytest

from steplab.core import Allocation
from steplab.findings import Case, is_note
from steplab.findings.rules import (
    broadcast_blowup,
    bulky_activations,
    copies,
    kept_memory,
    wide_pooling,
)
from steplab.trace.analyze import analyze
from tests.findings.steps import BF16, FP32, RecordedOp, cpu_case, gpu_case, mm, tensors
from tests.findings.test_rules_measurement import GIB, remembered
from tests.trace.traces import call, copy, kernel, op, python, range_, trace_of

IMAGE = [8, 16, 32, 32]
FIRST, LAST = [16_384, 1_024, 32, 1], [16_384, 1, 512, 16]


def ordered(name: str, us: int, *strides: list[int], **changes) -> RecordedOp:
    """An operator on images in these orders."""
    args = tensors(*[IMAGE] * len(strides), dtype=BF16, strides=list(strides))
    return RecordedOp(name, us, args=args, **changes)


def block(asked: str = "aten::contiguous", back: str = "aten::cudnn_convolution") -> list:
    return [
        ordered("aten::copy_", 60, FIRST, LAST, inside=asked, line="net.py(7): forward"),
        ordered("aten::copy_", 40, LAST, FIRST, inside=back, line="net.py(5): forward"),
        ordered("aten::add_", 80, FIRST, LAST, phase="backward", line="net.py(5): forward"),
        mm(9, 9, 9, 820),
    ]


def turned(case: Case):
    found = [one for one in copies.RULE(case) if "channels-last" in one.claim]
    return found[0] if found else None


@pytest.mark.parametrize("asked", ["aten::contiguous", "aten::reshape", "aten::flatten"])
def test_images_that_change_their_order_back_and_forth(asked):
    case = gpu_case(block(asked))
    found = turned(case)
    assert found.gain_ms == pytest.approx(0.06 + 0.04 + 0.75 * 0.08, rel=0.02)  # with a launch
    assert found.stake_ms == pytest.approx(0.18) and not is_note(found, case)
    assert "net.py:7 (forward)" in found.evidence[1] and "contiguous()" in found.remedy
    assert "8x16x32x32" in found.evidence[0]


def test_one_change_of_order_is_no_way_back_and_forth():
    first, _, mixed, product = block()
    assert turned(gpu_case([first, mixed, product])) is None  # flattened for a linear layer
    back = replace(block()[1], phase="backward")
    assert turned(gpu_case([first, back, mixed, product])) is None  # its gradient
    inside = replace(first, inside="aten::grid_sampler")  # no code asks for it
    assert turned(gpu_case([inside, *block()[1:]])) is None


def test_copies_of_transposed_heads_are_no_change_of_order_of_images():
    heads, dense = [16_384, 32, 512, 1], [16_384, 1_024, 32, 1]
    done = [
        ordered("aten::copy_", 60, dense, heads, inside="aten::contiguous"),
        ordered("aten::copy_", 60, heads, dense, inside="aten::reshape"),
        mm(9, 9, 9, 880),
    ]
    assert turned(gpu_case(done)) is None


ROWS, SHARED = [8, 64, 16], [8, 64, 112]


def joined(dim: int = -1, maker: str = "aten::expand") -> Case:
    """Features of 8 clouds are expanded to 64 points and joined to theirs, then multiplied."""
    whole = 128 if dim == -1 else 16
    parts = [ROWS, SHARED] if dim == -1 else [ROWS, ROWS]
    lists = {
        "shapes": [parts, []],
        "dtypes": ["TensorList", "Scalar"],
        "values": ["", str(dim)],
    }
    points = 64 if dim == -1 else 128
    gradient = {
        "shapes": [parts[1], [], []],
        "strides": [[points * whole, whole, 1], [], []],
        "dtypes": [FP32, "ScalarList", "Scalar"],
        "values": ["", "[1]" if dim == -1 else "[0]", "True"],
    }
    product = {"shapes": [[8 * points, whole], [whole, 32]], "dtypes": [FP32, FP32]}
    us = 1000
    events = [
        range_("forward", 0, 700 * us),
        python("net.py(4): forward", 0, 300 * us),
        op(maker, 0, 10 * us, sequence=1),
        op("aten::cat", 10 * us, 290 * us, sequence=2, **lists),
        op("aten::mm", 300 * us, 400 * us, sequence=3, **product),
        range_("backward", 700 * us, 300 * us),
        op("autograd::engine::evaluate_function: Back", 700 * us, 50 * us, sequence=1,
           forward_thread=1),
        op("aten::sum", 705 * us, 40 * us, **gradient),
        op("aten::other", 760 * us, 240 * us),
        range_("ProfilerStep#1", 0, 1000 * us),
    ]  # fmt: skip
    return Case(None, analyze(trace_of(events)))


def test_expanded_rows_that_are_joined_to_others():
    found = [one for one in copies.RULE(joined()) if "expanded" in one.claim]
    assert len(found) == 1 and "64 times" in found[0].claim
    # The 10 us of the expanding view lead to the copy.
    assert found[0].gain_ms == pytest.approx(0.3 + 112 / 128 * (1 - 1 / 64) * 0.4)
    # A token in front of every sequence; a bias, whose gradient is such a sum as well.
    for innocent in (joined(dim=1), joined(maker="aten::add")):
        assert not [one for one in copies.RULE(innocent) if "expanded" in one.claim]


def pooled(window: list[int], stride: list[int], name: str, us: int = 400) -> Case:
    values = ["", str(window), str(stride), "[0, 0]", "[1, 1]", "False"]
    args = {**tensors([16, 1, 512, 512]), "values": values}
    pool = RecordedOp(name, us, args=args, line="net.py(50): widen")
    return gpu_case([pool, mm(9, 9, 9, 600)])


@pytest.mark.parametrize(
    ("window", "stride", "found"),
    [
        ([63, 63], [1, 1], True),
        ([9], [1], True),
        ([31, 31], [2, 2], True),
        ([3, 3], [1, 1], False),
        ([5, 5], [1, 1], False),
        ([1, 63], [1, 1], False),  # along one dimension already
        ([32, 32], [32, 32], False),  # windows that do not overlap
        ([32, 32], [], False),  # the same by default
    ],
)
@pytest.mark.parametrize("name", ["aten::max_pool2d_with_indices", "aten::avg_pool2d"])
def test_pools_over_wide_windows(window, stride, found, name):
    said = wide_pooling.RULE(pooled(window, stride, name))
    assert (said is not None) == found
    if said is not None:
        assert "net.py:50 (widen)" in said.evidence[1] and 0.2 < said.gain_ms < said.stake_ms
    assert wide_pooling.RULE(pooled(window, stride, name, us=10)) is None


def test_what_pools_along_each_dimension_are_expected_to_leave():
    said = wide_pooling.RULE(pooled([63, 63], [1, 1], "aten::max_pool2d_with_indices"))
    assert said.gain_ms == pytest.approx(0.4 * (1 - 1.7 * 126 / 3969), rel=0.01)


@pytest.mark.parametrize(("reduction", "found"), [("aten::sum", True), ("aten::max", False)])
def test_the_largest_of_a_broadcast_needs_every_value(reduction, found):
    """The best overlap of two sets of boxes: no product has it."""
    line = {"line": "net.py(60): match"}
    done = [
        RecordedOp("aten::maximum", 300, args=tensors([2048, 1], [1, 1024]), **line),
        RecordedOp(reduction, 200, args=tensors([2048, 1024]), **line),
        mm(9, 9, 9, 500, FP32),
    ]
    assert (broadcast_blowup.RULE(cpu_case(done)) is not None) == found


def test_the_largest_of_windows_is_a_pooling():
    values = ["", "[5, 5]", "[1, 1]", "[0, 0]", "[1, 1]"]
    windows = {**tensors([8, 16, 64, 64]), "values": values}
    done = [
        RecordedOp("aten::im2col", 300, args=windows),
        RecordedOp("aten::amax", 200, args=tensors([8, 16 * 25, 64 * 64])),
        mm(9, 9, 9, 500, FP32),
    ]
    assert broadcast_blowup.RULE(cpu_case(done)) is not None


def stacked(dim: str = "[0]", parts: int = 16, **memory) -> Case:
    """The states of all layers are stacked, multiplied by weights and summed up."""
    line = {"line": "net.py(45): average"}
    lists = {
        "shapes": [[[8, 4]] * parts, []],
        "dtypes": ["TensorList", "Scalar"],
        "values": ["", "0"],
    }
    total = {
        "shapes": [[parts, 8, 4], []],
        "dtypes": [FP32, "ScalarList"],
        "values": ["", dim],
    }
    done = [
        RecordedOp("aten::cat", 100, inside="aten::stack", outer=lists, **line),
        RecordedOp("aten::sum", 100, args=total, **line),
        mm(9, 9, 9, 800, FP32),
    ]
    size = parts * 8 * 4 * 4
    whole = Allocation(size, "activations", (parts, 8, 4), "float32", "net.py:45 (average)")
    product = replace(whole, kind="temporaries", shape=None, dtype="")
    changed = {
        "at_peak": (whole, product),
        "peak_bytes": 5 * size,
        "bytes_by_kind": {"temporaries": (size, 3 * size, 3 * size, 4 * size, 5 * size, size)},
        "peak_by_kind": {},
        **memory,
    }
    return replace(remembered(**changed), analysis=cpu_case(done).analysis)


def test_tensors_that_are_stacked_to_be_summed_up():
    size = 16 * 8 * 4 * 4
    (found,) = bulky_activations.RULE(stacked())
    assert found.stake_bytes == 2 * size and "16 tensors" in found.claim
    assert "net.py:45 (average)" in found.evidence[1] and "running sum" in found.remedy
    # What was held before they came stays.
    before = {"temporaries": (size, 4 * size, 3 * size, 4 * size, 5 * size, size)}
    (less,) = bulky_activations.RULE(stacked(bytes_by_kind=before))
    assert less.stake_bytes == size


def test_stacks_that_stay_whole_or_are_not_at_the_peak():
    assert bulky_activations.RULE(stacked(dim="[1]")) == ()  # of each of them
    assert bulky_activations.RULE(stacked(parts=3)) == ()
    assert bulky_activations.RULE(stacked(at_peak=())) == ()


def prefetched(depth: int, copied: str = "Memcpy HtoD (Pinned -> Device)", **memory) -> Case:
    """Every step copies a batch to the device, for a later one."""
    us = 1000
    events = [
        python("loop.py(9): load", 0, 20 * us),
        op("aten::copy_", 0, 10 * us),
        call("cudaMemcpyAsync", us, us, 1),
        copy(copied, 3 * us, 100 * us, 1),
        op("aten::mm", 20 * us, 10 * us),
        call("cudaLaunchKernel", 21 * us, us, 2),
        kernel("nvjet", 103 * us, 897 * us, 2),
        range_("ProfilerStep#1", 0, 1000 * us),
    ]
    waits = Allocation(GIB, "other")
    fresh = replace(waits, line="loop.py:9 (load)")
    changed = {
        "at_peak": (*[waits] * (depth - 1), fresh),
        "peak_bytes": 20 * GIB,
        "peak_by_kind": {},
        "kept": (fresh,),
        "kept_bytes": GIB,
        "kept_state_bytes": GIB,
        "kept_by": ("queue, written at loop.py:5 (__init__)",),
        **memory,
    }
    return replace(remembered(**changed), analysis=analyze(trace_of(events)))


def test_batches_that_wait_on_the_device():
    found = kept_memory.RULE(prefetched(16))
    assert found.stake_bytes == 13 * GIB and "16 batches" in found.claim
    assert "loop.py:9 (load)" in found.evidence[0] and "queue" in found.evidence[1]


def test_two_batches_ahead_or_a_state_of_the_size_of_weights_are_no_queue():
    assert kept_memory.RULE(prefetched(3)) is None
    assert kept_memory.RULE(prefetched(16, "Memcpy DtoD (Device -> Device)")) is None
    assert kept_memory.RULE(prefetched(16, peak_bytes=200 * GIB)) is None
