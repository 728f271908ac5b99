"""Is a candidate as near to the truth as its precision allows?

The truth is the plain step in fp64. What a precision allows is shown by its peers: the plain step
in that precision, which has a distance from the truth of its own. A candidate may be a small factor
farther off; the factors are below, with their reasons.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from steplab.core.ladder import BIT_EQUAL, WITHIN_ROUNDING, Check
from steplab.verify.numerics import SKETCH_SIZE, NumericsSnapshot, distance, unit_roundoff
from steplab.verify.ranks import check_agreement
from steplab.verify.shapes import PLAIN_DTYPE

# Another implementation of equal care may be twice as far off as the peer.
GROUP_FACTOR = 2.0
# A single tensor may be twice as unlucky as all together: in 25 seeds of two tiny models one of a
# hundred was up to 2.5 times as far off as its peer (a token that changes its expert).
TENSOR_FACTOR = 4.0
# A tensor that could be zero and still be within its budget cannot be judged. Such tensors (noise
# whose true value is zero, for example) may hold this share of their group's norm.
MAX_UNDECIDED = 0.05
WHOLE = "all together"
TINY = 1e-300
GROUPS = ("weights", "outputs", "loss", "gradients", "update")


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


def judge(
    candidate: NumericsSnapshot,
    peers: Sequence[NumericsSnapshot],
    truth: NumericsSnapshot,
    where: str,
) -> tuple[Check, ...]:
    """Return one check per group of a snapshot; `where` names the shape it was taken at.

    Several ranks must have the micro-batches of one process, and the same bits of what they share.
    """
    other = _other_batch(candidate, truth)
    if other:
        return (Check(f"data {where}".strip(), False, f"unverified: {other}"),)
    present = [group for group in GROUPS if group in truth.groups]
    checks = [_check(group, candidate, peers, truth, where) for group in present]
    if candidate.held:
        agree = check_agreement(candidate.held)
        checks += [replace(agree, name=f"{agree.name} {where}".strip())]
        checks += [_check_bits(candidate, peers[-1], where)]
    return tuple(checks)


def _other_batch(candidate: NumericsSnapshot, truth: NumericsSnapshot) -> str:
    """Say which micro-batch is not the one that the baseline had in its place; "" if none."""
    found, true = candidate.groups["batches"], truth.groups["batches"]
    ranks = len(candidate.held)
    for name in (*true, *found):
        if name in found and name in true and torch.equal(found[name], true[name]):
            continue
        if ranks < 2:
            return f"{name} is not the baseline's; seed what batches() draws"
        number = int(name.split()[1])
        elsewhere = next(
            (n for n in true if name in found and torch.equal(found[name], true[n])), ""
        )
        instead = f": it has {elsewhere}" if elsewhere else ""
        return f"rank {number % ranks} does not have {name} of one process{instead}"
    return ""


def _check_bits(candidate: NumericsSnapshot, one_process: NumericsSnapshot, where: str) -> Check:
    """Tell ranks that compute what one process computes from those that round in another way."""
    differing = sum(bits != one_process.bits.get(n) for n, bits in candidate.bits.items())
    detail = f"{WITHIN_ROUNDING}: {differing} of {len(candidate.bits)} gradients and weights differ"
    same = f"{BIT_EQUAL} to one process: {len(candidate.bits)} gradients and weights"
    return Check(f"bits {where}".strip(), True, detail if differing else same)


def _check(
    group: str,
    candidate: NumericsSnapshot,
    peers: Sequence[NumericsSnapshot],
    truth: NumericsSnapshot,
    where: str,
) -> Check:
    name = f"{group} {where}".strip()
    found, true = candidate.groups.get(group, {}), truth.groups[group]
    if found.keys() != true.keys():
        odd = sorted(found.keys() ^ true.keys())
        return Check(name, False, f"not the baseline's tensors: {', '.join(odd[:3])} differ")
    infinite = _not_finite(group, peers, truth)
    if infinite:
        return Check(name, False, f"unverified: {infinite}")
    errors = errors_of(group, candidate, peers, truth)
    worst = max(errors, key=lambda error: error.excess)
    nearest = f"{worst.name}: error {worst.value:.1e}, budget {worst.budget:.1e}"
    wrong = sum(error.excess > 1 for error in errors)
    if wrong:
        return Check(name, False, f"{wrong} of {len(errors)} too far from fp64; worst {nearest}")
    undecided = [error for error in errors if error.undecided]
    if math.hypot(*(error.share for error in undecided)) > MAX_UNDECIDED:
        detail = f"unverified: {undecided[0].name} would pass whatever it held ({nearest})"
        return Check(name, False, detail)
    noisy = f", {len(undecided)} of them too noisy to tell" if undecided else ""
    return Check(name, True, f"{len(errors)} compared{noisy}; nearest to its budget {nearest}")


def _not_finite(group: str, peers: Sequence[NumericsSnapshot], truth: NumericsSnapshot) -> str:
    """Name the first tensor of the references that is not finite, or "".

    Its norm must be finite, too: one that overflows would make any error small.
    """
    for snapshot, where in ((truth, "in fp64"), *((peer, "in the peer") for peer in peers)):
        for name, tensor in snapshot.groups[group].items():
            if not bool(torch.isfinite(tensor).all()) or not math.isfinite(tensor.norm()):
                return f"{name} is not finite {where}"
    return ""


def errors_of(
    group: str,
    candidate: NumericsSnapshot,
    peers: Sequence[NumericsSnapshot],
    truth: NumericsSnapshot,
) -> list[TensorError]:
    """Return the error of every tensor of a group, with its budget.

    A tensor's budget is TENSOR_FACTOR times the error of the peer (of two, the worse one): the
    tensor's own, or that of the whole group where it is larger, since a small tensor may be near
    the truth by luck. One rounding is added. The group as a whole has GROUP_FACTOR times the peer's
    error. In fp32, sums may also be taken in another order: `_order_factor`.
    """
    true, found = truth.groups[group], candidate.groups[group]
    rounding = 0.0 if group == "weights" else unit_roundoff(candidate.matmul_dtype)
    whole = max(_norm_of_all(norms := {n: float(t.norm()) for n, t in true.items()}), TINY)
    distances = [{n: distance(peer.groups[group][n], true[n]) for n in true} for peer in peers]
    off = {name: max(one[name] for one in distances) for name in true}
    group_error = max(map(_norm_of_all, distances)) / whole
    order = _order_factor(truth.terms) if candidate.matmul_dtype == PLAIN_DTYPE else 1.0
    stored = {n: _storage(group, n, candidate, truth) for n in true}
    flipped = {n: _one_flipped(group, candidate, true[n]) for n in true}
    errors = []
    for name, value in true.items():
        # What lies below the rounding of its group is noise, and noise has no relative error.
        norm = max(norms[name], rounding * whole, TINY)
        single = GROUP_FACTOR if flipped[name] else TENSOR_FACTOR
        extra = (stored[name] + flipped[name]) / norm
        budget = single * order * max(off[name] / norm, group_error) + rounding + extra
        error = distance(found[name], value) / norm
        errors.append(TensorError(name, error, budget, norms[name] / whole))
    total = _norm_of_all({n: distance(found[n], true[n]) for n in true}) / whole
    budget = GROUP_FACTOR * order * group_error + rounding + _norm_of_all(stored) / whole
    return [*errors, TensorError(WHOLE, total, budget, 1.0)]


def _order_factor(terms: int) -> float:
    """Return how much farther off a sum is when its terms are added in sequence, not in pairs.

    Roundings add up like steps of a random walk: sqrt(n) of them against sqrt(log2 n). torch adds
    in pairs, a compiled loop need not: 5.5 times the error for a bias over 128 tokens.
    """
    return math.sqrt(max(terms, 2) / math.log2(max(terms, 2)))


def _norm_of_all(norms: Mapping[str, float]) -> float:
    return math.hypot(*norms.values())


def _one_flipped(group: str, candidate: NumericsSnapshot, update: Tensor) -> float:
    """Return the norm of the error when one number moves the other way.

    An optimizer that scales every gradient to the same step size, as Adam does, moves a number
    whose gradient is nothing but rounding by the sign of that rounding. With rounded products a
    small tensor has such a number now and then.
    """
    if group != "update" or candidate.matmul_dtype == PLAIN_DTYPE or not update.numel():
        return 0.0
    return 2 * float(update.abs().max()) if update.numel() < SKETCH_SIZE else 0.0


def _storage(group: str, name: str, candidate: NumericsSnapshot, truth: NumericsSnapshot) -> float:
    """Return the norm of what rounding a parameter to the candidate's dtype may cost."""
    if group not in ("weights", "update"):
        return 0.0
    return candidate.roundoff[name] * float(truth.groups["weights"][name].norm())
