"""Findings as cards, the dearest first."""

from __future__ import annotations

from collections.abc import Sequence

from steplab import units
from steplab.record import Finding
from steplab.report.pages.markup import NOTHING, Html, element, join

NOTE_BELOW = 0.03  # of the step: less at stake is a note, not a finding


def findings_html(findings: Sequence[Finding], step_ms: float | None) -> Html:
    """Return one card per Finding; those with little at stake are drawn in grey."""
    if not findings:
        return element("p", "No rule finds anything.", class_="soft")
    return join(_card(finding, step_ms) for finding in findings)


def _card(finding: Finding, step_ms: float | None) -> Html:
    gain = finding.gain_ms if finding.gain_ms is not None else finding.stake_ms
    small = step_ms and gain is not None and gain < NOTE_BELOW * step_ms
    stakes = _stakes(finding, step_ms)
    badge = element("span", stakes, class_="badge") if stakes else NOTHING
    title = element("h3", finding.claim, badge)
    rule = element("p", element("code", finding.rule), class_="soft")
    evidence = element("ul", *(element("li", line) for line in finding.evidence))
    why = element("p", finding.why) if finding.why else NOTHING
    remedy = element("p", element("b", "Remedy: "), finding.remedy)
    parts = (title, rule, evidence if finding.evidence else NOTHING, why, remedy, _gain(finding))
    return element("article", *parts, class_="finding small" if small else "finding")


def _stakes(finding: Finding, step_ms: float | None) -> str:
    words = []
    if finding.stake_ms is not None:
        share = f" ({units.percent(finding.stake_ms / step_ms)})" if step_ms else ""
        words.append(f"{units.milliseconds(finding.stake_ms)}{share}")
    if finding.stake_bytes is not None:
        words.append(units.bytes_(finding.stake_bytes))
    return ", ".join(words)


def _gain(finding: Finding) -> Html:
    if finding.gain_ms is None:
        return NOTHING
    return element("p", f"Expected gain: {units.milliseconds(finding.gain_ms)}", class_="soft")
