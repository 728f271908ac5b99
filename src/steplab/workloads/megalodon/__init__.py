"""Megalodon: chunked attention fed by complex moving averages that never forget all at once."""

from steplab.workloads.megalodon.config import PRESETS, TRAINING, MegalodonConfig
from steplab.workloads.megalodon.flops import parameters
from steplab.workloads.workload import WorkloadEntry

WORKLOAD = WorkloadEntry(
    name="megalodon",
    summary="complex moving averages, chunked gated attention, timestep norms, two-hop residual",
    config=MegalodonConfig,
    presets=PRESETS,
    factory="steplab.workloads.megalodon.workload:MegalodonWorkload",
    parameters=parameters,
    cpu_preset="tiny",
    gpu_preset="mega200m",
    training=TRAINING,
    data="text",
)
