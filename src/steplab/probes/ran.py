"""What really executed, from one profiled step outside the timed ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from steplab.modules.one_pass_adamw import OnePassAdamW
from steplab.probes.probe import Probe, Subject
from steplab.probes.products import TracedCall, innermost_products
from steplab.record import Ran

# One launch, however many kernels the graph holds.
GRAPH_LAUNCH = "hipGraphLaunch" if torch.version.hip else "cudaGraphLaunch"
CUDA_LAUNCHES = (
    "cudaLaunchKernel",
    "cudaLaunchKernelExC",
    "cudaLaunchCooperativeKernel",
    "cuLaunchKernel",
    "cuLaunchKernelEx",
)
HIP_LAUNCHES = (
    "hipLaunchKernel",
    "hipLaunchCooperativeKernel",
    "hipModuleLaunchKernel",
    "hipExtModuleLaunchKernel",
)
LAUNCHES = frozenset(HIP_LAUNCHES if torch.version.hip else CUDA_LAUNCHES)
COPIES = ("Memcpy", "Memset")  # how the names of device activities begin that are no kernels
FUSED_UPDATES = frozenset(f"aten::_fused_{kind}_" for kind in ("adam", "adamw", "sgd", "adagrad"))
# Foreach ops that only an update has; clipping has _foreach_norm and _foreach_mul_ too.
FOREACH_UPDATES = frozenset(("aten::_foreach_addcdiv_", "aten::_foreach_lerp_"))
KEPT_KERNELS = 200  # an eager step has some dozens of distinct kernels; a bound for odd models


def profiled_step(run: Callable[[], Any], on_cuda: bool) -> Ran:
    """Profile one call of `run` and tell which ops, dtypes and kernels it consisted of."""
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if on_cuda else [])
    with profile(activities=activities, record_shapes=True, acc_events=True) as profiler:
        run()
        if on_cuda:
            torch.cuda.synchronize()
    return read_events(profiler.profiler.kineto_results.events(), on_cuda)


def read_events(events: Iterable[Any], on_cuda: bool) -> Ran:
    """Count the Kineto events of one step by what they are."""
    events = list(events)
    attention: Counter[str] = Counter()
    dtypes = Counter(first_dtype(call) for call in innermost_products(events))
    optimizer: Counter[str] = Counter()
    kernels: Counter[str] = Counter()
    busy: list[tuple[int, int]] = []
    launches = graphs = 0
    for event in events:
        name = event.name()
        if name.startswith("aten::_scaled_dot_product_") and not name.endswith("backward"):
            attention[name] += 1
        elif name in FUSED_UPDATES or name.startswith("aten::_foreach_"):
            optimizer[name] += 1
        elif name in LAUNCHES:
            launches += 1
        elif name == GRAPH_LAUNCH:
            graphs += 1
        elif is_kernel(event):
            kernels[name] += 1
            busy.append((event.start_ns(), event.end_ns()))
    return Ran(
        attention_ops=dict(attention),
        matmul_dtypes=dict(dtypes),
        kernels=dict(kernels.most_common(KEPT_KERNELS)),
        kernel_launches=launches + graphs if on_cuda else None,
        matmul_precision=torch.get_float32_matmul_precision(),
        graph_launches=graphs if on_cuda else None,
        optimizer_ops=dict(optimizer),
        device_busy_ms=covered_ns(busy) / 1e6 if on_cuda else None,
    )


def first_dtype(call: TracedCall) -> str:
    """Return the C++ type of a call's first argument."""
    return next(iter(call.dtypes()), "unknown")


def covered_ns(intervals: Iterable[tuple[int, int]]) -> int:
    """Return the length of the union of intervals: kernels on two streams may overlap."""
    total = end = 0
    for start, stop in sorted(intervals):
        total += max(0, stop - max(start, end))
        end = max(end, stop)
    return total


def is_kernel(event: Any) -> bool:
    """Whether a Kineto event is a kernel: no copy, and no range of record_function.

    Such ranges have a twin on the device's timeline. Kineto's activity type would tell all this,
    but torch 2.11 does not show it.
    """
    on_device = event.device_type() != DeviceType.CPU and event.duration_ns() > 0
    return on_device and not event.is_user_annotation() and not event.name().startswith(COPIES)


class RanProbe(Probe):
    """Joins the trace with what the modules say they dispatched."""

    def inspect(self, subject: Subject) -> None:
        """Profile one extra step."""
        self.traced = profiled_step(subject.run_step, subject.on_cuda)
        if subject.step.graph is not None:
            self._see_captured_ops(subject)
        impls: dict[str, set[str]] = {}
        for module in subject.step.model.modules():
            if hasattr(module, "op") and hasattr(module, "ran") and module.ran:
                impls.setdefault(str(module.op), set()).add(str(module.ran))
        self.impls = {op: tuple(sorted(names)) for op, names in impls.items()}
        self.optimizer = optimizer_impl(subject.step.optimizer, self.traced.optimizer_ops)

    def _see_captured_ops(self, subject: Subject) -> None:
        """A replay dispatches no op; a plain step has the ops that were captured."""
        with subject.op_by_op():
            ops = profiled_step(subject.run_step, subject.on_cuda)
        subject.settle_again()
        self.traced = replace(
            self.traced,
            attention_ops=ops.attention_ops,
            matmul_dtypes=ops.matmul_dtypes,
            optimizer_ops=ops.optimizer_ops,
        )

    def result(self) -> Ran:
        """Return the evidence."""
        return replace(self.traced, impls=self.impls, optimizer=self.optimizer)


def optimizer_impl(optimizer: torch.optim.Optimizer | None, traced: Collection[str]) -> str:
    """Return forloop, foreach, fused or one-pass (with its kernel), by the update's `traced` ops.

    Where these do not tell (a compiled update, a mode without one, an SGD whose foreach ops
    clipping has too), by what the optimizer's groups resolve to.
    """
    if optimizer is None:
        return ""
    if isinstance(optimizer, OnePassAdamW):
        return f"one-pass {optimizer.ran}".strip()
    if not FUSED_UPDATES.isdisjoint(traced):
        return "fused"
    if not FOREACH_UPDATES.isdisjoint(traced):
        return "foreach"
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
