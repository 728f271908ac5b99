"""Where numerics are compared: shapes at which fp64 fits, steps after which it tells. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from steplab.engine.gate.remote import Scout
from steplab.engine.gate.shapes import (
    TRUTH,
    GateShape,
    gentler,
    shapes_to_try,
    with_batch,
    without_dropout,
)
from steplab.errors import MeasurementError
from steplab.spec import RunSpec
from steplab.tune.state import LadderFolder
from steplab.tune.view import View

LIKELY = ("fp32", "bf16")  # what candidates declare sooner or later; the quicker one first


def find_shapes(
    scout: Scout,
    spec: RunSpec,
    also_batch: int | None,
    folder: LadderFolder,
    timeout: float,
    view: View,
) -> tuple[GateShape, ...]:
    """Return the shapes at which numerics are compared, with the truth of each in the folder."""
    shapes = folder.load_shapes()
    if not shapes:
        shape = _first_that_fits(scout, spec, timeout, view)
        shapes = [shape, with_batch(shape, also_batch)] if also_batch else [shape]
        if scout.has_dropout(shape.spec, timeout):
            shapes = [without_dropout(one) for one in shapes]
        if spec.mode == "full":
            shapes = _steps_that_tell(scout, shapes, timeout, view)
    for shape in shapes:
        problem = scout.reference(shape, TRUTH, timeout)
        if problem:
            raise MeasurementError(f"No speed-up could be verified {shape.words}: {problem}.")
        for dtype in LIKELY if spec.device == "cuda" else ():  # while there is room for fp64
            scout.reference(shape, dtype, timeout)
    folder.save_shapes(shapes)
    return tuple(shapes)


def _first_that_fits(scout: Scout, spec: RunSpec, timeout: float, view: View) -> GateShape:
    problems = []
    for shape in shapes_to_try(spec):
        where = shape.words or "at the step's own shape"
        view.stage(f"computing the truth in fp64, {where}")
        problem = scout.reference(shape, TRUTH, timeout)
        if not problem:
            return shape
        problems.append(f"{where}: {problem}")
    raise MeasurementError(
        f"No speed-up could be verified, for want of a truth in fp64 ({'; '.join(problems)}).",
        "Let the model run in fp64, or choose a smaller --batch.",
    )


def _steps_that_tell(
    scout: Scout, shapes: list[GateShape], timeout: float, view: View
) -> list[GateShape]:
    """Return the shapes, with smaller steps where only after these right and wrong differ."""
    view.stage("computing the references")
    smaller = [gentler(shape) for shape in shapes]
    for dtype in LIKELY:
        blind = _blind(scout, shapes, dtype, timeout)
        if not blind:
            continue
        if not _blind(scout, smaller, dtype, timeout):
            view.say(f"update in {dtype}: {blind}: the gate takes smaller steps")
            return smaller
        view.say(f"update in {dtype}: {blind}, also after smaller steps")
    return shapes


def _blind(scout: Scout, shapes: Sequence[GateShape], dtype: str, timeout: float) -> str:
    """Return why even an honest update in `dtype` would not pass at one of the shapes, or ""."""
    for shape in shapes:
        if scout.reference(shape, TRUTH, timeout) or scout.reference(shape, dtype, timeout):
            continue
        reason = scout.cannot_tell(shape, dtype, timeout)
        if reason:
            return reason
    return ""
