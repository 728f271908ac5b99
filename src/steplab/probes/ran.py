"""What really executed, from one profiled step outside the timed ones."""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import nn
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from steplab.core import Ran, units
from steplab.modules.optimizer import optimizer_label
from steplab.probes.probe import Probe, Subject

# One launch, however many kernels the graph has.
GRAPH_LAUNCH = "hipGraphLaunch" if torch.version.hip else "cudaGraphLaunch"
OWN_OPS = "steplab::"
LOG_LEVEL, LOG_ERRORS = "FLAGS_caffe2_log_level", 2  # torch's own for C++, in libc10
GLOO, NCCL = "gloo:", "nccl"  # in the names of collectives, as each library shows them
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
COPIES = ("Memcpy", "Memset")  # device activities that are no kernels, by the start of their names
FUSED_UPDATES = frozenset(f"aten::_fused_{kind}_" for kind in ("adam", "adamw", "sgd", "adagrad"))
# Foreach ops of updates only: clipping calls _foreach_norm and _foreach_mul_ too.
FOREACH_UPDATES = frozenset(("aten::_foreach_addcdiv_", "aten::_foreach_lerp_"))
KEPT_KERNELS = 200  # a bound for odd models: an eager step has some dozens of distinct kernels
MATMULS = frozenset(
    f"aten::{name}" for name in ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "_scaled_mm")
)
# An fp32 router in a bf16 model is under 1 % of its multiply-adds and changes no peak.
DOMINANT_SHARE = 0.95
ADDING_MATMULS = frozenset(("aten::addmm", "aten::baddbmm"))  # their first tensor is only added
FLOAT = "float"  # the profiler's name of fp32, even where the tensor cores compute in tf32
HALVES = {"c10::BFloat16": "bf16", "c10::Half": "fp16"}


class RanProbe(Probe):
    """Combines one profiled step with the implementations that the modules report."""

    def inspect(self, subject: Subject) -> None:
        """Profile one more step."""
        self.traced = profiled_step(subject.run_step, subject.on_cuda)
        if subject.step.graph is not None:
            self._profile_captured_ops(subject)
        self.impls = dispatched_impls(subject.step.model)
        self.optimizer = optimizer_impl(subject.step.optimizer, self.traced.optimizer_ops)
        self.fp8_linears = dict(subject.step.parts.fp8_linears)
        self.loader_workers = getattr(subject.step.workload, "loader_workers", None)

    def _profile_captured_ops(self, subject: Subject) -> None:
        """Profile a plain step for its ops: a replay dispatches none."""
        with subject.op_by_op():
            ops = profiled_step(subject.run_step, subject.on_cuda)
        subject.settle_again()
        self.traced = replace(
            self.traced,
            attention_ops=ops.attention_ops,
            matmul_dtypes=ops.matmul_dtypes,
            optimizer_ops=ops.optimizer_ops,
            own_ops=ops.own_ops,
        )

    def result(self) -> Ran:
        """Return what ran."""
        return replace(
            self.traced,
            impls=self.impls,
            optimizer=self.optimizer,
            fp8_linears=self.fp8_linears,
            loader_workers=self.loader_workers,
        )


def bf16_sums() -> str:
    """Return in what cuBLAS may add the partial sums of bf16 products."""
    rounds = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
    return "bf16" if rounds else "fp32"


