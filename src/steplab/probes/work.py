"""FLOPs of a step: by the workload's formula, or counted op by op where it has none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from steplab.hardware import op_costs
from steplab.probes.probe import Probe, Subject
from steplab.record import Work

aten = torch.ops.aten
TRAINING_MODES = ("forward+backward", "full")


def _attention(op: Any, visible: bool, backward: bool) -> Callable[..., float]:
    """Return a formula for a fused attention op, over visible or over all pairs."""
    names = [argument.name for argument in op.default._schema.arguments]

    def formula(*args: Any, out_val: Any = None, **kwargs: Any) -> float:
        given = dict(zip(names, args, strict=False)) | kwargs
        q_BHTD, k_BHSD, v_BHSD = given["query"], given["key"], given["value"]
        B, H, T, d_qk = q_BHTD.shape
        causal = visible and bool(given.get("is_causal"))
        pairs = op_costs.attention_pairs(T, k_BHSD.shape[-2], causal) * B
        shape = (pairs, H, d_qk, v_BHSD.shape[-1])
        if backward:
            return op_costs.attention_backward(*shape, recompute=True)
        return op_costs.attention_forward(*shape)

    return formula


def _grouped_mm(a: Any, b: Any, *args: Any, out_val: Any = None, **kwargs: Any) -> float:
    """Rows of every group meet one matrix: (M, K) x (E, K, N), or two ragged operands."""
    return 2.0 * out_val.numel() * a.shape[-1] if b.ndim == 3 else 2.0 * a.numel() * b.shape[-1]


def _fft(x: Any, dims: Any, *args: Any, out_val: Any = None, **kwargs: Any) -> float:
    real = not (x.is_complex() and out_val.is_complex())
    full = x if x.numel() >= out_val.numel() else out_val
    length = 1
    for dim in dims:
        length *= full.shape[dim]
    return op_costs.fft(length, full.numel() // max(length, 1), real)


def _scan(x: Any, *args: Any, out_val: Any = None, **kwargs: Any) -> float:
    return op_costs.scan(x.numel())


# torch's counter knows these as 0, or counts every pair of a causal attention.
GROUPED = {aten._grouped_mm: _grouped_mm}
VECTOR_OPS = {
    aten._fft_r2c: _fft,
    aten._fft_c2r: _fft,
    aten._fft_c2c: _fft,
    aten.cumsum: _scan,
    aten.cumprod: _scan,
    aten.logcumsumexp: _scan,
}
# Whatever comes from elsewhere is a custom op: it may do anything, so its absence is told.
LIGHT_NAMESPACES = ("aten", "prim", "prims", "profiler", "c10d", "_c10d_functional")
HEAVY_OPS = ("linalg_qr", "linalg_svd", "linalg_inv_ex", "linalg_solve_ex", "_linalg_eigh")
ATTENTION_OPS = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)


def formulas(visible: bool) -> dict[Any, Callable[..., float]]:
    """Return our formulas per op: attention over visible pairs or over all, grouped products."""
    found: dict[Any, Callable[..., float]] = dict(GROUPED)
    for name in ATTENTION_OPS:
        for op, backward in ((name, False), (f"{name}_backward", True)):
            if hasattr(aten, op):
                packet = getattr(aten, op)
                found[packet] = _attention(packet, visible, backward)
    return found


class Counter(TorchDispatchMode):
    """Adds up FLOPs by torch's formulas and ours, and notes heavy ops that have none."""

    def __init__(self, visible: bool) -> None:
        super().__init__()
        own = formulas(visible)
        self.registry = {**FlopCounterMode(display=False).flop_registry, **own}
        self.own = own
        self.matrix = self.vector = 0.0
        self.covered = 0
        self.uncovered: dict[str, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the op, then count it."""
        kwargs = dict(kwargs or {})
        packet = func._overloadpacket
        if packet not in self.registry and packet not in VECTOR_OPS:
            # A composite op (aten::linear, sdpa's math path) is counted by its parts.
            with self:
                decomposed = func.decompose(*args, **kwargs)
            if decomposed is not NotImplemented:
                return decomposed
        out = func(*args, **kwargs)
        first = out[0] if isinstance(out, (tuple, list)) and out else out
        if packet in VECTOR_OPS:
            self.vector += VECTOR_OPS[packet](*args, out_val=first, **kwargs)
        elif packet in self.own:
            self.matrix += self.own[packet](*args, out_val=first, **kwargs)
            self.covered += 1
        elif packet in self.registry:
            self.matrix += float(self.registry[packet](*args, **kwargs, out_val=out))
            self.covered += 1
        elif func.namespace not in LIGHT_NAMESPACES or packet.__name__ in HEAVY_OPS:
            name = f"{func.namespace}::{packet.__name__}"
            self.uncovered[name] = self.uncovered.get(name, 0) + 1
        return out


class WorkProbe(Probe):
    """Formula first; without one, three counted passes: visible pairs, all pairs, the step."""

    def inspect(self, subject: Subject) -> None:
        """Find the work of one step."""
        step, spec = subject.step, subject.spec
        ran = {str(m.op): str(m.ran) for m in step.model.modules() if hasattr(m, "op")}
        formula = step.workload.work(spec.batch, spec.mode, ran)
        self.work = _times(formula, spec.accumulate) if formula else count_work(subject)

    def result(self) -> Work:
        """Return the FLOPs of one step."""
        return self.work


def count_work(subject: Subject) -> Work:
    """Count one step's FLOPs by running it eagerly under dispatch-level counters.

    Model FLOPs of a training step are three times the forward's, recomputation left out; the
    hardware's are those of all ops of the step.
    """
    step, spec = subject.step, subject.spec
    passes = 3 if spec.mode in TRAINING_MODES else 1
    with torch.compiler.set_stance("force_eager"):
        forward = {}
        for visible in (True, False):
            with Counter(visible) as counter, torch.no_grad(), step.parts.forward_context():
                for batch in next(subject.feed):
                    run = step.workload.predict if spec.mode == "infer" else step.workload.loss
                    run(step.model, batch)
            forward[visible] = counter
        with Counter(visible=True) as whole:
            subject.run_step()
    return Work(
        tokens=step.workload.tokens(spec.batch) * spec.accumulate,
        model=passes * forward[True].matrix,
        palm=passes * forward[False].matrix,
        hardware=whole.matrix,
        vector=whole.vector,
        formula=f"{passes} x forward FLOPs, counted op by op",
        covered_calls=whole.covered,
        uncovered_calls=whole.uncovered,
    )


def _times(work: Work, accumulate: int) -> Work:
    def scaled(flops: float | None) -> float | None:
        return None if flops is None else flops * accumulate

    return replace(
        work,
        tokens=work.tokens * accumulate,
        model=scaled(work.model),
        palm=scaled(work.palm),
        hardware=scaled(work.hardware),
        vector=work.vector * accumulate,
    )


PROBE = WorkProbe
