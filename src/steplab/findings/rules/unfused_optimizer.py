"""The optimizer updates weights tensor by tensor or op by op.

What it sees: an Adam update that is not fused and takes more than 3 % of the step.
Why it costs: every op reads and writes all weights and states again, where one kernel does so once.
Remedy: `optimizer=fused`.
When it is wrong: a relative of Adam has no fused implementation. A compiled update, or one of a
single operation (plain SGD), is not reported: there is no pass to save. It is a note where the gain
is below 5 % of the step, and where the model brings no optimizer and gets torch's default.
"""

from __future__ import annotations

import re

from steplab.core import Finding, units
from steplab.findings.case import Case
from steplab.findings.rows import Mask, Rows

SHARE = 0.03
ORDINARY = 0.05  # of the step: below this gain, torch's default is as good
# AdamW op by op moves 80 bytes per fp32 parameter (decay 8, lerp 12, square 20, root 8, divide 8,
# add 8, update 16), fused 28 (four reads, three writes). A CPU saves about that or more: 65 and
# 75 % with 2.6 million weights in 80 tensors, 86 and 88 % with 8.4 million in 16 (op by op, one
# thread, medians of 15 in two runs beside other work).
SAVED = 1 - 28 / 80
PASSES = ("addcdiv_", "addcmul_", "lerp_")  # of Adam and its relatives
FUSED = {"Adam", "AdamW", "SGD", "Adagrad"}  # those that torch has
WORDS = {"forloop": "torch's loop over the weights", "foreach": "torch's foreach update"}
_STEP = re.compile(r"Optimizer\.step#(\w+)\.step")
FORLOOP = frozenset(f"aten::{name}" for name in PASSES)
FOREACH = frozenset(f"aten::_foreach_{name}" for name in PASSES)


def check(case: Case) -> Finding | None:
    """Compare the time of the optimizer with the step."""
    kind, spent, step = _implementation(case), _phase_ms(case), case.step_ms
    if kind in ("", "fused", "one-pass triton_update") or not spent > SHARE * step:
        return None
    return Finding(
        rule="unfused_optimizer",
        claim=f"{WORDS.get(kind, f'the {kind} update')} takes {units.milliseconds(spent)}",
        evidence=(f"{units.percent(spent / step)} of the step", *_ops(case)),
        remedy=_remedy(case),
        stake_ms=spent,
        why="it reads and writes weights and states once per operation, a fused update once",
        gain_ms=SAVED * spent,
        # What the model does not bring is no fault of it: `tune` finds the faster update.
        ordinary=SAVED * spent < ORDINARY * step or _is_default(case),
    )


def _is_default(case: Case) -> bool:
    profile = case.run.profile if case.run is not None else None
    return profile is not None and profile.default_optimizer


def _implementation(case: Case) -> str:
    """Return forloop, foreach or fused, by the trace or else by the Run; "": unknown."""
    ran = case.run.ran.optimizer if case.run is not None and case.run.ran is not None else ""
    if case.rows is None:
        return "" if _is_compiled(case) else ran
    phase = case.rows.labeled("phase", lambda label: label == "optimizer")
    names = {group.label for group in case.rows.totals("op", phase, most=50)}
    if any(name.startswith("aten::_fused_") for name in names):
        return "fused"
    if names & FOREACH:
        return "foreach"
    return "forloop" if names & FORLOOP else ""


def _remedy(case: Case) -> str:
    """Return a faster way to the same update; torch has only some of its optimizers fused."""
    ranges = case.analysis.trace.ranges if case.analysis is not None else None
    names = (
        {case.analysis.trace.text(n) for n in ranges.name} if ranges and case.analysis else set()
    )
    classes = {m[1] for name in names if (m := _STEP.match(name))}
    recipe, by_hand = "optimizer=fused", "fused=True where the optimizer is made"
    if classes and not classes & FUSED:
        recipe, by_hand = "compile.optimizer=true", f"torch.compile({min(classes)}.step)"
    return by_hand if case.of_own_loop else f"{recipe}, or {by_hand}"


def _is_compiled(case: Case) -> bool:
    settings = case.run.spec.recipe.techniques.get("compile", {}) if case.run else {}
    return bool(settings.get("optimizer"))


def _phase_ms(case: Case) -> float:
    clock = case.run.clock if case.run else None
    if clock is not None and "optimizer" in clock.phases:
        return clock.phases["optimizer"].median
    return case.rows.ms(_updates(case.rows)) if case.rows is not None else 0.0


def _updates(rows: Rows) -> Mask:
    """Return the work of the phase that updates; gathering weights from other ranks does not."""
    phase = rows.labeled("phase", lambda label: label == "optimizer")
    return phase & ~rows.category("communication")


def _ops(case: Case) -> tuple[str, ...]:
    if case.rows is None:
        return ()
    groups = case.rows.totals("op", _updates(case.rows))
    return tuple(f"{g.label} x {g.count:.0f}: {units.milliseconds(g.ms)}" for g in groups)


RULE = check