def dispatched_impls(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return the implementations of each op that the modules of a model have called."""
    impls: dict[str, set[str]] = {}
    for module in model.modules():
        if hasattr(module, "op") and hasattr(module, "ran") and module.ran:
            impls.setdefault(str(module.op), set()).add(str(module.ran))
    return {op: tuple(sorted(names)) for op, names in impls.items()}


def quiet_profiler() -> None:
    """Keep Kineto from printing two lines to stderr for every profile (torch 2.13).

    It reads the variable when the first profiler of the process starts.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")


@contextlib.contextmanager
def no_word_of_older_memory() -> Iterator[None]:
    """Keep torch from logging that memory from before the profiler was freed: every step does that.

    Its level is read from the environment when torch is loaded, and then only a C variable.
    """
    library = ctypes.CDLL(torch._C.__file__)
    if not hasattr(library, LOG_LEVEL):  # a torch that logs by another library
        yield
        return
    level = ctypes.c_int.in_dll(library, LOG_LEVEL)
    before = level.value
    level.value = max(before, LOG_ERRORS)
    try:
        yield
    finally:
        level.value = before


def profiler_activities(on_cuda: bool) -> list[ProfilerActivity]:
    """Return what torch's profiler is to record of a step: the host, and the device it uses."""
    return [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if on_cuda else [])


class RawProfile(profile):
    """torch's profiler without a Python object for every event, which nobody here looks at.

    Making them takes 0.1 ms each: two seconds after a step of 20,000 events. `acc_events` asks for
    them at every end, but torch 2.11 warns without it.
    """

    def __init__(self, on_cuda: bool, **options: Any) -> None:
        super().__init__(activities=profiler_activities(on_cuda), acc_events=True, **options)

    def __enter__(self) -> Any:
        """Begin, without a word of memory that is older."""
        self._quiet = no_word_of_older_memory()
        self._quiet.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        """End, and let torch log as before."""
        super().__exit__(*error)
        self._quiet.__exit__(*error)

    def start_trace(self) -> None:
        """Begin to record."""
        super().start_trace()
        assert self.profiler is not None
        self.profiler.acc_events = False


def profiled_step(run: Callable[[], Any], on_cuda: bool) -> Ran:
    """Profile one call of `run` and return its ops, dtypes and kernels."""
    with RawProfile(on_cuda, record_shapes=True) as profiler:
        run()
        if on_cuda:
            torch.cuda.synchronize()
    return read_events(profiler.profiler.kineto_results.events(), on_cuda)


def read_events(events: Iterable[Any], on_cuda: bool) -> Ran:
    """Count the Kineto events of one step by what they are."""
    events = list(events)
    attention: Counter[str] = Counter()
    dtypes = Counter(first_dtype(call) for call in innermost_matmuls(events))
    optimizer: Counter[str] = Counter()
    own: Counter[str] = Counter()
    kernels: Counter[str] = Counter()
    busy: list[tuple[int, int]] = []
    collectives: list[tuple[int, int]] = []
    launches = graphs = 0
    for event in events:
        name = event.name()
        if is_collective(event):
            collectives.append((event.start_ns(), event.end_ns()))
        if name.startswith("aten::_scaled_dot_product_") and not name.endswith("backward"):
            attention[name] += 1
        elif name in FUSED_UPDATES or name.startswith("aten::_foreach_"):
            optimizer[name] += 1
        elif name.startswith(OWN_OPS) and event.device_type() == DeviceType.CPU:
            own[name] += 1
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
        bf16_sums=bf16_sums() if on_cuda else None,
        conv_layouts=conv_layouts(events),
        graph_launches=graphs if on_cuda else None,
        optimizer_ops=dict(optimizer),
        device_busy_ms=covered_ns(busy) / 1e6 if on_cuda else None,
        exposed_communication_ms=exposed_ns(collectives, events, on_cuda) / 1e6,
        own_ops=dict(own),
    )


def conv_layouts(events: Iterable[Any]) -> dict[str, int]:
    """Count forward convolutions over images by the layout of their input and weight.

    torch computes in channels_last where one of the two has it. Empty where the profiler has no
    strides (torch 2.11).
    """
    found: Counter[str] = Counter()
    for event in events:
        if event.name() != "aten::convolution" or not hasattr(event, "structured_input_strides"):
            continue
        given = zip(event.shapes()[:2], event.structured_input_strides()[:2], strict=False)
        factors = [(shape, stride) for shape, stride in given if len(shape) >= 4]
        if factors:
            last = any(_channels_last(shape, stride) for shape, stride in factors)
            found["channels_last" if last else "contiguous"] += 1
    return dict(found)


