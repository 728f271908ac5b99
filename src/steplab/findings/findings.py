"""Findings: what the rules say of one case, ranked; printed as text, or given as a record."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from steplab.core import Budget, Finding, units
from steplab.core.printable import printable
from steplab.findings.case import Case
from steplab.trace.analysis import run_budget
from steplab.trace.ranks.analysis import RanksRecord

NOTE_SHARE = 0.03  # of the step, or of the device's memory
WIDTH = 100
NO_FINDING = "No finding worth 3 % of the {} or more."
NOT_MEASURED = "no step was measured, so no rule can tell what slows it down"


@dataclass(frozen=True)
class FindingsRecord:
    """Findings as JSON: milliseconds are per step."""

    run: str | None  # its id; None for a trace on its own
    step_ms: float | None
    budget: Budget | None  # of every profiled step; None without a trace
    findings: tuple[Finding, ...]  # worth 3 % of the step or of the memory, the largest gain first
    notes: tuple[Finding, ...]  # smaller ones
    ranks: RanksRecord | None = None  # of a step that several ranks share


class Findings(tuple[Finding, ...]):
    """The findings of a case, the largest gain first, notes last. Printing them explains them."""

    case: Case

    @classmethod
    def of(cls, found: Iterable[Finding], case: Case) -> Findings:
        """Return ranked findings of a case."""
        findings = cls(sorted(found, key=lambda finding: _rank(finding, case)))
        findings.case = case
        return findings

    def record(self) -> FindingsRecord:
        """Return what `explain --json` writes."""
        case, known = self.case, self.case.step_ms > 0
        return FindingsRecord(
            case.run.id if case.run else None,
            case.step_ms if known else None,
            run_budget(case.run, case.analysis),
            tuple(finding for finding in self if not is_note(finding, case)),
            tuple(finding for finding in self if is_note(finding, case)),
            case.ranks.record if case.ranks is not None else None,
        )

    def __repr__(self) -> str:
        return "\n".join(printable(line) for line in self._lines())

    def _lines(self) -> Iterator[str]:
        record = self.record()
        for number, finding in enumerate(record.findings, 1):
            if number > 1:
                yield ""
            yield f"{number}. {finding.rule}{_stake(finding, self.case)}"
            yield from _part("", finding.claim)
            for line in finding.evidence:
                yield from _part("seen", line)
            yield from _part("why", finding.why)
            yield from _part("remedy", finding.remedy)
            yield from _part("gain", _gain(finding, self.case))
        if not record.findings:
            known = self.case.step_ms > 0
            yield NO_FINDING.format(_whole(self.case)) if known else NOT_MEASURED
        if record.notes:
            yield ""
            yield "notes: small, not sure, or the price that every step like this pays:"
        for finding in record.notes:
            price = _stake(finding, self.case) if finding.ordinary else ""
            text = f"{finding.rule}{price}: {finding.claim}; {finding.remedy}"
            yield from textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="    ")


def _rank(finding: Finding, case: Case) -> tuple[bool, float, bool]:
    """Notes after findings, small after large, noise of the machine after faults of the code."""
    noise = finding.rule == "noisy_measurement"
    return is_note(finding, case), -(gain_share(finding, case) or 0.0), noise


def gain_share(finding: Finding, case: Case) -> float | None:
    """Return the expected gain of the remedy, over the step's time or the memory.

    Where the gain has no number, what is at stake; None where that is unknown too.
    """
    ms = finding.stake_ms if finding.gain_ms is None else finding.gain_ms
    if ms is not None and case.step_ms > 0:
        return ms / case.step_ms
    whole = finding.of_bytes or case.capacity_bytes
    if finding.stake_bytes is not None and whole:
        return finding.stake_bytes / whole
    return None


def is_note(finding: Finding, case: Case) -> bool:
    """Whether a Finding is too small to act on, or no fault; one of unknown size is neither."""
    part = gain_share(finding, case)
    return finding.ordinary or (part is not None and part < NOTE_SHARE)


def _part(name: str, text: str) -> list[str]:
    first = f"   {name + ':':<8}" if name else "   "
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=" " * 11)


def _stake(finding: Finding, case: Case) -> str:
    if finding.stake_ms is not None:
        part = units.percent(finding.stake_ms / case.step_ms) if case.step_ms > 0 else "?"
        return f" [{units.milliseconds(finding.stake_ms)}, {part} of the {_whole(case)}]"
    if finding.stake_bytes is not None:
        part = units.percent(share) if (share := gain_share(finding, case)) is not None else "?"
        whole = "the step's peak" if finding.of_bytes else "the memory"
        return f" [{units.bytes_(finding.stake_bytes)}, {part} of {whole}]"
    return " [cost unknown]"


def _whole(case: Case) -> str:
    """Return what shares are of: a trace may hold several steps that nothing tells apart."""
    unmarked = case.analysis is not None and not case.analysis.budget.marked
    return "recording" if unmarked and case.run is None else "step"


def _gain(finding: Finding, case: Case) -> str:
    if finding.gain_ms is None:
        return ""
    return f"{units.milliseconds(finding.gain_ms)} ({units.percent(gain_share(finding, case))})"
