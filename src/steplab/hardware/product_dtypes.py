"""How the matrix products of a step multiplied, by what was traced of it."""

from __future__ import annotations

from steplab.hardware.kernel_names import matmul_class
from steplab.record import Ran

# What the profiler calls the C++ types.
_TRACED = {"c10::BFloat16": "bf16", "c10::Half": "fp16"}


def product_dtypes(ran: Ran | None) -> dict[str, int]:
    """Return calls of matrix products by fp32, tf32, bf16, fp16: by op, else by kernel name.

    An fp32 op may use TF32 units; which, only the kernel's name or the setting tells.
    """
    if ran is None:
        return {}
    seen: dict[str, int] = {}
    ours = {**_TRACED, "float": "tf32" if ran.matmul_precision != "highest" else "fp32"}
    for traced, calls in ran.matmul_dtypes.items():
        name = ours.get(traced, traced)
        seen[name] = seen.get(name, 0) + calls
    if not seen:
        for kernel, launches in ran.kernels.items():
            dtype = matmul_class(kernel)
            if dtype:
                seen[dtype] = seen.get(dtype, 0) + launches
    return seen


def most_products(ran: Ran | None, declared: str) -> str:
    """Return the dtype of most products; `declared` where the trace does not tell."""
    seen = product_dtypes(ran)
    return max(seen, key=lambda name: seen[name], default=declared)
