"""Is a candidate as near to the truth as its precision allows? One check per group of a snapshot.

The truth is the plain step in fp64; the budgets are in `budgets`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from steplab.core.ladder import BIT_EQUAL, WITHIN_ROUNDING, Check
from steplab.verify.budgets import disagreement, errors_of, worst
from steplab.verify.lost_signs import lost_signs, without_lost
from steplab.verify.numerics import (
    BUFFERS,
    CHOICES,
    NAN_BUFFERS,
    OUTPUTS,
    STATE,
    NumericsSnapshot,
)
from steplab.verify.ranks import check_agreement

# A tensor that could be zero and still be within its budget cannot be judged. Such tensors (noise
# whose true value is zero, for example) may hold this share of their group's norm.
MAX_UNDECIDED = 0.05
GROUPS = ("weights", OUTPUTS, CHOICES, "loss", "gradients", "update", BUFFERS)
# One of these must hold something: a step that only weights were compared of is not verified.
RESULTS = (OUTPUTS, CHOICES, "loss", "losses")


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
    if not any(truth.groups.get(group) for group in RESULTS):
        nothing = "unverified: nothing that the model predicts is a tensor"
        return (Check(f"{OUTPUTS} {where}".strip(), False, nothing),)
    candidate, truth, *peers = _complete((candidate, truth, *peers))
    lost = lost_signs(peers, truth)
    found, *others = (without_lost(one, lost, truth) for one in (candidate, *peers))
    checks = [_check(group, found, others, truth, where) for group in _in_order(truth)]
    if candidate.held:
        agree = check_agreement(candidate.held)
        checks += [replace(agree, name=f"{agree.name} {where}".strip())]
        checks += [_check_bits(candidate, peers[-1], where)]
    return tuple(checks)


def _complete(snapshots: Sequence[NumericsSnapshot]) -> list[NumericsSnapshot]:
    """Return the snapshots with zeros for what only some have.

    An optimizer keeps nothing for a parameter without a gradient: an expert that no token chose.
    Where a buffer has no NaN, nothing marks it.
    """
    shapes: dict[str, dict[str, Tensor]] = {}
    for snapshot in snapshots:
        for group, members in snapshot.groups.items():
            if group == NAN_BUFFERS or group.startswith(STATE):
                shapes.setdefault(group, {}).update(members)
    zeros = {g: {n: torch.zeros_like(t) for n, t in found.items()} for g, found in shapes.items()}
    complete = []
    for snapshot in snapshots:
        state = {g: {**zeros[g], **snapshot.groups.get(g, {})} for g in zeros}
        complete.append(replace(snapshot, groups={**snapshot.groups, **state}))
    return complete


def _in_order(truth: NumericsSnapshot) -> list[str]:
    """Return the groups that are compared: first those that every step has, by GROUPS."""
    rest = sorted(truth.groups.keys() - {*GROUPS, "batches"})
    return [group for group in (*GROUPS, *rest) if truth.groups.get(group)]


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
        detail = f"not the baseline's tensors: {', '.join(odd[:3])} differ"
        return Check(name, False, detail, math.inf)
    infinite = _not_finite(group, peers, truth)
    if infinite:
        return Check(name, False, f"unverified: {infinite}")
    dtype = candidate.matmul_dtype
    doubt = disagreement(group, peers, truth, dtype)
    if doubt:
        detail = (
            f"unverified: {doubt.name} of the plain step under autocast is {doubt.value:.1e} from "
            f"{truth_name(truth)}, but {dtype} products explain {doubt.budget:.1e} at most: is the "
            f"model's own {dtype} code right?"
        )
        return Check(name, False, detail, doubt.excess)
    errors = errors_of(group, candidate, peers, truth)
    nearest = worst(errors)
    wrong = sum(error.excess > 1 for error in errors)
    if wrong:
        detail = f"{wrong} of {len(errors)} too far from {truth_name(truth)}; worst {nearest}"
        return Check(name, False, detail, nearest.excess)
    undecided = [error for error in errors if error.undecided]
    if math.hypot(*(error.share for error in undecided)) > MAX_UNDECIDED:
        detail = f"unverified: {undecided[0].name} would pass whatever it held ({nearest})"
        return Check(name, False, detail, nearest.excess)
    noisy = f", {len(undecided)} of them too noisy to tell" if undecided else ""
    detail = f"{len(errors)} compared{noisy}; nearest to its budget {nearest}"
    return Check(name, True, detail, nearest.excess)


def truth_name(truth: NumericsSnapshot) -> str:
    """Return the precision of the truth."""
    return "fp64" if truth.exact else "fp32"


def _not_finite(group: str, peers: Sequence[NumericsSnapshot], truth: NumericsSnapshot) -> str:
    """Name the first tensor of the references that is not finite, or "".

    Its norm must be finite, too: one that overflows would make any error small.
    """
    for snapshot, where in (
        (truth, f"in {truth_name(truth)}"),
        *((peer, "in the peer") for peer in peers),
    ):
        for name, tensor in snapshot.groups[group].items():
            if not bool(torch.isfinite(tensor).all()) or not math.isfinite(tensor.norm()):
                return f"{name} is not finite {where}"
    return ""
