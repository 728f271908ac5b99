"""A large table of embeddings gets a dense gradient, of which a batch touches little.

What it sees: gradients of embeddings with at least ten times as many rows as the batch has indices,
and the share of the optimizer's time that the table takes.
Why it costs: the gradient is filled with zeros, and all rows and their states are read and written,
where only those of the batch change.
Remedy: `nn.Embedding(..., sparse=True)` with `torch.optim.SparseAdam` or `SGD` for the table.
When it is wrong: rows that a batch does not touch must move too, by momentum or weight decay.
"""

from __future__ import annotations

from steplab.core import Finding, units
from steplab.costs.op_call import OpCall
from steplab.findings.case import Case
from steplab.findings.claims import Claim
from steplab.findings.rows import Rows

SHARE = 0.03
RARE = 0.1  # indices over rows
LEAST_ROWS = 10_000
BACKWARD = "aten::embedding_dense_backward"


def check(case: Case) -> Finding | None:
    """Add up the gradient, its zeros and the table's share of the update."""
    rows = case.rows
    if rows is None:
        return None
    tables = {size for call in rows.calls if (size := _table(call))}
    if not tables:
        return None
    gradient = rows.within(lambda call: call.name == BACKWARD and _table(call) > 0)
    update = rows.labeled("phase", lambda label: label == "optimizer")
    update |= rows.category("optimizer")
    profile = case.run.profile if case.run is not None else None
    updated = (profile.updated_weights if profile else None) or _updated(rows)
    share = min(1.0, sum(tables) / updated) if updated else 0.0
    spent = rows.ms(gradient) + share * rows.ms(update & ~gradient)
    if not spent > SHARE * case.step_ms:
        return None
    indices, table = next((_indices(c), _table(c)) for c in rows.calls if _table(c))
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
