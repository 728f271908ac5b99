"""A large table of embeddings gets a dense gradient, of which a batch touches little.

What it sees: gradients of embeddings with at least ten times as many rows as the batch has indices,
and the share of the optimizer's time that the table takes; or many such gradients of one table,
which are added up; or lookups of which only the mean or the sum over many rows is read.
Why it costs: the gradient is filled with zeros, and all rows and their states are read and written,
where only those of the batch change. Rows that are looked up to be added up are written and read
once more, and so are their gradients, which are all alike.
Remedy: `nn.Embedding(..., sparse=True)` with `torch.optim.SparseAdam` or `SGD` for the table; one
lookup of all indices before a loop; `nn.EmbeddingBag`, which adds rows up as it reads them.
When it is wrong: rows that a batch does not touch must move too, by momentum or weight decay. A
table that is also the head's weight gets a gradient in every row, and is left out.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from steplab.core import Finding, units
from steplab.core.dataflow import POOLED
from steplab.costs.op_call import OpCall
from steplab.findings.case import Case
from steplab.findings.claims import Claim
from steplab.findings.rows import Rows

SHARE = 0.03
RARE = 0.1  # indices over rows
LEAST_ROWS = 10_000
BACKWARD = "aten::embedding_dense_backward"
SUMS = ("aten::add", "aten::add_")
MANY = 4  # gradients of one table
LOOKUPS = ("aten::embedding",)
MEANS = ("aten::mean", "aten::sum")
BAGS = 0.10  # of the step: below, a bag is not worth another layer


def check(case: Case) -> Finding | None:
    """Look for many gradients of one table, else for a table of which few rows change."""
    if case.rows is None:
        return None
    found = _many_lookups(case, case.rows) or _bags(case, case.rows)
    return found or _few_rows(case, case.rows)


def _bags(case: Case, rows: Rows) -> Finding | None:
    """Judge lookups whose rows are only added up: half of the lookup, the sum and its gradient."""
    lookups = case.verdict(POOLED) & rows.asked_for(LOOKUPS.__contains__)
    if not lookups.any():
        return None
    lines = np.unique(rows.work.line[lookups & (rows.work.line > 0)])
    sums = rows.asked_for(MEANS.__contains__) & np.isin(rows.work.line, lines)
    backward = rows.labeled("phase", lambda label: label == "backward")
    gradients = rows.with_gradients(lookups) & backward
    mask = lookups | gradients | rows.with_gradients(sums)
    spent = case.cost_ms(mask)
    gain = spent - case.cost_ms(lookups | gradients) / 2
    if not gain > BAGS * case.step_ms:
        return None
    return Claim(
        rule="dense_embedding",
        claim=f"rows of a table are looked up one by one, and only their sum is read: "
        f"{units.milliseconds(spent)} a step",
        evidence=rows.hot_lines(mask),
        remedy='nn.EmbeddingBag(..., mode="mean"), or "sum", instead of nn.Embedding and a mean: '
        "it adds the rows up as it reads them",
        stake_ms=spent,
        why="all rows are written and read again, and so are their gradients, which are alike",
        gain_ms=gain,
        work=mask,
    )


def _many_lookups(case: Case, rows: Rows) -> Finding | None:
    """Judge the gradients of a table that is looked up again and again, and their sum."""
    ops = rows.source.ops
    found = Counter(
        table
        for row in np.flatnonzero(rows.source.named(ops, BACKWARD.__eq__)).tolist()
        if (call := rows.source.op_call(row)) is not None and (table := _table(call))
    )
    table, count = max(found.items(), key=lambda one: one[1], default=(0, 0))
    if count < MANY:
        return None
    gradient = rows.within(lambda call: call.name == BACKWARD and _table(call) == table)
    added = rows.called(lambda call: call.name in SUMS and max(call.numels, default=0) == table)
    mask = gradient | (added & rows.labeled("phase", lambda label: label == "backward"))
    spent = case.cost_ms(mask)
    if not spent > SHARE * case.step_ms:
        return None
    return Claim(
        rule="dense_embedding",
        claim=f"{count} lookups in one table have a dense gradient each: "
        f"{units.milliseconds(spent)} a step",
        evidence=(f"each fills a table of {table:,} weights", *rows.hot_lines(mask)),
        remedy="look up all indices at once, before the loop: embedding(ids_BT), then its parts",
        stake_ms=spent,
        why="every gradient is as large as the table, and all of them are added up",
        gain_ms=(1 - 1 / count) * spent,
        work=mask,
    )


def _few_rows(case: Case, rows: Rows) -> Finding | None:
    """Add up the gradient, its zeros and the table's share of the update."""
    profile = case.run.profile if case.run is not None else None
    tied = set(case.dataflow.tied_tables) if case.dataflow is not None else set()
    tables = {size for call in rows.calls if (size := _table(call))} - tied
    if not tables:
        return None
    gradient = rows.within(lambda call: call.name == BACKWARD and _table(call) in tables)
    update = rows.labeled("phase", lambda label: label == "optimizer")
    update |= rows.category("optimizer")
    updated = (profile.updated_weights if profile else None) or _updated(rows)
    share = min(1.0, sum(tables) / updated) if updated else 0.0
    spent = rows.ms(gradient) + share * rows.ms(update & ~gradient)
    if not spent > SHARE * case.step_ms:
        return None
    indices, table = next((_indices(c), _table(c)) for c in rows.calls if _table(c) in tables)
    return Claim(
        rule="dense_embedding",
        claim=f"a dense gradient of a large table costs {units.milliseconds(spent)} a step",
        evidence=(
            f"at most {indices:,} rows of a table of {table:,} weights change",
            f"gradient and zeros {units.milliseconds(rows.ms(gradient))}, "
            f"{units.percent(share)} of the update",
            *rows.hot_lines(gradient),
            *(f"made at {line}" for line in case.setup_lines("Embedding")),
        ),
        remedy="nn.Embedding(..., sparse=True) and torch.optim.SparseAdam (or SGD) for the table",
        stake_ms=spent,
        why="every row is filled, read and written, also those that no index names",
        gain_ms=(1 - RARE) * spent,
        work=gradient,
    )


def _indices(call: OpCall) -> int:
    indices = call.tensor(1)
    return indices.numel if indices is not None else 0


def _table(call: OpCall) -> int:
    """Return the weights of the table whose gradient a call computes; 0 if most rows may change."""
    gradient, rows = call.tensor(0), call.integer(2)
    if call.name != BACKWARD or gradient is None or rows is None or rows < LEAST_ROWS:
        return 0
    return rows * gradient.dims[-1] if _indices(call) < RARE * rows else 0


def _updated(rows: Rows) -> int:
    """Return the weights that fused or foreach updates of a step take."""
    found = 0
    for call in rows.calls:
        if call.name.startswith(("aten::_fused_", "aten::_foreach_addcdiv")) and call.lists:
            sizes = call.lists[0]
            for dims in sizes:
                count = 1
                for length in dims:
                    count *= length
                found += count
    return found


RULE = check