def _channels_last(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether neighbors in memory are channels of one pixel; one pixel alone cannot tell."""
    tells = len(stride) == len(shape) and shape[1] > 1 and math.prod(shape[2:]) > 1
    return tells and stride[1] == 1


def is_collective(event: Any) -> bool:
    """Whether a Kineto event is a collective at work: a kernel of NCCL, or gloo's own thread."""
    name = event.name()
    return name.startswith(GLOO) or (NCCL in name.lower() and is_kernel(event))


def exposed_ns(collectives: list[tuple[int, int]], events: Sequence[Any], on_cuda: bool) -> int:
    """Return the time in which collectives ran and nothing else did: no kernel, or no operator."""
    if not collectives:
        return 0
    works = [
        (event.start_ns(), event.end_ns())
        for event in events
        if (is_kernel(event) if on_cuda else event.name().startswith("aten::"))
        and not is_collective(event)
    ]
    return covered_ns([*works, *collectives]) - covered_ns(works)


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

    Such ranges have a copy on the device's timeline. Kineto's activity type would say all this, but
    torch 2.11 does not expose it.
    """
    on_device = event.device_type() != DeviceType.CPU and event.duration_ns() > 0
    return on_device and not event.is_user_annotation() and not event.name().startswith(COPIES)


def optimizer_impl(optimizer: torch.optim.Optimizer | None, traced: Collection[str]) -> str:
    """Return forloop, foreach, fused or one-pass (with its kernel), from the update's `traced` ops.

    Where these leave it open (a compiled update, a mode without one, an SGD, whose foreach ops
    clipping calls too), from what the optimizer's groups resolve to.
    """
    if optimizer is None:
        return ""
    label = optimizer_label(optimizer)
    if label:
        return label
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


class TracedCall(Protocol):
    """What is used of a Kineto event."""

    def name(self) -> str:
        """The operation, as in "aten::mm"."""
        ...

    def dtypes(self) -> list[str]:
        """C++ type of every argument."""
        ...

    def shapes(self) -> list[list[int]]:
        """Sizes of every argument; empty for one that is no tensor."""
        ...

    def start_thread_id(self) -> int:
        """The thread that made the call."""
        ...

    def start_ns(self) -> int:
        """When the call began."""
        ...

    def end_ns(self) -> int:
        """When the call returned."""
        ...


def matmul_dtype(events: Iterable[TracedCall], device: torch.device) -> tuple[str | None, str]:
    """Return ("bf16", "fp16", "tf32" or "fp32", "") or (None, why that is not known).

    The dtype is that of at least 95 % of the multiply-adds.
    """
    shares = matmul_shares(events)
    if not shares:
        return None, "called no matrix product (a replayed CUDA graph shows none)"
    traced, share = next(iter(shares.items()))
    if share < DOMINANT_SHARE:
        parts = [f"{units.percent(part)} {_dtype_name(dt, device)}" for dt, part in shares.items()]
        return None, f"ran its matrix products in {', '.join(parts)}"
    if traced != FLOAT and traced not in HALVES:
        return None, f"ran its matrix products in {traced}"
    return _dtype_name(traced, device), ""


def matmul_shares(events: Iterable[TracedCall]) -> Mapping[str, float]:
    """Return the share of the multiply-adds by C++ type, largest first; empty where none ran."""
    work: Counter[str] = Counter()
    for call in innermost_matmuls(events):
        first = 1 if call.name() in ADDING_MATMULS else 0
        dtypes, shapes = call.dtypes()[first:], call.shapes()[first:]
        if dtypes and len(shapes) > 1:
            work[dtypes[0]] += _multiply_adds(shapes[0], shapes[1])
    total = work.total()
    return {name: part / total for name, part in work.most_common() if part}


def innermost_matmuls(events: Iterable[TracedCall]) -> list[TracedCall]:
    """Return the calls of matrix products, without those that only forward to another one.

    Autocast shows an fp32 `aten::bmm` around the bf16 one that it calls; a grouped product without
    a kernel of its own shows one `aten::mm` per group.
    """
    calls = [event for event in events if event.name() in MATMULS]
    ordered = sorted(calls, key=lambda call: (call.start_thread_id(), call.start_ns()))
    forwarding = {
        id(outer)
        for outer, inner in pairwise(ordered)
        if outer.start_thread_id() == inner.start_thread_id() and inner.start_ns() < outer.end_ns()
    }
    return [call for call in ordered if id(call) not in forwarding]


def _multiply_adds(left: list[int], right: list[int]) -> int:
    """M x K x N, times the batch where both have one; a grouped product's groups share M or N."""
    if len(left) < 2 or len(right) < 2:
        return 0
    batch = left[0] if len(left) == len(right) == 3 else 1
    return batch * left[-2] * left[-1] * right[-1]


def _dtype_name(traced: str, device: torch.device) -> str:
    """Return our name of a C++ type; float is tf32 where the device may round fp32 products."""
    if traced != FLOAT:
        return HALVES.get(traced, traced)
    # Not torch.get_float32_matmul_precision(), which raises where a loop set one backend only.
    backend = torch.backends.cuda if device.type == "cuda" else torch.backends.mkldnn
    return "fp32" if backend.matmul.fp32_precision in ("none", "ieee") else "tf32"


PROBE = RanProbe
