"""Ran: what really executed, seen in one profiled step outside the timed ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Ran:
    """Evidence of one step. `impls` is what the modules dispatched, the rest what was traced."""

    impls: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # op -> impl names
    attention_ops: Mapping[str, int] = field(default_factory=dict)  # aten op -> calls
    matmul_dtypes: Mapping[str, int] = field(default_factory=dict)  # dtype -> calls
    kernels: Mapping[str, int] = field(default_factory=dict)  # device kernel -> executions
    kernel_launches: int | None = None  # by the host, a graph is one; None on CPU
    matmul_precision: str = "highest"  # torch.get_float32_matmul_precision() during the step
    optimizer: str = ""  # forloop, foreach, fused, "one-pass triton_update" or "one-pass reference"
    graph_launches: int | None = None  # those of kernel_launches that replay a graph; None on CPU
    # aten::_fused_adamw_, aten::_foreach_* ... -> calls; gradient clipping has foreach ops too
    optimizer_ops: Mapping[str, int] = field(default_factory=dict)
    device_busy_ms: float | None = None  # time in which at least one kernel ran; None on CPU
