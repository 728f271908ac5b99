"""Roofline: what the work of a trace had to cost at least, in FLOPs, bytes and time."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from steplab.costs.aten import aten_cost
from steplab.costs.op_call import Cost, OpCall, item_bytes_of_kernel
from steplab.costs.own_ops import has_several_kernels, own_cost, own_op_name
from steplab.hardware.catalog import Card, find_card
from steplab.trace.analysis import Floats, WorkTable
from steplab.trace.categories import MATMUL, kernel_category
from steplab.trace.events import KERNEL, Codes, Ints, Spans, Trace

MATMUL_DTYPES = ("", "fp32", "tf32", "bf16", "fp16", "fp8")
_PEAK_OF = {
    "c10::BFloat16": ("bf16",),
    "c10::Half": ("fp16",),
    "c10::Float8_e4m3fn": ("fp8",),
    "c10::Float8_e5m2": ("fp8",),
    "float": ("fp32", "tf32"),  # the arguments do not say whether products were rounded
}
# A product further above the nominal peak than a boosted clock explains has a wrong cost model.
_TOLERATED = 1.1


@dataclass(frozen=True)
class Costs:
    """One row per piece of work: of Trace.device, or of Trace.ops where there is no device."""

    flops: Floats  # nan: unknown
    bytes: Floats  # least traffic, nan: unknown
    ideal: Floats  # ns; nan: unknown, or the card's peak is
    matmul_dtype: NDArray[np.int8]  # index of MATMUL_DTYPES; 0: no matrix product, or unsure


class _CallCost(NamedTuple):
    """One distinct call; times by the roofline, nan where they are not known."""

    flops: float
    bytes: float
    compute_ns: float
    memory_ns: float
    kind: int  # 0: unknown, _MEMORY_BOUND or _PRODUCT
    dtype: int  # index of MATMUL_DTYPES


class _CallCosts(NamedTuple):
    """The same as columns, one row per call."""

    flops: Floats
    bytes: Floats
    compute_ns: Floats
    memory_ns: Floats
    kind: Floats
    dtype: Floats


_MEMORY_BOUND, _PRODUCT = 1, 2
_UNKNOWN = _CallCost(np.nan, np.nan, np.nan, np.nan, 0, 0)


def trace_card(trace: Trace, device_name: str = "") -> Card | None:
    """Return the card a trace was recorded on, by `device_name` or by the trace itself."""
    return find_card(device_name or trace_device_name(trace))


def trace_device_name(trace: Trace) -> str:
    """Return the name of a trace's device; "" where it has none or does not name it."""
    if not len(trace.device):
        return ""
    names = {gpu.id: gpu.name for gpu in trace.gpus}
    if len(set(names.values())) == 1:  # under CUDA_VISIBLE_DEVICES ids may differ
        return next(iter(names.values()))
    devices, counts = np.unique(np.maximum(trace.device.device, 0), return_counts=True)
    return names.get(int(devices[counts.argmax()]), "")


def peak_sources(card: Card, dtypes: Iterable[str]) -> dict[str, str]:
    """Return the peaks that ideals were computed with: "memory", and dtypes of products."""
    known = {dtype: card.peak(dtype) for dtype in dtypes}
    return {
        "memory": f"{card.bandwidth_gbs:g} GB/s, {card.name}, {card.source}",
        **{
            dtype: f"{peak:g} TFLOP/s dense, {card.name}, {card.provenance(dtype)}"
            for dtype, peak in known.items()
            if peak is not None
        },
    }


