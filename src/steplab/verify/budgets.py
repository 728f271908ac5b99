"""How far from the truth is a tensor, and how far may it be?

What a precision allows is shown by its peers: plain steps in that precision, which have distances
from the truth of their own. A candidate may be a small factor farther off than the worst of them;
the factors are below, with their reasons.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from steplab.verify.numerics import (
    BUFFERS,
    CHOICES,
    SKETCH_SIZE,
    STEPS,
    UPDATE_RULE,
    NumericsSnapshot,
    distance,
    unit_roundoff,
)
from steplab.verify.shapes import PLAIN_DTYPE

# Another implementation of equal care may be twice as far off as the peers.
GROUP_FACTOR = 2.0
# A single tensor may be twice as unlucky as all together: in 25 seeds of two tiny models one of a
# hundred was up to 2.5 times as far off as its peer (a token that changes its expert).
TENSOR_FACTOR = 4.0
# torch's own step in a dtype may be this many times as far off as rounded products alone. Of 18
# honest models with two seeds each the worst tensor was 3.3 times as far off (a router's gradient);
# with a fault in their own bf16 code, 11 models had a tensor that was 24 to 9,000 times.
MAX_DISAGREEMENT = 10.0
# A larger error is not made by the order in which fp32 sums are taken: the model itself rounds to
# 16 bits, or its update makes much of little.
MAX_ORDER_ERROR = 1 / 32
IN_FP32 = ("loss", BUFFERS, UPDATE_RULE)
WHOLE = "all together"
TINY = 1e-300


@dataclass(frozen=True)
class TensorError:
    """The relative error of one tensor, and the most it may have."""

    name: str
    value: float
    budget: float
    share: float  # of the group's norm

    @property
    def excess(self) -> float:
        """Error over budget; above 1 is too much."""
        if self.budget:
            return self.value / self.budget
        return math.inf if self.value else 0.0

    @property
    def undecided(self) -> bool:
        """Whether the tensor would pass even if it were zero."""
        return self.budget >= 1

    def __str__(self) -> str:
        return f"{self.name}: error {self.value:.1e}, budget {self.budget:.1e}"


class Truth:
    """One group of the truth, to which everything else is compared."""

    def __init__(self, group: str, truth: NumericsSnapshot, dtype: str) -> None:
        self.group = group
        self.snapshot = truth
        self.dtype = dtype  # of the candidate
        members = truth.groups[group]
        # Buffers have nothing in common: a mask of ones must not hide the statistics beside it.
        self.unit = {n: float(t.norm()) or 1.0 for n, t in members.items()}
        self.unit = self.unit if group == BUFFERS else dict.fromkeys(members, 1.0)
        self.norms = {n: float(t.norm()) / self.unit[n] for n, t in members.items()}
        if group == CHOICES:  # each is a point on a circle: how many there are
            self.norms = {n: norm**2 for n, norm in self.norms.items()}
        self.whole = max(math.hypot(*self.norms.values()), TINY)

    @property
    def rounding(self) -> float:
        """The relative error of one rounding, which may be the last thing that was done.

        Losses and buffers are summed in fp32 whatever is multiplied, and updates computed in it.
        """
        if self.group in ("weights", CHOICES):
            return 0.0
        return unit_roundoff(PLAIN_DTYPE if self.group in IN_FP32 else self.dtype)

    @property
    def noise(self) -> float:
        """What lies below the rounding of its group is noise, and noise has no relative error."""
        return max(self.rounding * self.whole, TINY)

    def scale(self, name: str) -> float:
        """Return what a tensor's distance is relative to."""
        return max(self.norms[name], self.noise)

    def errors(self, snapshot: NumericsSnapshot) -> dict[str, float]:
        """Return the relative error of every tensor of a snapshot, and of all together.

        That of choices is the share that is unequal, counting one more than there are: who saw none
        flip in so few does not know that none does.
        """
        found, true = snapshot.groups[self.group], self.snapshot.groups[self.group]
        off = {n: distance(found[n], true[n]) / self.unit[n] for n in true}
        if self.group == CHOICES:
            off = {n: apart**2 / 2 + 1 for n, apart in off.items()}
        errors = {n: off[n] / self.scale(n) for n in true}
        return {**errors, WHOLE: math.hypot(*off.values()) / self.whole}


