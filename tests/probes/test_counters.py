"""NVML is faked: the counters must say what it says, and nothing where it says nothing."""

import itertools
import types
from dataclasses import replace

import pytest

from steplab.core import Counters, Samples
from steplab.probes import counters as counters_module
from steplab.probes.clock import ClockProbe
from steplab.probes.counters import (
    GPM_METRICS,
    CountersProbe,
    NvmlReader,
    clock_notes,
    held_back,
    window_note,
)
from steplab.probes.probe import Subject
from steplab.step.loop import measure
from tests.probes.fake_nvml import averaged, fake_nvml

NVML_NAMES = (
    "nvmlGpmMetricsGet",
    "c_nvmlGpmMetricsGet_t",
    "nvmlDeviceGetCurrentClocksEventReasons",
    "nvmlDeviceGetMaxClockInfo",
)


def test_readings_with_gpm():
    nvml, freed = fake_nvml(gpm=True)
    reader = NvmlReader(nvml, "handle")
    reading = reader.read()
    assert reading["sm_util_pct"] == 99 and reading["mem_ctrl_util_pct"] == 44
    assert reading["power_w"] == 612 and reading["sm_clock_mhz"] == 1980
    assert reading["hbm_util_pct"] == 61.5
    assert "tensor_util_pct" not in reading
    assert len(freed) == 1 and reader.source == "NVML with GPM"


def test_the_first_gpm_reading_begins_with_the_window(monkeypatch):
    """Sample 0 is taken when the reader opens, before the model is built and compiled."""
    nvml, freed = fake_nvml(gpm=True)
    monkeypatch.setattr(NvmlReader, "open", lambda: NvmlReader(nvml, "handle"))
    monkeypatch.setattr(counters_module, "READINGS_PER_SECOND", 0.01)
    averaged.clear()
    probe, subject = CountersProbe(), types.SimpleNamespace(on_cuda=True)
    probe.begin(subject)
    probe.open_window(subject)
    probe.close_window(subject)
    assert averaged == [(1, 2)] and freed == [0, 1]
    assert probe.result().hbm_util_pct.values == (61.5,)
    assert "up to 1 s" in probe.result().note
    assert probe.result().held_back == {"its power limit": 1.0}
    assert probe.result().sm_clock_max_mhz == 1980


def test_reasons_are_shares_of_the_readings():
    assert held_back([0x4, 0x1, 0x44, 0x0]) == {"its power limit": 0.5, "heat": 0.25}
    assert held_back([0x1, 0x2]) == {} == held_back([])


def test_a_driver_that_gives_no_reasons_holds_nothing_back():
    nvml = fake_nvml(gpm=False, refuse="reasons")[0]
    assert NvmlReader(nvml, "handle").clock_reasons() is None
    nvml = fake_nvml(gpm=False, refuse="max clock")[0]
    assert NvmlReader(nvml, "handle").sm_clock_max_mhz() is None


def test_an_older_pynvml_without_a_function_gives_nothing():
    nvml = fake_nvml(gpm=False)[0]
    del nvml.nvmlDeviceGetCurrentClocksEventReasons, nvml.NVML_CLOCK_SM
    reader = NvmlReader(nvml, "handle")
    assert reader.clock_reasons() is None and reader.sm_clock_max_mhz() is None
    assert "sm_clock_mhz" not in reader.read() and reader.read()["power_w"] == 612


def test_clocks_that_were_not_recorded_are_told_with_what_is_missing(monkeypatch):
    for found, why in ((None, "pip install 'steplab[gpu]'"), ("a spec", "NVML does not open")):
        monkeypatch.setattr("importlib.util.find_spec", lambda name, found=found: found)
        (note,) = clock_notes(None, on_cuda=True)
        assert note.startswith(f"clocks were not recorded: {why}")
    assert clock_notes(None, on_cuda=False) == [] == clock_notes(Counters(), on_cuda=True)


def test_a_step_that_raises_leaves_no_thread_that_reads(monkeypatch, tiny_spec):
    nvml = fake_nvml(gpm=False)[0]
    monkeypatch.setattr(CountersProbe, "reader", NvmlReader(nvml, "handle"))
    probe = CountersProbe()

    def fail(batch):
        raise ZeroDivisionError

    fail.watch = None
    subject = Subject(fail, itertools.repeat(None), tiny_spec(), None)
    with pytest.raises(ZeroDivisionError):
        measure(subject, 1, ClockProbe(), [probe], lambda text: None)
    assert not probe.thread.is_alive()


def test_a_clock_counts_as_held_back_with_a_reason_and_below_97_percent():
    counters = Counters(
        power_w=Samples((695.0,), "W"),
        sm_clock_mhz=Samples((1400.0, 1500.0, 1440.0), "MHz"),
        sm_clock_max_mhz=1980.0,
        held_back={"its power limit": 0.9, "heat": 0.1},
    )
    text = "the card ran at 1440 of 1980 MHz at 695 W, held back by its power limit"
    assert counters.held_clock == text
    assert counters.clock_share == pytest.approx(1440 / 1980)
    free = replace(counters, sm_clock_mhz=Samples((1950.0,), "MHz"))
    idle = replace(counters, held_back={"its power limit": 0.2})
    for other in (free, idle, Counters()):
        assert other.held_clock == "" and other.clock_share == 1


def test_a_window_of_a_second_needs_no_note():
    assert window_note(1.0) == "" and "0.30 s" in window_note(0.3)


def test_hbm_is_unknown_without_gpm_and_never_the_memory_controller():
    reading = NvmlReader(fake_nvml(gpm=False)[0], "handle").read()
    assert reading["mem_ctrl_util_pct"] == 44 and "hbm_util_pct" not in reading


@pytest.mark.parametrize(
    ("refuse", "missing"), [("power", "power_w"), ("utilization", "sm_util_pct")]
)
def test_a_refused_counter_is_left_out(refuse, missing):
    reading = NvmlReader(fake_nvml(gpm=False, refuse=refuse)[0], "handle").read()
    assert missing not in reading and "sm_clock_mhz" in reading


def test_the_names_exist_in_the_real_library():
    pynvml = pytest.importorskip("pynvml")
    for name in [*GPM_METRICS.values(), *NVML_NAMES]:
        assert hasattr(pynvml, name)


@pytest.mark.gpu
def test_real_counters(tiny_spec):
    pytest.importorskip("pynvml")
    from steplab.step.trial import trial

    counters = trial(tiny_spec(device="cuda", steps=20)).counters
    assert counters.power_w.median > 10 and counters.sm_clock_mhz.median > 100
    assert counters.sm_clock_max_mhz >= counters.sm_clock_mhz.median
