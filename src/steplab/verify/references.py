"""The references of the gate: the plain step in fp64, and its peers in lower precision.

They are computed in a process of its own that is never measured, so what they leave behind there
does not matter.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from steplab.core import PLAIN, RunSpec
from steplab.core.errors import MeasurementError, SteplabError, UserError
from steplab.step.assemble import assemble, micro_batches
from steplab.step.failures import error_sentence, is_out_of_memory
from steplab.step.loop import forward_eagerly
from steplab.step.step import Step
from steplab.step.trial import clean_up
from steplab.verify.judge import judge
from steplab.verify.numerics import (
    NumericsSnapshot,
    load_references,
    reference_path,
    save_snapshot,
    take_snapshot,
)
from steplab.verify.rounding import RoundedProducts
from steplab.verify.shapes import AUTOCAST, ROUNDED, TRUTH, GateShape, references_of


def make_references(shape: GateShape, dtype: str, folder: Path) -> str:
    """Write what candidates of `dtype` are judged by; return why it cannot be had, or ""."""
    with _half_of_the_threads():
        problems = (_make_reference(shape, name, folder) for name in references_of(dtype))
        return next(filter(None, problems), "")


@contextlib.contextmanager
def _half_of_the_threads() -> Iterator[None]:
    """Leave cores to others: on a busy machine every barrier waits for a thread without a core.

    Beside two busy processes on two cores fp64 took 3 to 11 s with two threads and 1.4 to 1.7 s
    with one; alone 0.7 and 1.1 s. Nothing is measured here.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads // 2))
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _make_reference(shape: GateShape, dtype: str, folder: Path) -> str:
    path = reference_path(folder, shape.name, dtype)
    if path.exists():
        return ""
    try:
        snapshot = compute_reference(shape.spec, dtype, shape.rate)
    except Exception as error:
        if is_out_of_memory(error):
            return f"{dtype} does not fit"
        if dtype == TRUTH:  # without any other dtype only its own candidates are left out
            _refuse_broken_step(shape, error)
        return f"the model does not run in {dtype}: {error_sentence(error)}"
    finally:
        clean_up()
    if dtype == TRUTH:
        _refuse_nonfinite_loss(snapshot)
    save_snapshot(snapshot, path)
    return ""


def _refuse_broken_step(shape: GateShape, seen: Exception) -> None:
    """Raise what fails in any dtype in its own words: then fp64 is not the reason."""
    if isinstance(seen, UserError):
        raise seen
    try:
        step = step_without_dropout(shape.spec)
        step(next(micro_batches(step, shape.spec)))
    except SteplabError:
        raise
    except Exception as error:
        if not is_out_of_memory(error):
            raise MeasurementError(f"The step fails: {error_sentence(error)}.") from None


def _refuse_nonfinite_loss(truth: NumericsSnapshot) -> None:
    """Nothing can be judged by a loss that is NaN or infinite in fp64, at any shape."""
    for step, loss in truth.groups.get("loss", {}).items():
        if not math.isfinite(loss):
            raise MeasurementError(
                f"The loss of the plain step is {float(loss)} in fp64 ({step}), so no recipe "
                "can be judged by it.",
                "Check the model, its batches and its learning rate.",
            )


def compute_reference(spec: RunSpec, name: str, rate: float = 1.0) -> NumericsSnapshot:
    """Return what the plain step of `spec` computes, by one of the names of `references_of`.

    "fp64" is the truth and "fp32" the plain step as it is. "bf16-rounded" is the truth with the
    factors and results of every matrix product rounded to bf16, which the precision cannot avoid.
    "bf16-autocast" is the plain step under torch's autocast, which also rounds between products.
    The learning rate is multiplied by `rate`.
    """
    step = step_without_dropout(replace(spec, recipe=PLAIN))
    dtype, _, how = name.partition("-")
    if how == AUTOCAST:
        _lower_precision(step, dtype)
    if name == TRUTH or how == ROUNDED:
        step.model.double()
        rounding = RoundedProducts(dtype) if how else contextlib.nullcontext()
        with rounding:
            return take_snapshot(step, spec, rate, doubled=True)
    return take_snapshot(step, spec, rate)


def _lower_precision(step: Step, dtype: str) -> None:
    """Let torch itself run the step in tf32, bf16 or fp16."""
    kind = step.parts.device.type
    if dtype == "tf32":
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.allow_tf32 = True
        return
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
    step.parts.forward_context = lambda: torch.autocast(kind, dtype=half)
    if half is torch.float16:
        step.parts.scaler = torch.amp.GradScaler(kind)


def step_without_dropout(spec: RunSpec) -> Step:
    """Return a step whose dropout is off: implementations draw different random numbers."""
    step = assemble(spec)
    for module, name in find_dropout(step.model):
        setattr(module, name, 0.0)
    return step


def find_dropout(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """Return the modules that drop something, and the name of the attribute that says how much."""
    found = []
    for module in model.modules():
        name = "p" if isinstance(module, nn.modules.dropout._DropoutNd) else "dropout"
        share = getattr(module, name, None)
        if isinstance(share, float) and share > 0:
            found.append((module, name))
    return found


def why_undecided(shape: GateShape, dtype: str, folder: Path) -> str:
    """Return why the update of an honest step in `dtype` would not pass, or "".

    The references of the shape lie in the folder.
    """
    truth, *peers = load_references(folder, shape.name, dtype)
    checks = judge(replace(peers[-1], matmul_dtype=dtype), peers, truth, "")
    return next((c.detail for c in checks if c.name == "update" and not c.passed), "")


def has_dropout(spec: RunSpec) -> bool:
    """Whether the model of `spec` drops something at random."""
    try:
        return bool(find_dropout(assemble(spec).model))
    finally:
        clean_up()


def dry_run(spec: RunSpec, shape: GateShape) -> str:
    """Assemble a recipe at the gate's shape and run one forward pass eagerly.

    What it cannot do here is raised in its own words, in a tenth of a second instead of a process
    of its own. Returns the dtype that it declares for matrix products.
    """
    here = replace(shape.spec, recipe=spec.recipe)
    try:
        step = assemble(here)
        forward_eagerly(step, here.mode, next(micro_batches(step, here))[0])
        return step.parts.matmul_dtype
    finally:
        clean_up()
