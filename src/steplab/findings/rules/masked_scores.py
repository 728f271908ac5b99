"""Attention computes scores that its mask throws away.

What it sees: an attention of which a mask leaves out 70 % of the scores or more, sampled while the
step ran: a sliding window, documents packed into one sequence, or sequences that are mostly
padding. The causal mask leaves out half.
Why it costs: every score is computed, and its gradients too, and most are multiplied by zero.
Remedy: attention in blocks of the window's size, each with the block before it; `flex_attention`
with a block mask on a GPU; variable lengths for documents.
When it is wrong: the scores that are left lie everywhere, so that no block is empty.
"""

from __future__ import annotations

import math

import numpy as np

from steplab.core import Finding, units
from steplab.core.dataflow import MASKED
from steplab.findings.case import Case
from steplab.findings.claims import Claim
from steplab.findings.matmuls import matmuls
from steplab.findings.rows import Mask, Rows

SHARE = 0.03
BLOCKS = 2  # times the scores that count: blocks hold those around them


def check(case: Case) -> Finding | None:
    """Add up the attention that the masks leave out."""
    rows = case.rows
    if rows is None:
        return None
    masks = {
        tenths / 10: _attention(rows, case.verdict(letter))
        for tenths, letter in enumerate(MASKED, 7)
    }
    lost = sum((1 - BLOCKS * (1 - share)) * case.cost_ms(mask) for share, mask in masks.items())
    if not lost > SHARE * case.step_ms:
        return None
    mask = np.logical_or.reduce(list(masks.values()))
    spent = case.cost_ms(mask)
    least = min(share for share, mask in masks.items() if mask.any())
    blocks = "attention in blocks of the window's size, each with the block before it"
    return Claim(
        rule="masked_scores",
        claim=f"masks leave out {units.percent(least)} or more of the scores of attention that "
        f"takes {units.milliseconds(spent)}",
        evidence=("sampled while the step ran", *rows.hot_lines(mask)),
        remedy=f"flex_attention with a block mask, which skips what is masked; or {blocks}"
        if case.on_device
        else f"{blocks}; documents one by one instead of packed",
        stake_ms=spent,
        why="a mask is applied to scores that have been computed, and to their gradients",
        gain_ms=lost,
        work=mask,
    )


def _attention(rows: Rows, masked: Mask) -> Mask:
    """Return the attention around masked softmaxes, or the fused kernels, with their gradients."""
    softmaxes = masked & rows.labeled("op", lambda name: "softmax" in name)
    sizes = {
        tensor.numel
        for number in np.unique(rows.call[softmaxes]).tolist()
        for tensor in rows.calls[number].tensors[:1]
        if tensor is not None
    }
    scores = rows.called(lambda call: any(t and t.numel in sizes for t in call.tensors))
    scores |= rows.of_calls(
        number
        for number, one in matmuls(rows).items()
        if math.prod((one.batch, one.m, one.n)) in sizes
    )
    return rows.with_gradients(masked) | (scores if sizes else masked)


RULE = check
