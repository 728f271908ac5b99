from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import steplab
from steplab.meter import meter as meter_module
from steplab.meter.step_timer import Inspected
from tests.meter.fakes import FakeClock, install_clock, run_steps, tiny_model


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    return install_clock(monkeypatch)


# MFU, against numbers worked out by hand.


def test_mfu_is_six_flops_per_weight_over_the_peak(clock: FakeClock) -> None:
    # 6 x 512 x 100 tokens = 307,200 FLOPs in 10 ms = 30.72 MFLOP/s; the peak is 100 MFLOP/s.
    meter = steplab.Meter(tiny_model(), peak_tflops=1e-4, dtype="fp32", inspect_step=None)
    run_steps(meter, clock, (0, 10), (2, 8))
    metrics = meter.metrics()
    assert metrics["train/mfu"] == pytest.approx(0.3072)
    assert metrics["train/tflops"] == pytest.approx(30.72e-6)
    assert "train/mfu_palm" not in metrics
    assert meter.formula == "6 x 512 matmul parameters per token; attention not counted"


def test_given_flops_replace_the_formula(clock: FakeClock) -> None:
    meter = steplab.Meter(
        tiny_model(), flops_per_token=1e9, peak_tflops=20, dtype="bf16", inspect_step=None
    )
    run_steps(meter, clock, (0, 10))
    assert meter.metrics()["train/mfu"] == pytest.approx(100 * 1e9 / 10e-3 / 20e12)
    assert meter.formula == "1e+09 FLOPs per token, given by the user"


def test_line_reads_as_promised(clock: FakeClock, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "NVIDIA H200"
    monkeypatch.setattr(meter_module, "device_name", lambda device: name)
    memory = SimpleNamespace(peak=int(53.8 * 2**30))
    monkeypatch.setattr(meter_module, "read_memory", lambda device: memory)
    meter = steplab.Meter(tiny_model(), flops_per_token=2e9, dtype="bf16", inspect_step=None)
    meter._timer.inspected = Inspected(launches=1714)
    run_steps(meter, clock, (0, 412.3), (4.123, 408.177), tokens=65_536)
    # 65,536 tokens x 2 GFLOP / 412.3 ms / 989.4 TFLOP/s = 32.1 %; 4.123 of 824.6 ms waited.
    assert meter.line() == (
        "step 2  412.3 ms  158,952 tok/s  MFU 32.1 %  data 0.5 %  peak 53.8 GiB  launches 1,714"
    )


def test_sparse_peak_is_halved_and_said_once(
    clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meter_module, "device_name", lambda device: "NVIDIA H200")
    asked: dict[str, Any] = {"flops_per_token": 1e9, "dtype": "bf16", "inspect_step": None}
    meter = steplab.Meter(tiny_model(), peak_tflops=1979, **asked)
    plain = steplab.Meter(tiny_model(), **asked)
    for one in (meter, plain):
        run_steps(one, clock, (0, 1))
    first = meter.line()
    assert "1979 TFLOP/s is the sparse bf16 peak" in first and "989.4 is used" in first
    assert meter.metrics()["train/mfu"] == pytest.approx(plain.metrics()["train/mfu"])
    run_steps(meter, clock, (0, 1))
    assert "warning" not in meter.line()
    assert len(meter.summary().notes) == 1


def test_more_than_the_peak_is_marked_in_every_line(clock: FakeClock) -> None:
    meter = steplab.Meter(
        tiny_model(), flops_per_token=1e9, peak_tflops=1, dtype="fp32", inspect_step=None
    )
    run_steps(meter, clock, (0, 10))
    assert "MFU 1000.0 % (not possible)" in meter.line()
    assert "measurement error" in meter.line()
    run_steps(meter, clock, (0, 20))
    assert "MFU 500.0 % (not possible)" in meter.line()
    assert "measurement error" not in meter.line()


def test_unknown_device_has_no_mfu(clock: FakeClock) -> None:
    meter = steplab.Meter(tiny_model(), dtype="fp32", inspect_step=None)
    run_steps(meter, clock, (0, 10))
    assert "MFU unknown" in meter.line() and "launches unknown" in meter.line()
    metrics = meter.metrics()
    assert "train/mfu" not in metrics and "train/kernel_launches_per_step" not in metrics
    assert metrics["train/tflops"] > 0


def test_before_any_step_everything_is_unknown() -> None:
    line = steplab.Meter(tiny_model()).line()
    assert line.startswith("step 0  unknown  unknown tok/s  MFU unknown  data unknown")


def test_steps_too_short_for_the_clock_stop_nothing(clock: FakeClock) -> None:
    meter = steplab.Meter(tiny_model(), peak_tflops=1, inspect_step=None)
    run_steps(meter, clock, (0, 0), (0, 0), (0, 5))
    assert "unknown tok/s" in meter.line()
    assert meter.summary().tokens_per_second is None
