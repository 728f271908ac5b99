"""FLOPs of a step: from the workload's formula, or counted op by op if it has none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from steplab.core import Work
from steplab.probes.formulas import VECTOR_OPS, is_heavy, matrix_formulas, own_formula
from steplab.probes.padding import padding_of
from steplab.probes.probe import Probe, Subject, without_gradients

HIGHER_ORDER = "higher_order::"  # namespace of operators that call functions
TRAINING_MODES = ("forward+backward", "full")


class FlopCounter(TorchDispatchMode):
    """Adds up FLOPs by torch's formulas and ours, and lists heavy ops without a formula."""

    supports_higher_order_operators = True

    def __init__(self, visible: bool) -> None:
        super().__init__()
        self.own = matrix_formulas(visible)
        self.registry = FlopCounterMode(display=False).flop_registry
        self.matrix = self.vector = 0.0
        self.covered = 0
        self.uncovered: dict[str, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run the op, then count it."""
        kwargs = dict(kwargs or {})
        if isinstance(func, HigherOrderOperator):
            # flex_attention, Triton kernels: its mask or its body decides what it computes.
            self._miss(f"{func.namespace}::{func.name()}")
            return func(*args, **kwargs)
        packet = func._overloadpacket
        ours = self.own.get(packet)
        if func.namespace == "steplab":
            ours = own_formula(packet.__name__)
        if ours is None and packet not in self.registry and packet not in VECTOR_OPS:
            # A composite op (aten::linear, sdpa's math path) is counted by its parts.
            with self:
                decomposed = func.decompose(*args, **kwargs)
            if decomposed is not NotImplemented:
                return decomposed
        out = func(*args, **kwargs)
        first = out[0] if isinstance(out, (tuple, list)) and out else out
        if packet in VECTOR_OPS:
            self.vector += VECTOR_OPS[packet](*args, out_val=first, **kwargs)
        elif ours is not None:
            self.matrix += ours(*args, out_val=first, **kwargs)
            self.covered += 1
        elif packet in self.registry:
            self.matrix += float(self.registry[packet](*args, **kwargs, out_val=out))
            self.covered += 1
        elif is_heavy(func.namespace, packet.__name__):
            self._miss(f"{func.namespace}::{packet.__name__}")
        return out

    def _miss(self, name: str) -> None:
        self.uncovered[name] = self.uncovered.get(name, 0) + 1


class WorkProbe(Probe):
    """Uses the formula; without one, counts visible pairs, all pairs, and the whole step."""

    def inspect(self, subject: Subject) -> None:
        """Find the work of one step."""
        step, spec = subject.step, subject.spec
        ran = {str(m.op): str(m.ran) for m in step.model.modules() if hasattr(m, "op")}
        formula = step.workload.work(spec.batch, spec.mode, ran)
        self.work = repeated(formula, spec.accumulate) if formula else count_work(subject)

    def result(self) -> Work:
        """Return the FLOPs of one step."""
        return self.work


def count_work(subject: Subject) -> Work:
    """Count one step's FLOPs by running it eagerly under dispatch-level counters.

    Model FLOPs of a training step are three times the forward's, recomputation left out; the
    hardware's are those of all ops of the step. Where a heavy op has no
    formula the sums are only lower bounds: then all three are None.
    """
    step, spec = subject.step, subject.spec
    passes = 3 if spec.mode in TRAINING_MODES else 1
    run = step.workload.predict if spec.mode == "infer" else step.workload.loss
    batches = next(subject.feed)

    def count_forward(visible: bool) -> FlopCounter:
        with FlopCounter(visible) as counter, step.parts.forward_context():
            for batch in batches:
                run(step.model, batch)
        return counter

    with torch.compiler.set_stance("force_eager"):
        forward = {v: without_gradients(partial(count_forward, v)) for v in (True, False)}
        whole = forward[True]
        # The backward of flex_attention ends the process where a dispatch mode is on.
        if not any(name.startswith(HIGHER_ORDER) for name in whole.uncovered):
            with FlopCounter(visible=True) as whole, subject.op_by_op():
                subject.run_step()
    uncovered = forward[True].uncovered | whole.uncovered
    padding, told_by = padding_of(batches)
    return Work(
        tokens=step.workload.tokens(spec.batch) * spec.accumulate,
        model=None if uncovered else passes * forward[True].matrix,
        palm=None if uncovered else passes * forward[False].matrix,
        hardware=None if uncovered else whole.matrix,
        vector=whole.vector,
        formula=f"{passes} x forward FLOPs, counted op by op",
        covered_calls=whole.covered,
        uncovered_calls=uncovered,
        unit=getattr(step.workload, "unit", "tokens"),
        padding=padding,
        padding_told_by=told_by,
    )


def repeated(work: Work, accumulate: int) -> Work:
    """Return the work of so many micro-batches."""

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