def errors_of(
    group: str,
    candidate: NumericsSnapshot,
    peers: Sequence[NumericsSnapshot],
    truth: NumericsSnapshot,
) -> list[TensorError]:
    """Return the error of every tensor of a group, with its budget.

    A tensor's budget is TENSOR_FACTOR times the error of the worst peer: the tensor's own, or that
    of the whole group where it is larger, since a small tensor may be near the truth by luck. One
    rounding is added. The group as a whole has GROUP_FACTOR times the worst peer's error. In fp32,
    where sums decide, they may be taken in another order. Where the truth itself is of fp32, it may
    be as far off as the shaken peers are from it, and so may the candidate be on top of its own.
    """
    true = Truth(group, truth, candidate.matmul_dtype)
    order = _order_factor(truth.terms) if true.dtype == PLAIN_DTYPE else 1.0
    found, reach = true.errors(candidate), _reach(true, peers, order)
    least = order * true.rounding
    own = {name: 0.0 if truth.exact else off for name, off in reach.items()}
    stored = {n: _storage(group, n, candidate, truth) for n in true.norms}
    errors = []
    for name, norm in true.norms.items():
        extra = stored[name] + _one_flip(true, truth.groups[group][name])
        budget = _tensor_budget(max(reach[name], reach[WHOLE])) + least + own[name]
        budget += extra / true.scale(name) + (norm < true.noise)
        errors.append(TensorError(name, found[name], budget, norm / true.whole))
    budget = GROUP_FACTOR * reach[WHOLE] + least + own[WHOLE]
    budget += math.hypot(*stored.values()) / true.whole
    return [*errors, TensorError(WHOLE, found[WHOLE], budget, 1.0)]


def disagreement(
    group: str, peers: Sequence[NumericsSnapshot], truth: NumericsSnapshot, dtype: str
) -> TensorError | None:
    """Return the tensor for which torch's own step is much farther off than rounded products.

    The candidate runs the model's own code in that dtype, as torch's step does. If that code is
    wrong, the budget would cover its fault.
    """
    if group in ("weights", UPDATE_RULE) or dtype == PLAIN_DTYPE:  # of which no model is part
        return None
    true = Truth(group, truth, dtype)
    rounded, own = true.errors(peers[0]), true.errors(peers[-1])
    odd = []
    stored = {n: _storage(group, n, peers[-1], truth) for n in true.norms}
    kept = {n: off / true.scale(n) for n, off in stored.items()}
    kept[WHOLE] = math.hypot(*stored.values()) / true.whole
    for name, error in own.items():
        budget = MAX_DISAGREEMENT * max(rounded[name], rounded[WHOLE], true.rounding) + kept[name]
        odd.append(TensorError(name, error, budget, 0.0))
    found = worst(odd)
    return found if found.excess > 1 else None


def worst(errors: Sequence[TensorError]) -> TensorError:
    """Return the largest error over its budget; a tensor by its name rather than all together."""
    return max(errors, key=lambda error: (error.excess > 1 and error.name != WHOLE, error.excess))


def _reach(true: Truth, peers: Sequence[NumericsSnapshot], order: float) -> dict[str, float]:
    """Return the error of the worst peer, for every tensor and for all together.

    The last peer is the plain step, whose error counts `order` times while it is that of sums.
    Peers that start from other weights say nothing about weights.
    """
    plain = true.errors(peers[-1])
    reach = {n: max(error, min(order * error, MAX_ORDER_ERROR)) for n, error in plain.items()}
    for peer in peers[:-1] if true.group != "weights" else ():
        reach = {n: max(reach[n], error) for n, error in true.errors(peer).items()}
    return reach


def _tensor_budget(reach: float) -> float:
    """Return what a tensor may be off, whose honest peers are off by `reach`.

    Where TENSOR_FACTOR would let anything pass, the factor is that of a group: an optimizer that
    makes all directions of a gradient equally long (Muon) turns roundings of 1 % into 28 % of an
    update, of which more is not honest.
    """
    wide = TENSOR_FACTOR * reach
    return wide if wide < 1 else GROUP_FACTOR * reach


def _order_factor(terms: int) -> float:
    """Return how much farther off a sum is when its terms are added in sequence, not in pairs.

    Roundings add up like steps of a random walk: sqrt(n) of them against sqrt(log2 n). torch adds
    in pairs, a compiled loop need not: 5.5 times the error for a bias over 128 tokens.
    """
    return math.sqrt(max(terms, 2) / math.log2(max(terms, 2)))


def _one_flip(true: Truth, update: Tensor) -> float:
    """Return the norm of the error when one number moves the other way in one step.

    With rounded products a small tensor has such a number now and then (`lost_signs`).
    """
    if true.group != "update" or true.dtype == PLAIN_DTYPE or not update.numel():
        return 0.0
    return 2 * float(update.abs().max()) / STEPS if update.numel() < SKETCH_SIZE else 0.0


def _storage(group: str, name: str, candidate: NumericsSnapshot, truth: NumericsSnapshot) -> float:
    """Return the norm of what rounding a parameter to the candidate's dtype may cost."""
    if group not in ("weights", "update"):
        return 0.0
    return candidate.roundoff[name] * float(truth.groups["weights"][name].norm())