def estimate_costs(trace: Trace, op_row: Ints, card: Card | None) -> Costs:
    """Return the costs of every piece of work, by the call of the operator that launched it.

    `op_row` has the row of that operator in trace.ops, -1 for none. The cost of a call is given
    once: it is spread over its kernels (of one name, where each has a cost of its own) by their
    durations, and a product that only calls another one (aten::linear, aten::addmm) has none.
    """
    on_device = len(trace.device) > 0
    rows = trace.device if on_device else trace.ops
    is_work = trace.device.kind == KERNEL if on_device else np.ones(len(rows), bool)
    work = np.flatnonzero(is_work & (op_row >= 0))
    calls, call_of = _calls(trace, op_row[work], rows.name[work])
    duration = rows.duration[work].astype(np.float64)
    spent = np.bincount(call_of, duration, len(calls)).astype(np.float64)
    kernel = _longest(call_of, duration, rows.name[work], len(calls))
    cost = _call_costs(trace, calls, kernel, card)
    ideal = _ideal_ns(cost.compute_ns, cost.memory_ns, spent)
    equal = 1.0 / np.bincount(call_of, minlength=len(calls))[call_of]
    share = np.divide(duration, spent[call_of], out=equal, where=spent[call_of] > 0)
    columns = np.full((3, len(op_row)), np.nan)
    columns[:, work] = np.stack([cost.flops, cost.bytes, ideal])[:, call_of] * share
    dtype = np.zeros(len(op_row), np.int8)
    dtype[work] = cost.dtype.astype(np.int8)[call_of]
    return Costs(columns[0], columns[1], columns[2], dtype)


def _calls(trace: Trace, op_row: Ints, kernel: Codes) -> tuple[Ints, Ints]:
    """Return the rows of the calls with costs, and which of them each kernel belongs to."""
    many = trace.named(trace.ops, has_several_kernels)
    apart = np.where(many[op_row], kernel.astype(np.int64) + 1, 0)
    key = op_row.astype(np.int64) * (len(trace.texts) + 1) + apart
    _, first, call_of = np.unique(key, return_index=True, return_inverse=True)
    return op_row[first], call_of.ravel()


def cost_of_call(call: OpCall, kernel: str) -> Cost | None:
    """Return the cost of a call whose longest kernel is `kernel`; None: unknown."""
    try:
        return own_cost(call, kernel) if own_op_name(call.name) else aten_cost(call, kernel)
    except (LookupError, ValueError, ArithmeticError):  # shapes that the operator does not take
        return None


def _longest(group: Ints, duration: Floats, name: Codes, groups: int) -> Ints:
    """Return the name of the longest member of each group."""
    longest = np.zeros(groups, np.int64)
    order = np.argsort(duration, kind="stable")
    longest[group[order]] = name[order]  # numpy keeps the last of repeated indices
    return longest


def _call_costs(trace: Trace, calls: Ints, kernel: Ints, card: Card | None) -> _CallCosts:
    """Return the costs of calls (rows of trace.ops), each distinct one computed once."""
    number, first = trace.distinct_calls(calls, kernel)
    distinct = [_call_cost(trace, calls[i], trace.text(kernel[i]), card) for i in first]
    table = np.array(distinct, np.float64).reshape(-1, len(_CallCost._fields))[number]
    # On a device only calls that launched kernels are asked for: their traffic is their own.
    kinds = (_PRODUCT,) if len(trace.device) else (_PRODUCT, _MEMORY_BOUND)
    for kind in kinds:
        same = np.flatnonzero(table[:, _CallCost._fields.index("kind")] == kind)
        table[same[_calls_another(trace.ops, calls[same])]] = _UNKNOWN
    return _CallCosts(*table.T)


def _calls_another(ops: Spans, calls: Ints) -> NDArray[np.bool_]:
    """Whether another one of the calls lies within each call."""
    within = np.zeros(len(calls), bool)
    order = np.lexsort((-ops.duration[calls], ops.start[calls], ops.thread[calls]))
    outer, inner = calls[order[:-1]], calls[order[1:]]
    same_thread = ops.thread[outer] == ops.thread[inner]
    within[order[:-1]] = same_thread & (ops.start[inner] < ops.end[outer])
    return within


def _call_cost(trace: Trace, row: int, kernel: str, card: Card | None) -> _CallCost:
    call = trace.op_call(row)
    cost = cost_of_call(call, kernel) if call else None
    if call is None or cost is None:
        return _UNKNOWN
    dtypes = _multiplied_as(cost, kernel, call.name, trace.text(trace.ops.dtypes[row]))
    sure = cost.is_matmul and len(dtypes) == 1
    compute_ns, memory_ns = _roofline(cost, dtypes, card)
    return _CallCost(
        flops=cost.flops,
        bytes=cost.bytes,
        compute_ns=compute_ns,
        memory_ns=memory_ns,
        kind=_PRODUCT if cost.dtype else _MEMORY_BOUND,
        dtype=MATMUL_DTYPES.index(dtypes[0]) if sure else 0,
    )


