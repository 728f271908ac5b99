"""Updates that follow the sign of a rounding are nobody's: they are left out of the comparison.

An optimizer that scales every gradient to the same step size, as Adam does, moves a number whose
true gradient is zero by the sign of whatever rounding left there: the bias of attention's keys, or
one before a norm. Two honest steps differ there by twice the update.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from steplab.verify.numerics import GRADIENT_STEPS, SKETCH_SIZE, NumericsSnapshot, distance

# A gradient is lost when it is below this many times the peers' typical error in its tensor.
LOST = 4.0
# A number whose sign is lost still moves no farther than this many times the farthest of all.
MAX_MOVE = 2.0


def lost_signs(peers: Sequence[NumericsSnapshot], truth: NumericsSnapshot) -> dict[str, Tensor]:
    """Mark the numbers whose gradients are lost in the peers' errors, in any gradient step.

    Only tensors that are kept whole have single numbers.
    """
    lost: dict[str, Tensor] = {}
    gradients = truth.groups.get("gradients", {})
    for name, update in truth.groups.get("update", {}).items():
        if not 0 < update.numel() < SKETCH_SIZE:
            continue
        lost[name] = torch.zeros(update.shape, dtype=torch.bool)
        keys = (f"{name} in step {number}" for number in range(GRADIENT_STEPS))
        for key in filter(gradients.__contains__, keys):
            gradient = gradients[key]
            off = max(distance(peer.groups["gradients"][key], gradient) for peer in peers)
            lost[name] |= gradient.abs() <= LOST * off / math.sqrt(gradient.numel())
    return lost


def without_lost(
    snapshot: NumericsSnapshot, lost: Mapping[str, Tensor], truth: NumericsSnapshot
) -> NumericsSnapshot:
    """Return the snapshot with the true update where a sign is lost."""
    if not lost or "update" not in snapshot.groups:
        return snapshot
    updates = dict(snapshot.groups["update"])
    farthest = MAX_MOVE * max(float(truth.groups["update"][name].abs().max()) for name in lost)
    for name in lost.keys() & updates.keys():
        true, found = truth.groups["update"][name], updates[name]
        if found.shape == true.shape:
            updates[name] = torch.where(lost[name] & (found.abs() <= farthest), true, found)
    return replace(snapshot, groups={**snapshot.groups, "update": updates})
