"""What is kept for the backward holds the same numbers many times, or in too many bytes.

What it sees: tensors at the peak, kept for the backward, that `repeat` has made, and masks of zeros
and ones in 8 bytes each, as `one_hot` makes them.
Why it costs: they live from the forward to their backward, at the peak of the step.
Remedy: broadcasting, which needs no copies; masks as `torch.bool`.
When it is wrong: the copies are changed afterward, or the integers are an index.
"""

from __future__ import annotations

from collections.abc import Sequence

from steplab.core import Allocation, Finding, units
from steplab.findings.case import Case

SHARE = 0.10  # of the peak
SHOWN = 3
REPEATS = ("aten::repeat", "aten::repeat_interleave", "aten::tile")
FILLED = ("aten::zeros", "aten::zeros_like", "aten::new_zeros", "aten::one_hot")
WIDE = "int64"
IN_A_BYTE = 7 / 8  # is saved


def check(case: Case) -> tuple[Finding, ...]:
    """Add up copies and wide masks among the activations at the peak."""
    if case.timeline is None:
        return ()
    kept = [one for one in case.timeline.at_peak if one.kind == "activations"]
    copies = [one for one in kept if one.op in REPEATS]
    masks = [one for one in kept if one.dtype == WIDE and one.op in FILLED]
    found = (
        _finding(
            case,
            copies,
            1.0,
            f"copies that {_names(copies)} makes",
            "let it broadcast: x[..., None] * scale needs no repeat, and expand() copies nothing",
            "a dimension of size 1 is read again and again, where a repeated one is stored",
        ),
        _finding(
            case,
            masks,
            IN_A_BYTE,
            "zeros and ones of 8 bytes",
            "a mask of torch.bool: labels[..., None] == torch.arange(classes), or one_hot(...) "
            ".bool() at once",
            "F.one_hot returns int64, and what is multiplied by it is kept with it",
        ),
    )
    return tuple(one for one in found if one is not None)


def _finding(
    case: Case, held: Sequence[Allocation], saved: float, what: str, remedy: str, why: str
) -> Finding | None:
    assert case.timeline is not None
    total, peak = int(saved * sum(one.bytes for one in held)), case.timeline.peak_bytes
    if not held or total < SHARE * peak:
        return None
    lines = {one.line: 0 for one in held}
    for one in held:
        lines[one.line] += one.bytes
    most = sorted(lines.items(), key=lambda item: -item[1])[:SHOWN]
    return Finding(
        rule="bulky_activations",
        claim=f"{what} hold {units.bytes_(total)} until the backward",
        evidence=(
            f"{units.percent(total / peak)} of the peak",
            *(f"{line}: {units.bytes_(size)}" for line, size in most if line),
        ),
        remedy=remedy,
        stake_bytes=total,
        of_bytes=peak,
        why=why,
    )


def _names(copies: Sequence[Allocation]) -> str:
    return " and ".join(sorted({one.op.removeprefix("aten::") for one in copies}))


RULE = check