def _multiplied_as(cost: Cost, kernel: str, op: str, types: str) -> tuple[str, ...]:
    """Return the dtype whose peak counts, several where that is not sure."""
    if cost.is_matmul:
        category = kernel_category(kernel, op, types)
        word = category.removeprefix(MATMUL).removesuffix(" simt")
        if category.startswith(MATMUL) and word in MATMUL_DTYPES:
            return (word,)
    return _PEAK_OF.get(cost.dtype, ())


def _roofline(cost: Cost, dtypes: tuple[str, ...], card: Card | None) -> tuple[float, float]:
    """Return the least ns of products and of memory traffic; nan where a peak is not known."""
    if card is None:
        return np.nan, np.nan
    memory_ns = cost.bytes / card.bandwidth_gbs  # GB/s are bytes per ns
    if not cost.flops:
        return 0.0, memory_ns
    times = [cost.flops / (peak * 1e3) for dtype in dtypes if (peak := card.peak(dtype))]
    bounds = {max(time, memory_ns) for time in times}
    return (times[0] if len(bounds) == 1 else np.nan), memory_ns  # one bound: whichever it was


def _ideal_ns(compute_ns: Floats, memory_ns: Floats, spent: Floats) -> Floats:
    """Return the ns by the roofline; nan where products would have beaten the peak.

    Traffic may beat the memory, where a kernel reads from the cache what the last one wrote. Then
    nothing was lost, and the ideal is the time spent.
    """
    ideal = np.minimum(np.maximum(compute_ns, memory_ns), spent)
    return np.where(compute_ns > _TOLERATED * spent, np.nan, ideal)


# Passes over all weights: clipping and the optimizer's update. The profiler leaves the sizes out of
# lists longer than 30 tensors, and a kernel that only Python launches has no operator around it;
# but a step goes over all weights once.


@dataclass(frozen=True)
class _Pass:
    """Kernels that go over all weights, by name and phase."""

    kernel: re.Pattern[str]
    phase: str
    numbers: int  # moved per weight
    item: int | None = None  # bytes of each; None: as in the name of the kernel


_PASSES = (
    # Gradient, weight and two moments in; the last three out.
    _Pass(re.compile(r"FusedAdamMathFunctor<\w[\w:]*, 4\b"), "optimizer", 7),
    # With fp32 weights kept beside 16-bit ones it is 28 bytes too: 2 + 2 for 4.
    _Pass(re.compile(r"^(small_)?adamw_kernel$"), "optimizer", 7, 4),
    _Pass(re.compile(r"\bLpNormFunctor<"), "clip", 1),
    _Pass(re.compile(r"BinaryOpScalarTensorFunctor<.*std::multiplies"), "clip", 2),
)


def add_update_costs(work: WorkTable, weights: int | None, card: Card | None) -> WorkTable:
    """Return `work` with the costs of its passes over all `weights`.

    What a pass moves in a step is spread over its kernels there by their durations. `weights` is
    the number of weights that a step updates; None: unknown.
    """
    if not weights or card is None:
        return work
    flops, moved, ideal = work.flops.copy(), work.bytes.copy(), work.ideal.copy()
    for one in _PASSES:
        item = _item_bytes(work, one)[work.name]
        in_phase = np.array([label == one.phase for label in work.labels])[work.phase]
        rows = np.flatnonzero((item > 0) & in_phase & (work.step >= 0))
        _, step = np.unique(work.step[rows], return_inverse=True)
        share = work.duration[rows] / np.maximum(np.bincount(step, work.duration[rows]), 1)[step]
        flops[rows] = 0.0
        moved[rows] = share * weights * one.numbers * item[rows]
        ideal[rows] = np.minimum(moved[rows] / card.bandwidth_gbs, work.duration[rows])
    return replace(work, flops=flops, bytes=moved, ideal=ideal)


def _item_bytes(work: WorkTable, one: _Pass) -> Ints:
    """Return the bytes of a number by label; 0 for labels that are not kernels of the pass."""
    sizes = np.zeros(len(work.labels), np.int64)
    for code in np.unique(work.name).tolist():
        if one.kernel.search(work.labels[code]):
            sizes[code] = one.item or item_bytes_of_kernel(work.labels[code]) or 0
    return sizes
