"""Counters: what the device says of itself through NVML while the steps ran."""

from __future__ import annotations

from dataclasses import dataclass

from steplab.record.samples import Samples


@dataclass(frozen=True)
class Counters:
    """One value per reading. None: this device or driver does not tell (never a stand-in)."""

    sm_util_pct: Samples | None = None  # share of time in which at least one kernel ran
    mem_ctrl_util_pct: Samples | None = None  # share of time in which the memory was accessed
    hbm_util_pct: Samples | None = None  # measured DRAM bandwidth over its peak (GPM counters)
    tensor_util_pct: Samples | None = None  # share of cycles with the tensor cores active (GPM)
    power_w: Samples | None = None
    sm_clock_mhz: Samples | None = None
    mem_clock_mhz: Samples | None = None
    temperature_c: Samples | None = None
    source: str = ""
    note: str = ""  # what a reader of the numbers must know
