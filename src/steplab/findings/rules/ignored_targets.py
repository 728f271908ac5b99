"""The head computes logits for tokens that the loss ignores.

What it sees: a cross-entropy of which half or more of the class numbers are `ignore_index`, as the
Run recorded them: the prompt of an instruction, the document before its summary, the words that a
masked model need not guess. Padding is left to `padded_batch`.
Why it costs: head, softmax and their gradients are computed for every token, and those of most are
thrown away; behind a large vocabulary that is much of the step.
Remedy: take the states whose label counts before the head.
When it is wrong: somebody reads the other logits, too.
"""

from __future__ import annotations

from steplab.core import Finding, units
from steplab.findings.case import Case
from steplab.findings.claims import Claim
from steplab.findings.matmuls import matmuls
from steplab.findings.rows import Mask, Rows

IGNORED = 0.5  # of the class numbers
SHARE = 0.03
SOFTMAX = "aten::_log_softmax"


def check(case: Case) -> Finding | None:
    """Take the share of ignored labels of what head and loss cost."""
    rows, dataflow = case.rows, case.dataflow
    if rows is None or dataflow is None or dataflow.ignored < IGNORED:
        return None
    head, mask = _head_and_loss(rows)
    spent = case.cost_ms(mask)
    lost = (dataflow.ignored - dataflow.padding) * spent
    if not lost > SHARE * case.step_ms:
        return None
    share = units.percent(dataflow.ignored)
    return Claim(
        rule="ignored_targets",
        claim=f"the loss ignores {share} of its labels: head and loss take "
        f"{units.milliseconds(spent)} for all of them",
        evidence=(*rows.hot_lines(head, 1), *rows.hot_lines(mask & ~head)),
        remedy="take the states that count before the head: hidden[labels != -100], or the last "
        "tokens of every row where their number is fixed, which also compiles",
        stake_ms=spent,
        why="logits of ignored labels are computed, normalized and differentiated like any others",
        gain_ms=lost,
        work=mask,
    )


def _head_and_loss(rows: Rows) -> tuple[Mask, Mask]:
    """Return the products behind the largest log-softmax, and all work on logits."""
    softmaxes = [call.tensor(0) for call in rows.calls if call.name == SOFTMAX]
    logits = max((one for one in softmaxes if one), key=lambda one: one.numel, default=None)
    nothing = rows.of_calls([])
    if logits is None or not logits.dims:
        return nothing, nothing
    # Where the loss shifts labels by one, it takes a token less of each row.
    classes, least = logits.dims[-1], logits.numel / 2
    forward = rows.labeled("phase", lambda label: label != "backward")
    head = forward & rows.of_calls(
        number
        for number, one in matmuls(rows).items()
        if one.n == classes and one.batch * one.m * one.n >= least
    )
    on_logits = rows.called(
        lambda call: any(
            tensor and tensor.dims[-1:] == (classes,) and tensor.numel >= least
            for tensor in call.tensors
        )
    )
    products = rows.of_calls(matmuls(rows))
    update = rows.labeled("phase", lambda label: label == "optimizer")
    return head, rows.with_gradients(head) | (on_logits & ~products & ~update)


RULE = check
