"""Does a winner still train as the plain step does, long after the steps that were compared?

Eight steps see nothing that begins later. After 64 the weights are chaos, but these curves are not:
the loss, and in each quarter of the steps how far parameters and buffers move, and what metrics are
on average. Before that the optimizer is asked by itself, with gradients that are given.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from steplab.core import RunSpec
from steplab.core.ladder import Check
from steplab.step.trial import clean_up
from steplab.techniques.recipes import alone
from steplab.verify.judge import judge
from steplab.verify.numerics import load_references
from steplab.verify.references import make_references, snapshot_without_dropout
from steplab.verify.shapes import REFUSES, TRUTH, forms_of_truth, shape_of_curves


def check_curves(spec: RunSpec, folder: Path) -> tuple[Check, ...]:
    """Compare the curves of a recipe with those of the plain step and of its peers.

    In one process: how ranks share a step has been compared before.
    """
    forms = forms_of_truth(shape_of_curves(spec))
    here = replace(forms[0].spec, recipe=alone(spec.recipe))
    try:
        found = snapshot_without_dropout(here, curves=True, chosen_batch=spec.batch)
    finally:
        clean_up()
    for shape in forms:
        if not make_references(shape, TRUTH, folder).startswith(REFUSES):
            break
    for rounding in (TRUTH, found.rounding):
        problem = make_references(shape, rounding, folder)
        if problem:
            return (Check(f"curves {shape.words}", False, f"unverified: {problem}"),)
    truth, *peers = load_references(folder, shape.name, found.rounding)
    return judge(found, peers, truth, shape.words)
