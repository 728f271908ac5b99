"""How the matrix products of a step multiplied, by what was traced of it."""

from __future__ import annotations

from collections import Counter

from steplab.hardware.kernel_names import matmul_class
from steplab.record import Ran

# What the profiler calls the C++ types.
_TRACED = {"c10::BFloat16": "bf16", "c10::Half": "fp16"}


def product_dtypes(ran: Ran | None) -> dict[str, int]:
    """Return calls of matrix products by fp32, tf32, bf16, fp16: by op, else by kernel name.

    A replayed graph dispatches no op: where its kernels name more products than ops do, they count.
    An fp32 op may use TF32 units; which, only the kernel's name or the setting tells.
    """
    if ran is None:
        return {}
    by_op: Counter[str] = Counter()
    ours = {**_TRACED, "float": "tf32" if ran.matmul_precision != "highest" else "fp32"}
    for traced, calls in ran.matmul_dtypes.items():
        by_op[ours.get(traced, traced)] += calls
    by_kernel: Counter[str] = Counter()
    for kernel, launches in ran.kernels.items():
        dtype = matmul_class(kernel)
        if dtype:
            by_kernel[dtype] += launches
    hidden = bool(ran.graph_launches) and by_kernel.total() > by_op.total()
    return dict(by_kernel if hidden else by_op or by_kernel)


def most_products(ran: Ran | None, declared: str) -> str:
    """Return the dtype of most products; `declared` where the trace does not tell."""
    seen = product_dtypes(ran)
    return max(seen, key=lambda name: seen[name], default=declared)
