"""Device counters through NVML, read by a thread while the steps run.

HBM utilization is measured bandwidth over peak, from the GPM counters (Hopper and newer). Where
these are missing it stays unknown: NVML's "memory utilization" is the share of time in which the
memory controller was busy at all, a different quantity.
"""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, TypeVar

from steplab.core import Counters, Samples
from steplab.probes.probe import Probe, Subject

T = TypeVar("T")
READINGS_PER_SECOND = 10.0
NVML_AVERAGES_S = 1.0  # utilization and power are averages over 1/6 s to 1 s, by device

# Fields of Counters -> names of GPM metrics in pynvml.
GPM_METRICS = {
    "hbm_util_pct": "NVML_GPM_METRIC_DRAM_BW_UTIL",
    "tensor_util_pct": "NVML_GPM_METRIC_ANY_TENSOR_UTIL",
}
# Why a card lowers its clocks -> bits of NVML's clock event reasons. "Idle" and clocks that people
# set are not among them: they hold nothing back that the card could give.
HELD_BACK = {
    "its power limit": 0x4 | 0x80,  # of the card in software, of its supply in hardware
    "heat": 0x20 | 0x40,
    "a slowdown of the hardware": 0x8,
}
UNITS = {"power_w": "W", "sm_clock_mhz": "MHz", "mem_clock_mhz": "MHz", "temperature_c": "C"}


class CountersProbe(Probe):
    """Has no result on machines without NVML."""

    reader: NvmlReader | None = None

    def begin(self, subject: Subject) -> None:
        """Open NVML, if it is there."""
        self.reader = NvmlReader.open() if subject.on_cuda else None

    def open_window(self, subject: Subject) -> None:
        """Restart the averages, then start the reading thread."""
        if self.reader is None:
            return
        self.reader.restart()
        self.start = perf_counter()
        self.readings: list[dict[str, float]] = []
        self.reasons: list[int] = []
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self._read, daemon=True)
        self.thread.start()

    def close_window(self, subject: Subject) -> None:
        """Stop the thread and take one last reading."""
        if self.reader is None:
            return
        self.stop.set()
        self.thread.join()
        self._take_reading()
        self.window_s = perf_counter() - self.start

    def result(self) -> Counters | None:
        """Return the readings by counter."""
        if self.reader is None:
            return None
        names = dict.fromkeys(name for reading in self.readings for name in reading)
        series = {
            name: Samples(tuple(r[name] for r in self.readings if name in r), UNITS.get(name, "%"))
            for name in names
        }
        return Counters(
            **series,
            sm_clock_max_mhz=self.reader.sm_clock_max_mhz(),
            held_back=held_back(self.reasons),
            source=self.reader.source,
            note=window_note(self.window_s),
        )

    def _read(self) -> None:
        while not self.stop.wait(1 / READINGS_PER_SECOND):
            self._take_reading()

    def _take_reading(self) -> None:
        assert self.reader is not None
        self.readings.append(self.reader.read())
        reasons = self.reader.clock_reasons()
        if reasons is not None:
            self.reasons.append(reasons)


def held_back(reasons: Sequence[int]) -> dict[str, float]:
    """Return the share of the readings in which each reason held the clock back; 0 is left out."""
    shares = {
        name: sum(bool(one & bits) for one in reasons) / len(reasons)
        for name, bits in (HELD_BACK.items() if reasons else ())
    }
    return {name: share for name, share in shares.items() if share}


def clock_notes(counters: Counters | None, on_cuda: bool) -> list[str]:
    """Return what a reader of a step's times must know of the card's clocks."""
    if counters is not None:
        notes = [f"counters: {counters.note}"] if counters.note else []
        return [*notes, counters.held_clock] if counters.held_clock else notes
    if not on_cuda:
        return []
    missing = importlib.util.find_spec("pynvml") is None
    why = "pip install 'steplab[gpu]'" if missing else "NVML does not open this device"
    return [f"clocks were not recorded: {why}"]


def window_note(window_s: float) -> str:
    """Say that NVML's averages cover more than a window that is shorter than they are."""
    if window_s >= NVML_AVERAGES_S:
        return ""
    return (
        f"the steps took {window_s:.2f} s; NVML averages utilization and power over up to "
        f"{NVML_AVERAGES_S:g} s, so these also show what ran before"
    )


