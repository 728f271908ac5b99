"""A recurrent hybrid: compressed convolutional attention, then a feed-forward that is repeated."""

from steplab.workloads.hydra.config import PRESETS, TRAINING, HydraConfig
from steplab.workloads.hydra.flops import parameters
from steplab.workloads.workload import WorkloadEntry

WORKLOAD = WorkloadEntry(
    name="hydra",
    summary="compressed convolutional attention, repeated feed-forward, routed tokens and depths",
    config=HydraConfig,
    presets=PRESETS,
    factory="steplab.workloads.hydra.workload:HydraWorkload",
    parameters=parameters,
    cpu_preset="tiny",
    gpu_preset="100m",
    training=TRAINING,
    data="text",
)
