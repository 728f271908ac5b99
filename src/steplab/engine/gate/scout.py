"""The scout's side of the gate: makes the references, and looks at recipes before they are tried.

It runs in a process of its own that is never measured, so what it leaves behind matters to nobody.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from steplab.engine.assemble import assemble, micro_batches
from steplab.engine.gate.evidence import Evidence
from steplab.engine.gate.files import load_references, reference_path, save
from steplab.engine.gate.judge import judge
from steplab.engine.gate.shapes import TRUTH, GateShape, references_of
from steplab.engine.gate.truth import dropouts, fresh, reference
from steplab.engine.trial import clean_up, error_sentence, is_out_of_memory
from steplab.errors import MeasurementError, SteplabError, UserError
from steplab.spec import RunSpec


def make_references(shape: GateShape, dtype: str, folder: Path) -> str:
    """Write what candidates of `dtype` are held against; return why it cannot be had, or ""."""
    with _half_the_threads():
        problems = (_make(shape, name, folder) for name in references_of(dtype))
        return next(filter(None, problems), "")


@contextlib.contextmanager
def _half_the_threads() -> Iterator[None]:
    """Leave cores to others: on a busy machine every barrier waits for a thread that is not run.

    Beside two busy processes on two cores fp64 took 3 to 11 s with two threads and 1.4 to 1.7 s
    with one; alone 0.7 and 1.1 s. Nothing is measured here.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, threads // 2))
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _make(shape: GateShape, dtype: str, folder: Path) -> str:
    path = reference_path(folder, shape.name, dtype)
    if path.exists():
        return ""
    try:
        evidence = reference(shape.spec, dtype, shape.rate)
    except Exception as error:
        if is_out_of_memory(error):
            return f"{dtype} does not fit"
        if dtype == TRUTH:  # of any other dtype only its own candidates are left out
            _refuse_broken_step(shape, error)
        return f"the model does not run in {dtype}: {error_sentence(error)}"
    finally:
        clean_up()
    if dtype == TRUTH:
        _refuse_endless_loss(evidence)
    save(evidence, path)
    return ""


def _refuse_broken_step(shape: GateShape, seen: Exception) -> None:
    """Raise what fails in any dtype in its own words: then it is no matter of fp64."""
    if isinstance(seen, UserError):
        raise seen
    try:
        step = fresh(shape.spec)
        step(next(micro_batches(step, shape.spec)))
    except SteplabError:
        raise
    except Exception as error:
        if not is_out_of_memory(error):
            raise MeasurementError(f"The step fails: {error_sentence(error)}.") from None


def _refuse_endless_loss(truth: Evidence) -> None:
    """Nothing can be held against a loss that is NaN or infinite in fp64, at any shape."""
    for step, loss in truth.groups.get("loss", {}).items():
        if not math.isfinite(loss):
            raise MeasurementError(
                f"The loss of the plain step is {float(loss)} in fp64 ({step}), so no recipe "
                "can be held against it.",
                "Check the model, its batches and its learning rate.",
            )


def cannot_tell(shape: GateShape, dtype: str, folder: Path) -> str:
    """Return why the update of an honest step in `dtype` would not pass, or "".

    The references of the shape lie in the folder.
    """
    truth, *peers = load_references(folder, shape.name, dtype)
    checks = judge(replace(peers[-1], matmul_dtype=dtype), peers, truth, "")
    return next((c.detail for c in checks if c.name == "update" and not c.passed), "")


def has_dropout(spec: RunSpec) -> bool:
    """Whether the model of `spec` drops something at random."""
    try:
        return bool(dropouts(assemble(spec).model))
    finally:
        clean_up()


def look_at(spec: RunSpec, shape: GateShape) -> dict[str, Any]:
    """Assemble a recipe at the gate's shape and run one forward pass eagerly.

    What it cannot do here is raised in its own words, in a tenth of a second instead of a process
    of its own. Returns the dtype that it declares for matrix products.
    """
    here = replace(shape.spec, recipe=spec.recipe)
    try:
        step = assemble(here)
        batch = next(micro_batches(step, here))[0]
        run = step.workload.predict if here.mode == "infer" else step.workload.loss
        eager = torch.compiler.set_stance("force_eager")
        with eager, torch.no_grad(), step.parts.forward_context():
            run(step.model, batch)
        return {"dtype": step.parts.matmul_dtype}
    finally:
        clean_up()
