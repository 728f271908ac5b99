"""A pynvml that says what it is told to."""

import itertools
import types

averaged: list[tuple[int, int]] = []  # the samples between which a metric was asked for


class NVMLError(Exception):
    pass


def fake_nvml(gpm: bool, refuse: str = "", clock: int = 1980):
    """Return the fake and the GPM samples that were freed; `refuse` names what it refuses."""
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
        nvmlDeviceGetClockInfo=lambda handle, kind: {1: clock, 2: 3201}[kind],
        nvmlDeviceGetMaxClockInfo=guarded("max clock", 1980),
        nvmlDeviceGetCurrentClocksEventReasons=guarded("reasons", 0x4 | 0x1),
        nvmlDeviceGetTemperature=guarded("temperature", 55),
        nvmlGpmQueryDeviceSupport=lambda h: types.SimpleNamespace(isSupportedDevice=gpm),
        nvmlGpmSampleAlloc=lambda: next(samples),
        nvmlGpmSampleGet=lambda handle, sample: sample,
        nvmlGpmSampleFree=freed.append,
        nvmlGpmMetricsGet=metrics_get,
        c_nvmlGpmMetricsGet_t=Query,
    )
    return nvml, freed
