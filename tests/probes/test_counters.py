"""NVML is faked: the counters must say what it says, and nothing where it says nothing."""

import itertools
import types

import pytest

from steplab.probes import counters as counters_module
from steplab.probes.counters import GPM_METRICS, CountersProbe, NvmlReader, window_note


class NVMLError(Exception):
    pass


def fake_nvml(gpm: bool, refuse: str = ""):
    freed, samples = [], itertools.count()

    def guarded(name, value):
        def call(*args):
            if name == refuse:
                raise NVMLError("not supported")
            return value

        return call

    class Query:
        def __init__(self):
            self.metrics = [types.SimpleNamespace(value=0.0, nvmlReturn=0) for _ in range(8)]

    def metrics_get(query):
        averaged.append((query.sample1, query.sample2))
        for index in range(query.numMetrics):
            query.metrics[index].value = {10: 61.5, 5: 38.0}[query.metrics[index].metricId]
        query.metrics[1].nvmlReturn = 3  # the second one is not supported

    nvml = types.SimpleNamespace(
        NVMLError=NVMLError,
        NVML_CLOCK_SM=1,
        NVML_CLOCK_MEM=2,
        NVML_TEMPERATURE_GPU=0,
        NVML_GPM_METRICS_GET_VERSION=1,
        NVML_GPM_METRIC_DRAM_BW_UTIL=10,
        NVML_GPM_METRIC_ANY_TENSOR_UTIL=5,
        nvmlDeviceGetUtilizationRates=guarded(
            "utilization", types.SimpleNamespace(gpu=99, memory=44)
        ),
        nvmlDeviceGetPowerUsage=guarded("power", 612_000),
        nvmlDeviceGetClockInfo=lambda handle, kind: {1: 1980, 2: 3201}[kind],
        nvmlDeviceGetTemperature=guarded("temperature", 55),
        nvmlGpmQueryDeviceSupport=lambda h: types.SimpleNamespace(isSupportedDevice=gpm),
        nvmlGpmSampleAlloc=lambda: next(samples),
        nvmlGpmSampleGet=lambda handle, sample: sample,
        nvmlGpmSampleFree=freed.append,
        nvmlGpmMetricsGet=metrics_get,
        c_nvmlGpmMetricsGet_t=Query,
    )
    return nvml, freed


averaged: list[tuple[int, int]] = []  # the samples between which a metric was asked for


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
    for name in [*GPM_METRICS.values(), "nvmlGpmMetricsGet", "c_nvmlGpmMetricsGet_t"]:
        assert hasattr(pynvml, name)


@pytest.mark.gpu
def test_real_counters(tiny_spec):
    pytest.importorskip("pynvml")
    from steplab.step.trial import trial

    counters = trial(tiny_spec(device="cuda", steps=20)).counters
    assert counters.power_w.median > 10 and counters.sm_clock_mhz.median > 100