class NvmlReader:
    """Reads one device; counters that NVML refuses are left out of a reading."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self.nvml = nvml
        self.handle = handle
        self.gpm_before = self._gpm_sample() if self._has_gpm() else None
        self.source = "NVML with GPM" if self.gpm_before is not None else "NVML; no GPM counters"

    @classmethod
    def open(cls) -> NvmlReader | None:
        """Return a reader for torch's current device, or None without NVML."""
        import torch

        opened = open_nvml_device(torch.cuda.current_device())
        return cls(*opened) if opened else None

    def restart(self) -> None:
        """Restart the averages of the GPM counters: the next reading covers what follows."""
        if self.gpm_before is not None:
            self.nvml.nvmlGpmSampleFree(self.gpm_before)
            self.gpm_before = self._gpm_sample()

    def read(self) -> dict[str, float]:
        """Return the counters that are available, by their names in `Counters`."""
        nvml, handle = self.nvml, self.handle
        calls = {
            "sm_util_pct": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
            "mem_ctrl_util_pct": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).memory,
            "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
            "sm_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            "mem_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
            "temperature_c": lambda: nvml.nvmlDeviceGetTemperature(
                handle, nvml.NVML_TEMPERATURE_GPU
            ),
        }
        values = {name: self._ask(call) for name, call in calls.items()}
        known = {name: float(value) for name, value in values.items() if value is not None}
        return known | self._gpm_reading()

    def clock_reasons(self) -> int | None:
        """Return why the clocks are what they are, as NVML's bits; None where it does not say."""
        nvml = self.nvml
        return self._ask(lambda: int(nvml.nvmlDeviceGetCurrentClocksEventReasons(self.handle)))

    def sm_clock_max_mhz(self) -> float | None:
        """Return the highest clock of the multiprocessors; None where NVML does not say."""
        nvml, handle = self.nvml, self.handle
        return self._ask(lambda: float(nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM)))

    def _ask(self, call: Callable[[], T]) -> T | None:
        """Return the answer; None where the device or an older pynvml cannot give it."""
        try:
            return call()
        except (self.nvml.NVMLError, AttributeError):
            return None

    def _has_gpm(self) -> bool:
        try:
            support = self.nvml.nvmlGpmQueryDeviceSupport(self.handle)
            return bool(support.isSupportedDevice)
        except (self.nvml.NVMLError, AttributeError):
            return False

    def _gpm_sample(self) -> Any:
        try:
            sample = self.nvml.nvmlGpmSampleAlloc()
            self.nvml.nvmlGpmSampleGet(self.handle, sample)
            return sample
        except self.nvml.NVMLError:
            return None

    def _gpm_reading(self) -> dict[str, float]:
        """Return GPM metrics averaged since the last reading."""
        if self.gpm_before is None:
            return {}
        sample = self._gpm_sample()
        if sample is None:
            return {}
        query = self.nvml.c_nvmlGpmMetricsGet_t()
        query.version = self.nvml.NVML_GPM_METRICS_GET_VERSION
        query.numMetrics = len(GPM_METRICS)
        query.sample1, query.sample2 = self.gpm_before, sample
        for index, metric in enumerate(GPM_METRICS.values()):
            query.metrics[index].metricId = getattr(self.nvml, metric)
        try:
            self.nvml.nvmlGpmMetricsGet(query)
        except self.nvml.NVMLError:
            return {}
        finally:
            self.nvml.nvmlGpmSampleFree(self.gpm_before)
            self.gpm_before = sample
        return {
            name: float(query.metrics[index].value)
            for index, name in enumerate(GPM_METRICS)
            if query.metrics[index].nvmlReturn == 0
        }


def open_nvml_device(index: int) -> tuple[Any, Any] | None:
    """Return (pynvml, handle) of torch's CUDA device number `index`, or None without NVML.

    The device is found by its UUID: CUDA_VISIBLE_DEVICES renumbers the devices for torch, but
    not for NVML.
    """
    import torch

    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        uuid = f"GPU-{torch.cuda.get_device_properties(index).uuid}"
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid)
    except pynvml.NVMLError:
        return None


PROBE = CountersProbe
