"""What ranks need, imported once by the process that they are forked from."""

# ruff: noqa: F401
import torch._dynamo
import torch.distributed.fsdp
import torch.distributed.tensor

import steplab.step.trial
import steplab.train.loop
import steplab.workloads.gpt.workload
import steplab.workloads.tsmoe.workload
