"""A time-series mixture-of-experts decoder: one value (or patch) is one token."""

from steplab.workloads.tsmoe.config import PRESETS, TRAINING, TsmoeConfig
from steplab.workloads.tsmoe.flops import parameters
from steplab.workloads.workload import WorkloadEntry

WORKLOAD = WorkloadEntry(
    name="tsmoe",
    summary="time-series mixture-of-experts decoder with multi-horizon heads",
    config=TsmoeConfig,
    presets=PRESETS,
    factory="steplab.workloads.tsmoe.workload:TsmoeWorkload",
    parameters=lambda config: parameters(config)[0],
    cpu_preset="tiny",
    gpu_preset="small",
    starter="starter",
    training=TRAINING,
    data="series",
)
