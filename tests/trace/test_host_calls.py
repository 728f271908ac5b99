"""Calls of the host: launches of device work, and waits for it."""

import numpy as np

from steplab.trace.analysis import Labels
from steplab.trace.attribution import Attribution
from steplab.trace.host_calls import find_launches, find_syncs
from steplab.trace.windows import step_windows
from tests.trace.traces import AUTOGRAD, call, copy, kernel, launched, op, python, range_, trace_of


def test_a_kernel_finds_the_call_that_launched_it():
    events = [
        *launched("late", 100, 120, 5_000, correlation=8),
        *launched("early", 200, 230, 300, correlation=9),
        call("cudaLaunchKernel", 50, 5, 10, AUTOGRAD),
        kernel("other thread", 400, 10, 10),
    ]
    trace = trace_of(events)
    found = find_launches(trace)
    names = [trace.text(code) for code in trace.device.name]
    assert dict(zip(names, found.called.tolist(), strict=True)) == {
        "late": 100,
        "early": 200,
        "other thread": 50,
    }
    assert dict(zip(names, found.returned.tolist(), strict=True))["late"] == 120
    threads = [trace.threads[thread] for thread in found.thread]
    assert dict(zip(names, threads, strict=True))["other thread"] == f"100/{AUTOGRAD}"


def test_all_kernels_of_a_graph_have_its_launch():
    events = [call("cudaGraphLaunch", 100, 50, 3)]
    events += [kernel(f"k{i}", 200 + 10 * i, 8, 3, graph=1) for i in range(5)]
    found = find_launches(trace_of(events))
    assert found.called.tolist() == [100] * 5 and found.returned.tolist() == [150] * 5


def test_without_a_call_nothing_is_known():
    for others in ([], [op("aten::mm", 0, 5)], [call("cudaLaunchKernel", 0, 5, 4)]):
        found = find_launches(trace_of([kernel("k", 10, 5, 7), kernel("zero", 20, 5), *others]))
        for column in (found.call, found.thread, found.called, found.returned):
            assert column.tolist() == [-1, -1]


def syncs(events):
    trace, labels = trace_of([range_("ProfilerStep#2", 0, 10_000), *events]), Labels()
    found = find_syncs(trace, step_windows(trace), Attribution(trace, labels), labels)
    return found, np.array(labels.texts())


def test_a_wait_is_named_with_operator_line_and_step():
    events = [
        python("train.py(8): log", 90, 400),
        op("aten::item", 100, 300),
        call("cudaStreamSynchronize", 120, 200),
        call("cudaLaunchKernel", 330, 10, 5),
        call("cudaEventRecord", 350, 10),
        call("cudaDeviceSynchronize", 20_000, 10),
    ]
    found, text = syncs(events)
    assert text[found.call].tolist() == ["cudaStreamSynchronize", "cudaDeviceSynchronize"]
    assert text[found.op].tolist() == ["aten::item", "unattributed"]
    assert text[found.line].tolist() == ["train.py:8 (log)", "unattributed"]
    assert found.step.tolist() == [2, -1] and found.duration.tolist() == [200, 10]


def test_copies_that_block_are_waits():
    events = [
        call("cudaMemcpyAsync", 0, 500, 1),
        copy("Memcpy DtoH (Device -> Pageable)", 400, 50, 1),
        call("cudaMemcpyAsync", 600, 50, 2),
        copy("Memcpy HtoD (Pageable -> Device)", 700, 50, 2),  # staged: the call came back first
        call("cudaMemcpyAsync", 800, 100, 3),
        copy("Memcpy DtoH (Device -> Pinned)", 820, 10, 3),
        call("cudaMemcpy", 1_000, 100, 4),
        copy("Memcpy DtoH (Device -> Pinned)", 1_050, 10, 4),
    ]
    found, text = syncs(events)
    assert found.start.tolist() == [0, 1_000]
    assert text[found.call].tolist() == ["cudaMemcpyAsync", "cudaMemcpy"]


def test_idleness_is_what_an_earlier_launch_would_have_saved():
    events = [
        *launched("first", 0, 10, 100, 900, 1),  # busy until 1000
        call("cudaStreamSynchronize", 200, 850),  # returns at 1050
        *launched("second", 1_300, 1_320, 1_400, 100, 2),  # 400 idle
        call("cudaStreamSynchronize", 1_350, 30),  # the next work was launched already
        *launched("third", 1_450, 1_460, 1_500, 500, 3),
        call("cudaStreamSynchronize", 2_500, 7),  # nothing ran: only its own time is lost
        *launched("fourth", 4_000, 4_010, 4_100, 100, 4),
    ]
    assert syncs(events)[0].idle.tolist() == [400, 0, 7]


def test_waits_before_one_launch_share_its_delay():
    events = [
        *launched("first", 0, 10, 100, 900, 1),
        call("cudaMemcpyAsync", 200, 900, 2),
        copy("Memcpy DtoH (Device -> Pageable)", 1_000, 50, 2),
        call("cudaStreamSynchronize", 1_110, 100),
        *launched("second", 2_300, 2_320, 2_400, 100, 3),
    ]
    assert syncs(events)[0].idle.tolist() == [900, 100]  # of 1350 idle


def test_a_busy_device_is_not_idle_after_a_wait():
    events = [
        kernel("other stream", 0, 5_000, 9, stream=8),
        call("cudaEventSynchronize", 100, 400),
        *launched("next", 600, 610, 6_000, 100, 2),
    ]
    assert syncs(events)[0].idle.tolist() == [0]


def test_a_trace_without_calls_has_no_waits():
    found, _ = syncs([op("aten::mm", 0, 10)])
    assert len(found.start) == 0 and len(found.idle) == 0
