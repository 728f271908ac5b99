"""Work runs in double precision.

What it sees: operators and kernels with float64 tensors.
Why it costs: twice the bytes, and on most cards a small part of the speed; one float64 operand
makes the results of everything after it float64.
Remedy: convert where float64 enters: numpy arrays, Python lists, `torch.tensor(..., dtype=)`.
When it is wrong: the model needs 53 bits.
"""

from __future__ import annotations

import re

from steplab.core import Finding, units
from steplab.costs.op_call import OpCall
from steplab.findings.case import Case
from steplab.findings.claims import Claim
from steplab.findings.rows import Mask, Rows, changes_dtype
from steplab.trace.analysis import UNATTRIBUTED

SHARE = 0.01
MIN_ELEMENTS = 1024  # a learning rate or a norm may well be double
SAVED = 0.5  # of the bytes; on a CPU of products, too
# Of products on a device: tensor cores in tf32 against fp64 (H200: 495 and 67 TFLOP/s).
SAVED_IN_PRODUCTS = 0.85
WIDE = ("double", "c10::complex<double>")
NARROW = {"float", "c10::BFloat16", "c10::Half", "c10::complex<float>"}
# The first type in a kernel's template is that of its elements; optimizers have double scalars.
_FIRST = re.compile(r"\b(c10::BFloat16|c10::Half|float|int|long|double)\b")
_SIGNATURE = re.compile(r"\([^()]*at::Tensor[^()]*\)")  # of the function that launches it
_PRODUCT = re.compile(r"dgemm|_d\d+gemm|_f64f64")


def check(case: Case) -> Finding | None:
    """Add up the work on float64 tensors."""
    rows = case.rows
    if rows is None:
        return None
    mask = rows.called(_is_wide)
    mask |= rows.labeled("name", _names_double) & ~_has_shapes(rows) & ~rows.category("optimizer")
    spent = case.cost_ms(mask)
    if not spent > SHARE * case.step_ms:
        return None
    products = mask & rows.labeled("category", lambda label: label.startswith("matmul"))
    casts = mask & rows.called(changes_dtype)  # they go altogether
    in_products = SAVED_IN_PRODUCTS if case.on_device else SAVED
    gain = in_products * rows.ms(products) + rows.ms(casts)
    gain += SAVED * rows.ms(mask & ~products & ~casts)
    return Claim(
        rule="wide_dtype",
        claim=f"float64 work takes {units.milliseconds(spent)} a step",
        evidence=(
            f"{rows.count(mask):.0f} operators or kernels a step",
            *_entries(rows, mask),
            *(f"asked for at {line}" for line in case.setup_lines("float64")),
            *rows.hot_lines(mask),
        ),
        remedy="convert to float32 where float64 enters: torch.from_numpy(x).float(), "
        "torch.tensor(x, dtype=torch.float32)",
        stake_ms=spent,
        why="float64 has twice the bytes, and what it meets becomes float64 too",
        gain_ms=gain,
        work=mask,
        is_cause=True,  # of how long chains of it take
    )


def _is_wide(call: OpCall) -> bool:
    """Whether a call computes on many float64 numbers; a single one widens nothing.

    Nor does one that a compiled graph is given tell what the graph does with it.
    """
    if not call.name.startswith("aten::"):
        return False
    wide = any(t is not None and t.dtype in WIDE and t.dims for t in call.tensors)
    return wide and max(call.numels) >= MIN_ELEMENTS


def _names_double(kernel: str) -> bool:
    first = _FIRST.search(_SIGNATURE.sub("", kernel))
    return _PRODUCT.search(kernel) is not None or (first is not None and first[1] == "double")


def _has_shapes(rows: Rows) -> Mask:
    return rows.called(lambda call: bool(call.tensors))


def _entries(rows: Rows, mask: Mask) -> list[str]:
    """Return where a float64 tensor meets a narrower one."""
    meets = mask & rows.called(_meets)
    lines = [t.label for t in rows.totals("line", meets, 2) if t.label != UNATTRIBUTED]
    return [f"float64 meets a narrower tensor at {line}" for line in lines]


def _meets(call: OpCall) -> bool:
    dtypes = {t.dtype for t in call.tensors if t is not None and t.dims}
    return not dtypes.isdisjoint(WIDE) and bool(dtypes & NARROW)


RULE = check
