"""Claims: findings that say which work they are about, so that no work is claimed twice."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace

import numpy as np

from steplab.core import Finding
from steplab.findings.case import Case
from steplab.findings.rows import Mask

NOTHING = 0.1  # of the work that a finding claims: the rest has been told by another


@dataclass(frozen=True)
class Claim(Finding):
    """A finding about the rows of `Case.rows` in `work`: its stake and gain are parts of theirs."""

    work: Mask = field(default_factory=lambda: np.zeros(0, np.bool_), compare=False)
    # Whether it is the cause of what others may find there: code that was to be compiled and runs
    # op by op has chains and fills that a graph would not have.
    is_cause: bool = field(default=False, compare=False)


def settled(found: Iterable[Finding], case: Case) -> list[Finding]:
    """Return the findings with gains that are possible together.

    Of work that several claim, the cause of the others or else the largest gain takes all, and the
    others keep what is left; a finding that keeps nothing is dropped. All gains together are no
    more than the step.
    """
    taken: Mask | None = None
    kept = []
    left = case.step_ms
    # What every eager step pays claims nothing that a fault explains.
    for finding in sorted(found, key=lambda one: (one.ordinary, _is_effect(one), -(_ms(one) or 0))):
        share = 1.0
        if isinstance(finding, Claim) and case.rows is not None and len(finding.work):
            taken = np.zeros_like(finding.work) if taken is None else taken
            whole = case.rows.ms(finding.work)
            share = case.rows.ms(finding.work & ~taken) / whole if whole else 1.0
            taken = taken | finding.work
        if share > NOTHING:
            part = _part_of(finding, share, case.step_ms, left)
            kept.append(part)
            left -= part.gain_ms or 0.0
    return kept


def _part_of(finding: Finding, share: float, step_ms: float, left_ms: float) -> Finding:
    """Return a plain finding with a share of the stakes, and a gain of what is left of the step."""
    plain = Finding(**{f.name: getattr(finding, f.name) for f in fields(Finding)})

    def cut(ms: float | None, most: float) -> float | None:
        # min with NaN, a step of unknown length, keeps the first.
        return None if ms is None else min(ms * share, most)

    stake, gain = cut(finding.stake_ms, step_ms), cut(finding.gain_ms, left_ms)
    return replace(plain, stake_ms=stake, gain_ms=gain)


def _is_effect(finding: Finding) -> bool:
    return not (isinstance(finding, Claim) and finding.is_cause)


def _ms(finding: Finding) -> float | None:
    return finding.stake_ms if finding.gain_ms is None else finding.gain_ms
