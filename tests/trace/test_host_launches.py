from steplab.trace.host_calls import find_launches

from .traces import AUTOGRAD, call, kernel, launched, op, trace_of


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
