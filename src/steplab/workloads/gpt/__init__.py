"""A plain decoder transformer: RMSNorm, RoPE, SwiGLU, untied head."""

from steplab.workloads.gpt.config import PRESETS, TRAINING, GPTConfig
from steplab.workloads.gpt.flops import parameters
from steplab.workloads.workload import WorkloadEntry

WORKLOAD = WorkloadEntry(
    name="gpt",
    summary="decoder transformer: RMSNorm, RoPE, SwiGLU, untied head",
    config=GPTConfig,
    presets=PRESETS,
    factory="steplab.workloads.gpt.workload:GPTWorkload",
    parameters=parameters,
    cpu_preset="tiny",
    gpu_preset="small",
    training=TRAINING,
    data="text",
)
