"""At which shape, and with how large steps, can right be told from wrong? No torch."""

from __future__ import annotations

from collections.abc import Sequence

from steplab.core import RunSpec
from steplab.core.errors import MeasurementError
from steplab.verify.remote import MAKING_REFERENCES, ReferenceWorker
from steplab.verify.shapes import (
    LIKELY_DTYPES,
    PLAIN_DTYPE,
    REFUSES,
    TRUTH,
    GateShape,
    forms_of_truth,
    one_process,
    own_beside,
    shapes_to_try,
    with_batch,
    with_smaller_steps,
    without_dropout,
)
from steplab.workers.client import Progress


def choose_shapes(
    references: ReferenceWorker,
    spec: RunSpec,
    also_batch: int | None,
    timeout: float,
    stage: Progress,
    say: Progress,
) -> list[GateShape]:
    """Return the shapes at which candidates of `spec` are compared; the truth is in the folder.

    `stage` is told what is being done, `say` what a reader should know.
    """
    shape = _first_that_fits(references, spec, timeout, stage, say)
    shapes = [shape, with_batch(shape, also_batch)] if also_batch else [shape]
    if references.has_dropout(shape.spec, timeout):
        shapes = [without_dropout(one) for one in shapes]
    if spec.mode == "full":
        shapes = _with_steps_that_decide(references, shapes, timeout, stage, say)
    if shape.spec != one_process(spec):
        shapes += _own_beside(references, spec, shapes[0], timeout, stage, say)
    return shapes


def _own_beside(
    references: ReferenceWorker,
    spec: RunSpec,
    smaller: GateShape,
    timeout: float,
    stage: Progress,
    say: Progress,
) -> list[GateShape]:
    """Return the step's own shape, by fp32, where fp64 fits only at a smaller one; or nothing.

    What is measured would else never be compared: a compiler takes other kernels for large tensors
    (Inductor of torch 2.10 to 2.13 lost gradients of norms from 16,384 rows on).
    """
    own = own_beside(spec, smaller)
    stage(f"computing the truth, {own.words}")
    problems = (references.reference(own, name, timeout) for name in (TRUTH, PLAIN_DTYPE))
    problem = next(filter(None, problems), "")
    if not problem and spec.mode == "full":
        (own,) = _with_steps_that_decide(references, [own], timeout, stage, lambda text: None)
        problem = _why_undecided(references, [own], PLAIN_DTYPE, timeout)
    if problem:
        say(f"compared {smaller.words} only: at the step's own shape {problem}")
        return []
    say(f"fp64 fits only {smaller.words}: at the step's own shape fp32 is the truth")
    return [own]


def _first_that_fits(
    references: ReferenceWorker, spec: RunSpec, timeout: float, stage: Progress, say: Progress
) -> GateShape:
    problems = []
    for shape in shapes_to_try(spec):
        refusals: list[str] = []
        for form in forms_of_truth(shape):
            where = form.words or "at the step's own shape"
            stage(f"computing the truth, {where}")
            problem = references.reference(form, TRUTH, timeout)
            if not problem:
                if refusals:
                    say(f"{'; '.join(refusals)}; so {_instead(form)}")
                return form
            refusals.append(f"{where}: {problem}")
            if not problem.startswith(REFUSES):  # it does not fit: at another shape it may
                break
        problems += refusals
    raise MeasurementError(
        f"Nothing could be verified, for want of a truth ({'; '.join(problems)}).",
        _remedy(problems),
    )


def _remedy(problems: Sequence[str]) -> str:
    refusals = sum(REFUSES in problem for problem in problems)
    if refusals == len(problems):  # at any shape
        return "Let the model run in fp64."
    smaller = "a smaller --batch"
    return f"Let the model run in fp64, or choose {smaller}." if refusals else f"Choose {smaller}."


def _instead(form: GateShape) -> str:
    if form.narrow:
        return (
            "fp32 at the highest precision is the truth, and every budget grows by what fp32 "
            "itself may be off"
        )
    return "its operators are computed in fp64 one by one"


def _with_steps_that_decide(
    references: ReferenceWorker,
    shapes: list[GateShape],
    timeout: float,
    stage: Progress,
    say: Progress,
) -> list[GateShape]:
    """Return the shapes, with smaller steps where only after these right and wrong differ."""
    stage(MAKING_REFERENCES)
    smaller = [with_smaller_steps(shape) for shape in shapes]
    for dtype in LIKELY_DTYPES:
        undecided = _why_undecided(references, shapes, dtype, timeout)
        if not undecided:
            continue
        if not _why_undecided(references, smaller, dtype, timeout):
            say(f"{undecided}: the gate takes smaller steps")
            return smaller
        say(f"{undecided}, also after smaller steps")
    return shapes


def _why_undecided(
    references: ReferenceWorker, shapes: Sequence[GateShape], dtype: str, timeout: float
) -> str:
    """Return why even an honest step in `dtype` would not pass at one of the shapes, or ""."""
    for shape in shapes:
        if any(references.reference(shape, name, timeout) for name in (TRUTH, dtype)):
            continue
        reason = references.why_undecided(shape, dtype, timeout)
        if reason:
            return reason
    return ""
