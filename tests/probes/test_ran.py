import types

import pytest
import torch
from torch._C._autograd import DeviceType

from steplab.probes.ran import GRAPH_LAUNCH, covered_ns, optimizer_impl, profiled_step, read_events


def traced(name, on_device=False, annotation=False):
    device = DeviceType.CUDA if on_device else DeviceType.CPU
    return types.SimpleNamespace(
        start_thread_id=lambda: 1,
        start_ns=lambda: 0,
        end_ns=lambda: 0,
        name=lambda: name,
        device_type=lambda: device,
        duration_ns=lambda: 1000,
        is_user_annotation=lambda: annotation,
        dtypes=lambda: ["c10::BFloat16"],
    )


def adam(**choice):
    weight = torch.nn.Parameter(torch.ones(2, 2))
    weight.grad = torch.ones(2, 2)
    return torch.optim.AdamW([weight], **choice)


def test_ops_and_dtypes_are_seen():
    x = torch.randn(4, 4)

    def run():
        x @ x
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x @ x

    ran = profiled_step(run, on_cuda=False)
    assert ran.matmul_dtypes == {"float": 1, "c10::BFloat16": 1}
    assert ran.kernel_launches is None and ran.graph_launches is None


@pytest.mark.filterwarnings("error")
def test_no_python_object_is_made_of_an_event(monkeypatch):
    """Which would take longer than the step."""
    monkeypatch.setattr(
        torch.autograd.profiler.profile, "_parse_kineto_results", lambda *_, **__: pytest.fail()
    )
    x = torch.randn(4, 4)
    assert profiled_step(lambda: x @ x, on_cuda=False).matmul_dtypes == {"float": 1}


def test_kernels_are_neither_copies_nor_annotations():
    events = [
        traced("aten::mm"),
        traced("optimizer", annotation=True),
        traced("optimizer", on_device=True, annotation=True),
        traced("Memcpy HtoD (Pageable -> Device)", on_device=True),
        traced("Memset (Device)", on_device=True),
        traced("ampere_sgemm_128x64_nn", on_device=True),
        traced("ampere_sgemm_128x64_nn", on_device=True),
    ]
    assert read_events(events, on_cuda=True).kernels == {"ampere_sgemm_128x64_nn": 2}


@pytest.mark.skipif(torch.version.hip is not None, reason="ROCm names its calls otherwise")
def test_launches_of_every_kind_are_counted_and_graphs_apart():
    names = ("cudaLaunchKernel", "cudaLaunchKernelExC", "cudaLaunchCooperativeKernel")
    driver = ("cuLaunchKernel", "cuLaunchKernelEx", "cudaMemcpyAsync", "cudaStreamSynchronize")
    events = [traced(name) for name in (*names, *driver, GRAPH_LAUNCH, GRAPH_LAUNCH)]
    ran = read_events(events, on_cuda=True)
    assert (ran.kernel_launches, ran.graph_launches) == (5 + 2, 2)


@pytest.mark.parametrize(
    ("choice", "impl"),
    [({"fused": True}, "fused"), ({"foreach": True}, "foreach"), ({"foreach": False}, "forloop")],
)
def test_the_trace_tells_the_update_also_beside_foreach_clipping(choice, impl):
    optimizer = adam(**choice)

    def run():
        torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0, foreach=True)
        optimizer.step()

    ran = profiled_step(run, on_cuda=False)
    assert ran.optimizer_ops["aten::_foreach_norm"] == 1
    assert ("aten::_fused_adamw_" in ran.optimizer_ops) == (impl == "fused")
    assert optimizer_impl(optimizer, ran.optimizer_ops) == impl


def test_the_trace_outweighs_the_groups():
    optimizer = adam(foreach=False)
    assert optimizer_impl(optimizer, {"aten::_fused_adam_": 1}) == "fused"
    assert optimizer_impl(optimizer, {"aten::_foreach_lerp_": 1}) == "foreach"
    assert optimizer_impl(optimizer, {"aten::_foreach_mul_": 1}) == "forloop"


def test_without_a_traced_update_the_groups_tell():
    assert optimizer_impl(None, {}) == ""
    assert optimizer_impl(adam(), {}) == "forloop"
    assert optimizer_impl(adam(fused=True), {}) == "fused"
    assert optimizer_impl(adam(foreach=True), {}) == "foreach"
    assert optimizer_impl(adam(foreach=False), {}) == "forloop"


def test_fused_ops_of_the_model_are_not_the_optimizers():
    q = torch.randn(1, 1, 4, 8)
    attention = torch.nn.functional.scaled_dot_product_attention
    assert profiled_step(lambda: attention(q, q, q), on_cuda=False).optimizer_ops == {}


def test_busy_time_is_the_union_of_kernels():
    """Kernels on two streams that overlap count once; gaps do not count."""
    assert covered_ns([(0, 10), (5, 12), (20, 30), (21, 25)]) == 22
    assert covered_ns([]) == 0


def test_autocasts_wrapper_is_not_a_second_product():
    x = torch.randn(2, 4, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ran = profiled_step(lambda: torch.bmm(x, x), on_cuda=False)
    assert ran.matmul_dtypes == {"c10::BFloat16": 1}


class TimedEvent:
    """A Kineto event with a name, a time and a device."""

    def __init__(self, name, start, end, device=DeviceType.CPU):
        self._name, self._start, self._end, self._device = name, start, end, device

    def name(self):
        return self._name

    def start_ns(self):
        return self._start

    def end_ns(self):
        return self._end

    def duration_ns(self):
        return self._end - self._start

    def device_type(self):
        return self._device

    def is_user_annotation(self):
        return False

    def start_thread_id(self):
        return 1

    def dtypes(self):
        return []

    def shapes(self):
        return []


def test_communication_is_exposed_where_nothing_else_runs():
    gloo = [TimedEvent("gloo:all_reduce", 0, 10_000_000), TimedEvent("aten::mm", 0, 4_000_000)]
    assert read_events(gloo, on_cuda=False).exposed_communication_ms == 6.0
    kernels = [
        TimedEvent("ncclDevKernel_AllReduce", 5_000_000, 9_000_000, DeviceType.CUDA),
        TimedEvent("sm90_gemm", 0, 6_000_000, DeviceType.CUDA),
        TimedEvent("aten::mm", 6_000_000, 9_000_000),  # launches what runs later
    ]
    assert read_events(kernels, on_cuda=True).exposed_communication_ms == 3.0
    assert read_events(gloo[1:], on_cuda=False).exposed_communication_ms == 0.0
