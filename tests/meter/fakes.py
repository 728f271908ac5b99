"""A clock and a GPU that do only what a test tells them to."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import steplab
from steplab.meter import meter, step_timer
from steplab.probes import disturbances


class FakeClock:
    """A host clock that moves only when told to."""

    def __init__(self) -> None:
        self.ms = 1000.0

    def __call__(self) -> float:
        return self.ms / 1e3

    def advance(self, ms: float) -> None:
        self.ms += ms


def install_clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    """Replace the Meter's clock with a fake one."""
    fake = FakeClock()
    for module in (meter, step_timer, disturbances):
        monkeypatch.setattr(module, "perf_counter", fake)
    # The machine that runs the tests may be busy.
    monkeypatch.setattr(disturbances.Disturbances, "_core_wait_ms", lambda _: 0.0)
    return fake


def tiny_model() -> nn.Module:
    """One Linear of 512 matmul parameters (16 x 32)."""
    return nn.Linear(16, 32, bias=False)


def run_steps(
    meter: steplab.Meter, clock: FakeClock, *steps: tuple[float, float], tokens: int = 100
) -> None:
    """Run steps given as (milliseconds of waiting before, milliseconds inside)."""
    for wait_ms, step_ms in steps:
        clock.advance(wait_ms)
        with meter.step(tokens=tokens):
            clock.advance(step_ms)


class FakeDevice:
    """A queue: `now_ms` is when the next event will pass, `reached_ms` how far the device is."""

    def __init__(self) -> None:
        self.now_ms = self.reached_ms = 0.0
        self.events: list[FakeEvent] = []


class FakeEvent:
    device: FakeDevice

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing
        self.device.events.append(self)

    def record(self, stream: str) -> None:
        assert stream == "stream of cuda:1"
        self.at_ms = self.device.now_ms

    def query(self) -> bool:
        return self.at_ms <= self.device.reached_ms

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.query() and end.query(), "read before it had passed"
        return end.at_ms - self.at_ms


def install_gpu(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    """Let every model live on a fake cuda:1."""
    FakeEvent.device = FakeDevice()

    def synchronize(device: torch.device) -> None:
        FakeEvent.device.reached_ms = FakeEvent.device.now_ms

    monkeypatch.setattr(step_timer, "device_of", lambda model: torch.device("cuda", 1))
    monkeypatch.setattr(meter, "read_memory", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(disturbances, "allocator_calls", lambda: disturbances.NO_CALLS)
    return FakeEvent.device
