"""Does a step draw at random as the plain one does?

Numerics are compared without chance (`noise.py`). Here dropout is on and noise is noise, the
weights stay where they are, and one batch is taken many times. Most implementations draw other
numbers than the plain step, so mean and spread of loss and gradients over the draws are compared: a
mask that is left out, applied twice, not scaled, shared by the rows or replayed shows.
Where the losses are those of the plain step draw by draw, the same numbers were drawn: then the
gradients must be, too, or the backward pass has drawn others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map

from steplab.core import RunSpec
from steplab.core.ladder import Check
from steplab.step.assemble import micro_batches
from steplab.step.step import Step
from steplab.verify.noise import seed_all
from steplab.verify.numerics import (
    Gradients,
    NumericsSnapshot,
    run_until_updated,
    scale_learning_rates,
    unit_roundoff,
)

DRAWS = 32
NUMBERS = 64  # that are kept of each gradient: sums over parts of it
# In standard errors. 25 seeds of three tiny models with other draws, in fp32 and bf16: 3.0 at most.
# Rows that share a mask: 8; what is kept not scaled: 10 or more; dropout applied three times: 20;
# one mask forever, or none: 25.
MAX_DEVIATION = 5.0
# Of the spread over the draws. Nearer to the plain step's, draw by draw, is by the same numbers.
# Six tiny models in bf16: losses 0.07 at most, gradients 0.03; another mask in the backward: 0.9.
MAX_APART = 0.25
TWIN = 1e-3  # of the spread: nearer to each other, two losses are of the same draw
LOSS = "loss"
NAME = "random draws"
# Groups of draws. Equal rows show masks that rows share; steps in a row, as a loop runs them, those
# that come back: each of the others begins with a seed of its own.
OWN_ROWS, EQUAL_ROWS, IN_A_ROW = "own rows", "equal rows", "in a row"


def take_draws(step: Step, spec: RunSpec) -> NumericsSnapshot:
    """Run one batch many times without moving the weights; keep the losses and the gradients."""
    scale_learning_rates(step, 0.0)
    seed_all(spec.seed)
    batch = next(micro_batches(step, spec))
    start = perf_counter()
    run_until_updated(step, step.run, batch)
    seconds = perf_counter() - start
    groups = {OWN_ROWS: _draw(step, batch, DRAWS, spec.seed)}
    equal = [_with_equal_rows(one, spec.batch) for one in batch]
    groups[EQUAL_ROWS] = _draw(step, equal, DRAWS // 2, spec.seed)
    losses = [_one_number(run_until_updated(step, step, batch).loss) for _ in range(DRAWS)]
    groups[IN_A_ROW] = {LOSS: torch.stack(losses)}
    return NumericsSnapshot(groups, {}, step.parts.matmul_dtype, 1, seconds)


def _draw(step: Step, batch: list[Any], draws: int, seed: int) -> dict[str, Tensor]:
    """Return a row per draw of the loss and of every gradient."""
    rows: dict[str, list[Tensor]] = {}
    for draw in range(draws):
        seed_all(seed + draw)
        gradients = Gradients(step)
        with gradients.watched(0):
            output = run_until_updated(step, step.run, batch)
        rows.setdefault(LOSS, []).append(_one_number(output.loss))
        for name, gradient in gradients.sketches.items():
            rows.setdefault(name.removesuffix(" in step 0"), []).append(_folded(gradient))
    return {name: torch.stack(found) for name, found in rows.items()}


def _one_number(loss: Tensor) -> Tensor:
    return loss.detach().double().cpu().view(1)


def _with_equal_rows(batch: Any, size: int) -> Any:
    """Return the batch with its first row in the place of all others, where all tensors have rows.

    What equal rows do to the loss differs by their draws alone, and averages out. A mask that they
    share adds up instead; over rows that differ it would not show.
    """
    tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)]
    if not all(one.ndim and len(one) == size for one in tensors):
        return batch
    return tree_map(lambda x: _first_row_repeated(x) if isinstance(x, Tensor) else x, batch)


def _first_row_repeated(x: Tensor) -> Tensor:
    """Return a copy of a tensor, all of whose rows are the first, with the strides of the original.

    Compiled code would be compiled again for others. Rows that overlap cannot keep them.
    """
    wanted = x[:1].expand_as(x)
    equal = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    once = tuple(slice(None) if stride else slice(0, 1) for stride in x.stride())
    equal[once] = wanted[once]
    return equal if torch.equal(equal, wanted) else wanted.clone()


def check_draws(candidate: NumericsSnapshot, plain: NumericsSnapshot) -> Check:
    """Compare the draws of two steps: by their statistics, and one by one where they are alike."""
    rounding = unit_roundoff(candidate.matmul_dtype)
    expected = {**plain.groups, IN_A_ROW: {LOSS: plain.groups[OWN_ROWS][LOSS]}}
    found = []
    for rows, group in candidate.groups.items():
        found.append(_check_statistics(group, expected[rows], rounding))
        found.append(_check_repeats(group[LOSS], expected[rows][LOSS]))
    found.append(_check_pairs(candidate.groups[OWN_ROWS], expected[OWN_ROWS], rounding))
    return max(found, key=lambda check: check.excess)


def _check_statistics(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], rounding: float
) -> Check:
    apart = {n: _deviation(expected[n], found[n], rounding) for n in expected if n in found}
    loss = apart.pop(LOSS)
    before, after = _side_by_side(expected, [*apart]), _side_by_side(found, [*apart])
    worst = max(loss, _deviation(before, after, rounding))
    name = LOSS if loss == worst else f"the gradient of {max(apart, key=apart.__getitem__)}"
    detail = (
        f"{name} over {len(found[LOSS])} draws: mean or spread {worst:.1f} standard errors from "
        f"the plain step's, at most {MAX_DEVIATION:g}"
    )
    return Check(NAME, worst <= MAX_DEVIATION, detail, worst / MAX_DEVIATION)


def _check_repeats(found: Tensor, expected: Tensor) -> Check:
    """Compare how many draws have a twin: the same mask twice is the same loss twice."""
    twins = _twins(expected), _twins(found)
    share = sum(twins) / 2 / len(found)
    error = (2 * share * (1 - share) / len(found)) ** 0.5
    apart = max((twins[1] - twins[0]) / len(found) / error, 0.0) if error else 0.0
    detail = (
        f"{LOSS} over {len(found)} draws: {twins[1]} of them were drawn before, {twins[0]} of the "
        f"plain step's: {apart:.1f} standard errors more, at most {MAX_DEVIATION:g}"
    )
    return Check(NAME, apart <= MAX_DEVIATION, detail, apart / MAX_DEVIATION)


def _twins(losses: Tensor) -> int:
    """Return how many losses are also those of another draw."""
    apart = (losses - losses.T).abs() + torch.diag(torch.full((len(losses),), math.inf))
    return int((apart.amin(1) <= TWIN * float(losses.std())).sum())


def _check_pairs(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], rounding: float
) -> Check:
    """Compare gradients draw by draw, if the losses say that the same numbers were drawn."""
    apart = {n: _apart(expected[n], found[n], rounding) for n in expected if n in found}
    if _apart(expected[LOSS], found[LOSS]) > MAX_APART or len(apart) == 1:
        return Check(NAME, True, "other numbers are drawn")
    del apart[LOSS]
    before, after = _side_by_side(expected, [*apart]), _side_by_side(found, [*apart])
    worst = _apart(before, after, rounding)
    detail = (
        f"the gradient of {max(apart, key=apart.__getitem__)} where the same numbers are drawn "
        f"for the loss: {worst:.2f} of its spread from the plain step's, at most {MAX_APART:g}"
    )
    return Check(NAME, worst <= MAX_APART, detail, worst / MAX_APART)


def _side_by_side(draws: Mapping[str, Tensor], names: Sequence[str]) -> Tensor:
    """Return all gradients of each draw in one row."""
    return torch.cat([draws[LOSS][:, :0], *(draws[name] for name in names)], 1)


def _apart(a: Tensor, b: Tensor, rounding: float = 0.0) -> float:
    """Return how far rows are from those in their place, relative to their spread."""
    spread = float((a - a.mean(0)).square().sum(1).mean()) ** 0.5
    least = 4 * rounding * float(a.mean(0).norm())  # what rounding alone may do
    off = float((a - b).square().sum(1).mean()) ** 0.5
    return max(off - least, 0.0) / spread if spread else 0.0


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
