from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import steplab
from steplab.meter import step_timer
from tests.meter.fakes import FakeClock, FakeDevice, install_clock, install_gpu, tiny_model


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    return install_clock(monkeypatch)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    return install_gpu(monkeypatch)


# The inspected step.


def test_third_step_is_profiled_and_left_out(clock: FakeClock) -> None:
    meter = steplab.Meter(tiny_model())
    profiled = []
    for wait_ms, step_ms in ((0, 10), (1, 9), (1, 999), (5, 11), (1, 11)):
        clock.advance(wait_ms)
        with meter.step(tokens=1):
            profiled.append(torch._C._autograd._profiler_enabled())
            with meter.phase("forward"):
                clock.advance(step_ms)
    assert profiled == [False, False, True, False, False]
    summary = meter.summary()
    assert summary.step.values == pytest.approx((10, 10, 11, 12))
    assert summary.phases["forward"].values == pytest.approx((10, 9, 11, 11))
    assert summary.data_wait.values == pytest.approx((0, 1, 0, 1))
    assert summary.inspected_step == 3 and set(summary.step.marks) == {"0", "2"}
    assert summary.kernel_launches is None  # a CPU launches no kernels
    assert meter.line().startswith("step 5 ")


def test_a_slow_step_after_the_profiled_one_says_so(clock: FakeClock) -> None:
    meter = steplab.Meter(tiny_model())
    for step_ms in (10, 10, 999, 200, 10, 10, 10, 10):
        with meter.step(tokens=1):
            clock.advance(step_ms)
    assert "200.0 ms (followed the step that was profiled)" in meter.line()


def test_inspected_step_that_fails_is_inspected_again() -> None:
    meter = steplab.Meter(tiny_model(), inspect_step=1)
    with pytest.raises(ValueError), meter.step(tokens=1):
        raise ValueError
    assert not torch._C._autograd._profiler_enabled()
    with meter.step(tokens=1):
        assert torch._C._autograd._profiler_enabled()
    assert not torch._C._autograd._profiler_enabled()
    assert meter.summary().inspected_step == 1 and len(meter.summary().step) == 0


def test_profiler_of_the_user_is_left_alone() -> None:
    meter = steplab.Meter(tiny_model(), inspect_step=1)
    with (
        profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler,
        meter.step(tokens=1),
    ):
        torch.ones(3).sum()
    assert "aten::sum" in {event.key for event in profiler.key_averages()}
    for unknown in ("launches", "MFU"):
        told = f"warning: {unknown} unknown: another profiler was running in step 1"
        assert told in meter.line()
    assert meter.summary().inspected_step is None and len(meter.summary().step) == 1


def test_launches_are_kernels_and_graphs(
    gpu: FakeDevice, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ["aten::mm", "cudaLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch"]
    names += ["cudaLaunchKernel", "cudaMemcpyAsync", "cudaEventRecord", "sm90_gemm"]
    events = [SimpleNamespace(name=lambda name=name: name) for name in names]
    results = SimpleNamespace(kineto_results=SimpleNamespace(events=lambda: events))
    calls: list[str] = []
    fake = SimpleNamespace(
        start=lambda: calls.append("start"), stop=lambda: calls.append("stop"), profiler=results
    )

    def start_profile(on_cuda: bool, **asked: bool) -> SimpleNamespace:
        assert on_cuda and asked == {"record_shapes": True}
        return fake

    monkeypatch.setattr(step_timer, "RawProfile", start_profile)
    monkeypatch.setattr(step_timer, "matmul_dtype", lambda events, device: ("bf16", ""))
    meter = steplab.Meter(tiny_model(), inspect_step=2)
    for _ in range(3):
        launch_step(meter, clock, gpu)
    assert calls == ["start", "stop"]
    assert meter.metrics()["train/kernel_launches_per_step"] == 4
    assert meter.line().endswith("launches 4") and meter.dtype == "bf16"


# CUDA without a GPU: events whose device is a few steps behind the host.


def launch_step(meter: steplab.Meter, clock: FakeClock, gpu: FakeDevice) -> None:
    """Issue a step in 1 ms of host time: 3 ms of forward and 6 ms of backward for the device."""
    with meter.step(tokens=100):
        for name, device_ms in (("forward", 3), ("backward", 6)):
            with meter.phase(name):
                clock.advance(0.5)
                gpu.now_ms += device_ms
        gpu.now_ms += 1


def test_device_times_come_from_events_read_late(gpu: FakeDevice, clock: FakeClock) -> None:
    meter = steplab.Meter(tiny_model(), dtype="fp32", inspect_step=None)
    for _ in range(3):
        launch_step(meter, clock, gpu)
    # The device has finished nothing: the line says so and does not wait.
    assert meter.line().startswith("step 3  unknown")
    gpu.reached_ms = 20
    launch_step(meter, clock, gpu)
    assert meter.metrics()["train/step_time_ms"] == pytest.approx(10)
    assert len(meter._timer.samples) == 2
    summary = meter.summary()
    assert summary.step.values == pytest.approx((10,) * 4)
    assert summary.host.values == pytest.approx((1,) * 4)
    assert summary.phases["backward"].values == pytest.approx((6,) * 4)
    assert summary.host_phases["backward"].values == pytest.approx((0.5,) * 4)
    assert summary.source == "cuda events"
    assert summary.figures.peak_tflops == 66.9


def test_events_are_used_again(gpu: FakeDevice, clock: FakeClock) -> None:
    meter = steplab.Meter(tiny_model(), inspect_step=None)
    for _ in range(50):
        launch_step(meter, clock, gpu)
        gpu.reached_ms = gpu.now_ms - 15  # always between one and two steps behind
    # 5 events per step; three steps wait for the device while a fourth runs; one shared start.
    assert len(gpu.events) <= 4 * 5 + 1
    assert meter.summary().step.values == pytest.approx((10,) * 50)


def test_failed_step_touches_no_event_that_others_need(gpu: FakeDevice, clock: FakeClock) -> None:
    meter = steplab.Meter(tiny_model(), inspect_step=None)
    for _ in range(3):
        launch_step(meter, clock, gpu)
        with pytest.raises(ValueError), meter.step(tokens=1), meter.phase("forward"):
            gpu.now_ms += 100
            raise ValueError
    assert meter.summary().step.values == pytest.approx((10,) * 3)
