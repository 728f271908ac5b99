"""Evidence: what a step computes, from its first weights on, as sketches that can be compared."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from steplab.engine.assemble import micro_batches
from steplab.engine.gate.sketch import sketch
from steplab.engine.step import Step
from steplab.errors import MeasurementError
from steplab.modules.one_pass_adamw import MASTER
from steplab.spec import RunSpec

# Steps that are compared. A whole-step graph runs three of them plainly, captures in the next and
# is replayed after that, so the last ones show what it computes.
STEPS = 8
GRADIENT_STEPS = 2  # the first ones, run op by op: a replayed graph shows no gradients
MOST_REPEATS = 20  # of a step that a gradient scaler skips; it halves from 65,536


@dataclass(frozen=True)
class Evidence:
    """Sketches in fp64 on the CPU. `first_seconds` is the first step's time, compilation included.

    Groups by name: "weights" (as assembled), "outputs" (predictions and metrics), "loss" (one per
    step), "gradients" (of each parameter, in each gradient step), "update" (how far each
    parameter has moved after all steps), "batches" (what was fed).
    """

    groups: Mapping[str, Mapping[str, Tensor]]
    roundoff: Mapping[str, float]  # of each parameter's dtype, or of what it is a copy of
    matmul_dtype: str  # as declared by the techniques
    terms: int  # numbers in the largest tensor of a micro-batch: how long a sum may get
    first_seconds: float = 0.0


def gather(step: Step, spec: RunSpec, rate: float = 1.0, doubled: bool = False) -> Evidence:
    """Run STEPS steps of a freshly assembled step, whose learning rate is multiplied by `rate`.

    Random numbers are seeded anew, so that every process draws the same batches. With `doubled` the
    model has been cast to fp64.
    """
    _slow_down(step, rate)
    torch.manual_seed(spec.seed)
    feed = micro_batches(step, spec)
    batches = [next(feed) for _ in range(STEPS)]
    groups = {"batches": {f"batch {n}": _all(batch) for n, batch in enumerate(batches)}}
    if not doubled:
        return _run(step, batches, groups)
    torch.set_default_dtype(torch.float64)  # for what a model makes anew in its forward pass
    try:
        return _run(step, tree_map(_to_double, batches), groups)
    finally:
        torch.set_default_dtype(torch.float32)


def _slow_down(step: Step, rate: float) -> None:
    """Multiply the learning rates; not undone: the time of a step does not depend on them."""
    for group in step.optimizer.param_groups if step.optimizer else ():
        if "lr" in group:
            group["lr"] = group["lr"] * rate  # not in place: groups may share a tensor


def _run(step: Step, batches: list[Any], groups: dict[str, dict[str, Tensor]]) -> Evidence:
    weights = groups["weights"] = _parameters(step)
    start = perf_counter()
    groups["outputs"] = _predictions(step, batches[0][0])
    seconds = perf_counter() - start
    if step.mode != "infer":
        seconds = _train(step, batches, groups)
    if step.mode == "full":
        moved = _parameters(step)
        groups["update"] = {name: moved[name] - weights[name] for name in weights}
    exact = {name: _exact(step, p) for name, p in step.model.named_parameters()}
    roundoff = {name: torch.finfo(weight.dtype).eps / 2 for name, weight in exact.items()}
    terms = max((x.numel() for x in tree_leaves(batches[0]) if isinstance(x, Tensor)), default=1)
    return Evidence(groups, roundoff, step.parts.matmul_dtype, terms, seconds)


def _train(step: Step, batches: list[Any], groups: dict[str, dict[str, Tensor]]) -> float:
    """Run the steps and add "loss" and "gradients"; return the seconds of the first one."""
    losses: list[Tensor] = []
    gradients: dict[str, Tensor] = {}
    seconds = 0.0
    for number, batch in enumerate(batches):
        start = perf_counter()
        if number < GRADIENT_STEPS:
            with _watched_gradients(step, gradients, number):
                output = _until_taken(step, step.run, batch)
        else:
            output = _until_taken(step, step, batch)
        losses.append(output.loss.detach().double().cpu())
        seconds = seconds or perf_counter() - start
        if number == 0:
            groups["outputs"] |= _metrics(output.metrics)
    groups["loss"] = {f"step {number}": loss for number, loss in enumerate(losses)}
    groups["gradients"] = gradients
    return seconds


def _until_taken(step: Step, run: Any, batch: Any) -> Any:
    """Run a step; one whose update a gradient scaler skipped changed nothing and is repeated."""
    scaler = step.parts.scaler
    for _ in range(MOST_REPEATS):
        before = scaler.get_scale()
        output = run(batch)
        if step.mode != "full" or scaler.get_scale() >= before:
            return output
    raise MeasurementError("The gradients overflow at any scale: every update is skipped.")


@contextlib.contextmanager
def _watched_gradients(step: Step, found: dict[str, Tensor], number: int) -> Iterator[None]:
    """Sketch every gradient after the backward pass: unscaled, and before clipping."""

    @contextlib.contextmanager
    def watch(phase: str) -> Iterator[None]:
        yield
        if phase == "backward":
            scale = step.parts.scaler.get_scale()
            for name, p in step.model.named_parameters():
                gradient = torch.zeros_like(p) if p.grad is None else p.grad
                found[f"{name} in step {number}"] = sketch(gradient) / scale

    before, step.watch = step.watch, watch
    try:
        yield
    finally:
        step.watch = before


@torch.no_grad()
def _predictions(step: Step, batch: Any) -> dict[str, Tensor]:
    """Sketch what the model predicts; in training run eagerly, which saves a second compilation."""
    eager = contextlib.nullcontext()
    if step.mode != "infer":
        eager = torch.compiler.set_stance("force_eager")
    with eager, step.parts.forward_context():
        found = step.workload.predict(step.model, batch)
    return {f"prediction {n}": s for n, s in enumerate(_floats(found))}


def _metrics(metrics: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: sketch(m) for name, m in metrics.items() if m.is_floating_point()}


def _floats(tree: Any) -> list[Tensor]:
    leaves = tree_leaves(tree)
    return [sketch(x) for x in leaves if isinstance(x, Tensor) and x.is_floating_point()]


def _all(batch: Any) -> Tensor:
    """Return one sketch for all tensors of a batch."""
    parts = [sketch(x) for x in tree_leaves(batch) if isinstance(x, Tensor)]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)


def _parameters(step: Step) -> dict[str, Tensor]:
    return {name: sketch(_exact(step, p)) for name, p in step.model.named_parameters()}


def _exact(step: Step, p: nn.Parameter) -> Tensor:
    """Return the weights of which a parameter is the rounded copy, if it is; else itself.

    In bf16 alone small updates cannot be told from rounding.
    """
    kept = step.optimizer.state.get(p, {}) if step.optimizer else {}
    master = kept.get(MASTER)
    return master if master is not None and torch.equal(master.to(p.dtype), p) else p


def _to_double(leaf: Any) -> Any:
    return leaf.double() if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf
