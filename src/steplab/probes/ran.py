"""What really executed, from one profiled step outside the timed ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from time import perf_counter
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from steplab.probes.probe import Probe, Subject
from steplab.record import Ran

MATMULS = frozenset(
    f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "_scaled_mm")
)
GRAPH_LAUNCH = "cudaGraphLaunch"  # one launch, however many kernels the graph holds
LAUNCHES = frozenset(
    ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx")
)
KEPT_KERNELS = 200  # an eager step has some dozens of distinct kernels; a bound for odd models


def profiled_step(run: Callable[[], Any], on_cuda: bool) -> Ran:
    """Profile one call of `run` and tell which ops, dtypes and kernels it consisted of."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if on_cuda else [])
    start = perf_counter()
    with profile(activities=activities, record_shapes=True, acc_events=True) as profiler:
        run()
        if on_cuda:
            torch.cuda.synchronize()
    step_ms = (perf_counter() - start) * 1e3
    attention: Counter[str] = Counter()
    dtypes: Counter[str] = Counter()
    kernels: Counter[str] = Counter()
    launches = 0
    for event in profiler.profiler.kineto_results.events():
        name = event.name()
        if name.startswith("aten::_scaled_dot_product_") and not name.endswith("backward"):
            attention[name] += 1
        elif name in MATMULS:
            dtypes[next(iter(event.dtypes()), "unknown")] += 1
        elif name in LAUNCHES or name == GRAPH_LAUNCH:
            launches += 1
        elif event.device_type() != DeviceType.CPU and event.duration_ns() > 0:
            kernels[name] += 1
    return Ran(
        attention_ops=dict(attention),
        matmul_dtypes=dict(dtypes),
        kernels=dict(kernels.most_common(KEPT_KERNELS)),
        kernel_launches=launches if on_cuda else None,
        matmul_precision=torch.get_float32_matmul_precision(),
        step_ms=step_ms,
    )


class RanProbe(Probe):
    """Joins the trace with what the modules say they dispatched."""

    def inspect(self, subject: Subject) -> None:
        """Profile one extra step."""
        self.traced = profiled_step(subject.run_step, subject.on_cuda)
        impls: dict[str, set[str]] = {}
        for module in subject.step.model.modules():
            if hasattr(module, "op") and hasattr(module, "ran") and module.ran:
                impls.setdefault(str(module.op), set()).add(str(module.ran))
        self.impls = {op: tuple(sorted(names)) for op, names in impls.items()}
        self.optimizer = optimizer_impl(subject.step.optimizer)

    def result(self) -> Ran:
        """Return the evidence."""
        return replace(self.traced, impls=self.impls, optimizer=self.optimizer)


def optimizer_impl(optimizer: torch.optim.Optimizer | None) -> str:
    """Return forloop, foreach or fused: what the optimizer's groups resolve to."""
    if optimizer is None:
        return ""
    group = optimizer.param_groups[0]
    if group.get("fused"):
        return "fused"
    if group.get("foreach"):
        return "foreach"
    if group.get("foreach") is None and group.get("fused") is None:
        from torch.optim.optimizer import _default_to_fused_or_foreach

        _, foreach = _default_to_fused_or_foreach(group["params"], False, use_fused=False)
        return "foreach" if foreach else "forloop"
    return "forloop"


PROBE = RanProbe
