"""Ranges are told with true times, and torch's table counts no device time that was none."""

import re

import pytest
import torch
from torch.autograd import DeviceType
from torch.autograd.profiler_util import EventList, FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from steplab.profiling.trace_file import Averages

HOST, BACKWARD_THREAD, STREAM = 1, 2, 7


def event(name, start, end, number=0, thread=HOST, **more):
    options = {"input_shapes": [], "stack": [], "use_device": "cuda", **more}
    return FunctionEvent(number, name, thread, start, end, **options)


def named(name, start, end, **more):
    return event(name, start, end, is_user_annotation=True, **more)


def kernel(name, start, end, number, **more):
    more |= {"device_type": DeviceType.CUDA, "thread": STREAM}
    return event(name, start, end, number, **more)


def one_cycle(first):
    """Two kernels, 10 us of the forward and 30 us that another thread launches in the backward.

    `first` is the number of the first launch; operators have numbers of their own, which may be
    the same.
    """
    product = event("aten::mm", 10, 20, number=first + 1)
    product.append_kernel("gemm", 0, 10)
    gradient = event("MmBackward0", 60, 80, number=first, thread=BACKWARD_THREAD)
    gradient.append_kernel("gemm_t", 0, 30)
    made = [
        named("ProfilerStep*", 0, 100),
        named("FORWARD", 5, 50),
        product,
        event("cudaLaunchKernel", 12, 14, first),
        named("BACKWARD", 50, 90),
        gradient,
        event("cuLaunchKernelEx", 62, 64, first + 1, thread=BACKWARD_THREAD),
        event("cudaDeviceSynchronize", 90, 99, first + 2),
        kernel("gemm", 40, 50, first),
        kernel("gemm_t", 70, 100, first + 1),
        kernel("ProfilerStep*", 40, 1000, 1, is_user_annotation=True),
        kernel("FORWARD", 40, 500, 2, is_user_annotation=True),
    ]
    made.sort(key=lambda one: (one.time_range.start, -one.time_range.end))
    return made


def events_of(*cycles):
    """Put cycles together as the profiler does: a tree of each, one behind the other."""
    together = EventList(use_device="cuda")
    for cycle in cycles:
        tree = EventList(cycle, use_device="cuda")
        tree._build_tree()
        together.extend(tree)
    together._tree_built = True
    return together


def ranges(text):
    """Return the numbers of every range."""
    lines = text.split("\n---", 1)[0].split("\n\n")[1].splitlines()[1:]
    return {line.split()[0]: [float(word) for word in line.split()[1:]] for line in lines}


def test_a_kernel_belongs_to_the_ranges_that_were_open_at_its_launch():
    text = Averages(events_of(one_cycle(1))).text("self_device_time_total", 60)
    assert ranges(text) == {
        "ProfilerStep*": [0.1, 0.04, 1],
        "FORWARD": [0.045, 0.01, 1],
        "BACKWARD": [0.04, 0.03, 1],
    }


def test_cycles_whose_clocks_overlap_are_kept_apart():
    found = Averages(events_of(one_cycle(101), one_cycle(1), one_cycle(51))).ranges
    assert {name: (one.device_us, one.calls) for name, one in found.items()} == {
        "ProfilerStep*": (120, 3),
        "FORWARD": (30, 3),
        "BACKWARD": (90, 3),
    }


def test_all_kernels_of_a_graph_belong_to_its_one_launch():
    kernels = [kernel(f"k{i}", 30 + i, 31 + i, number=9) for i in range(5)]
    step = [named("step", 0, 20), event("cudaGraphLaunch", 10, 12, 9)]
    assert Averages(events_of([*step, *kernels])).ranges["step"].device_us == 5


def test_the_table_counts_each_kernel_once_per_kind():
    events = events_of(one_cycle(1))
    plain = events.key_averages().table(sort_by="self_device_time_total", row_limit=60)
    assert "2400.00%" in plain, "torch counts the copy of the step, 960 us, against 40 us"
    text = Averages(events).text("self_device_time_total", 60)
    table = text[text.index("\n---") + 1 :]
    assert table.splitlines()[:3] == plain.splitlines()[:3], "torch's columns"
    shares = {}
    for line in table.splitlines():
        if len(percents := re.findall(r"([\d.]+)%", line)) == 3:
            shares[line.split()[0]] = float(percents[2])
    on_device = {"gemm_t": 75, "gemm": 25}
    operators = {"MmBackward0": 75, "aten::mm": 25}
    assert {name: share for name, share in shares.items() if share} == on_device | operators
    assert sorted(shares.values(), reverse=True) == list(shares.values()), "torch's order"
    assert "Self CUDA time total: 40.000us" in table


def test_ranges_are_told_when_the_table_has_no_room_for_them():
    text = Averages(events_of(one_cycle(1))).text("self_device_time_total", 1)
    assert list(ranges(text)) == ["ProfilerStep*", "FORWARD", "BACKWARD"]
    assert "aten::mm" not in text


@pytest.mark.parametrize("order", ["self_cpu_time_total", "self_device_time_total"])
def test_a_profile_of_the_cpu_has_host_times_only(order):
    x = torch.ones(8, 8, requires_grad=True)
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=0, warmup=1, active=2, repeat=2),
        acc_events=True,
    ) as profiler:
        for _ in range(6):
            with record_function("FORWARD"):
                loss = (x @ x).sum()
            with record_function("BACKWARD"):
                loss.backward()
            profiler.step()
    text = Averages(profiler.events()).text(order, 100)
    found = ranges(text)
    assert list(found) == ["ProfilerStep*", "FORWARD", "BACKWARD"]
    assert all(calls == 4 and host > 0 for host, calls in found.values())
    assert found["ProfilerStep*"][0] >= found["FORWARD"][0] + found["BACKWARD"][0]
    assert text.endswith(profiler.key_averages().table(sort_by=order, row_limit=100) + "\n")
    assert "device" not in text


@pytest.mark.gpu
def test_gpu_all_work_is_in_the_step_whoever_launched_it():
    """Operators, a backward on its own thread, a graph, a copy: all work is found once."""
    x = torch.ones(512, 512, device="cuda", requires_grad=True)
    y = torch.ones(512, 512, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y.mul_(1.0).add_(0.0)
    with profile(
        activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA],
        schedule=schedule(wait=0, warmup=1, active=1, repeat=2),
        acc_events=True,
    ) as profiler:
        for _ in range(4):
            with record_function("FORWARD"):
                loss = (x @ x).sum()
            with record_function("BACKWARD"):
                loss.backward()
            with record_function("GRAPH"):
                graph.replay()
            with record_function("COPY"):
                y.cpu()
            torch.cuda.synchronize()
            profiler.step()
    averages = Averages(profiler.events())
    found = {name: one.device_us for name, one in averages.ranges.items()}
    kernels = [row for row in averages.operators if row.device_type == DeviceType.CUDA]
    total = sum(row.self_device_time_total for row in kernels)
    assert found["ProfilerStep*"] == pytest.approx(total)
    parts = [found[name] for name in ("FORWARD", "BACKWARD", "GRAPH", "COPY")]
    assert min(parts) > 0 and sum(parts) == pytest.approx(total)
