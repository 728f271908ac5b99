"""Does a step draw at random as the plain one does? By statistics: no two draw the same numbers.

Numerics are compared without chance (`noise.py`). Here dropout is on and noise is noise, the
weights stay where they are, and one batch is taken many times: mean and spread of loss and
gradients over the draws must be those of the plain step. A mask that is left out, applied twice,
not scaled, or replayed forever shows.
"""

from __future__ import annotations

import math
from time import perf_counter

import torch
from torch import Tensor
from torch.nn import functional

from steplab.core import RunSpec
from steplab.core.ladder import Check
from steplab.step.assemble import micro_batches
from steplab.step.step import Step
from steplab.verify.numerics import (
    Gradients,
    NumericsSnapshot,
    run_until_updated,
    scale_learning_rates,
    unit_roundoff,
)

DRAWS = 32
NUMBERS = 64  # that are kept of each gradient: sums over parts of it
# In standard errors. Ten seeds of a tiny model in bf16 with other draws: 2.2 at most. What is kept
# not scaled: 10 or more; dropout applied three times: 20; one mask forever, or none: 25.
MAX_DEVIATION = 5.0
LOSS = "loss"


def take_draws(step: Step, spec: RunSpec) -> NumericsSnapshot:
    """Run one batch many times without moving the weights; keep the losses and the gradients."""
    scale_learning_rates(step, 0.0)
    torch.manual_seed(spec.seed)
    batch = next(micro_batches(step, spec))
    rows: dict[str, list[Tensor]] = {}
    start, seconds = perf_counter(), 0.0
    for _ in range(DRAWS):
        gradients = Gradients(step)
        with gradients.watched(0):
            output = run_until_updated(step, step.run, batch)
        seconds = seconds or perf_counter() - start
        rows.setdefault(LOSS, []).append(output.loss.detach().double().cpu().view(1))
        for name, gradient in gradients.sketches.items():
            rows.setdefault(name.removesuffix(" in step 0"), []).append(_folded(gradient))
    for _ in range(DRAWS if step.graph is not None else 0):
        output = run_until_updated(step, step, batch)
        rows.setdefault("replayed loss", []).append(output.loss.detach().double().cpu().view(1))
    groups = {"draws": {name: torch.stack(found) for name, found in rows.items()}}
    return NumericsSnapshot(groups, {}, step.parts.matmul_dtype, 1, seconds)


def check_draws(candidate: NumericsSnapshot, plain: NumericsSnapshot) -> Check:
    """Compare the statistics of two steps' draws."""
    found, expected = dict(candidate.groups["draws"]), plain.groups["draws"]
    replayed = found.pop("replayed loss", expected[LOSS])
    rounding = unit_roundoff(candidate.matmul_dtype)
    apart = {n: _deviation(expected[n], found[n], rounding) for n in expected if n in found}
    loss = max(apart.pop(LOSS), _deviation(expected[LOSS], replayed, rounding))
    names = [*apart]
    gradients = 0.0
    if names:
        before, after = (torch.cat([one[n] for n in names], 1) for one in (expected, found))
        gradients = _deviation(before, after, rounding)
    worst = max(loss, gradients)
    name = LOSS if loss >= gradients else f"the gradient of {max(names, key=apart.__getitem__)}"
    detail = (
        f"{name} over {DRAWS} draws: mean or spread {worst:.1f} standard errors from the plain "
        f"step's, at most {MAX_DEVIATION:g}"
    )
    return Check("random draws", worst <= MAX_DEVIATION, detail, worst / MAX_DEVIATION)


def _deviation(a: Tensor, b: Tensor, rounding: float) -> float:
    """Return how many standard errors the means, or the spreads, of two sets of rows are apart."""
    if not (a.isfinite().all() and b.isfinite().all()):
        return math.inf
    mean_a, mean_b = a.mean(0), b.mean(0)
    spread_a, spread_b = ((x - x.mean(0)).square().sum(1) for x in (a, b))
    least = (4 * rounding * float(mean_a.norm())) ** 2  # what rounding alone may do
    of_mean = (float(spread_a.mean() + spread_b.mean()) / len(a) + least) ** 0.5
    of_spread = (float(spread_a.var() + spread_b.var()) / len(a)) ** 0.5 + least
    if not of_mean:
        return 0.0
    means = float((mean_a - mean_b).norm()) / of_mean
    return max(means, abs(float(spread_a.mean() - spread_b.mean())) / of_spread)


def _folded(sketch: Tensor) -> Tensor:
    short = -len(sketch) % NUMBERS
    return functional.pad(sketch, (0, short)).view(-1, NUMBERS).sum(0)
