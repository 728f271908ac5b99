"""Say what slows a step down, from a stored Run or a trace."""

from __future__ import annotations

import argparse
import shlex
import textwrap
from collections.abc import Sequence
from pathlib import Path

from steplab.cli.command import Command
from steplab.cli.flags import add_store_flag, page_to_write
from steplab.core import Finding, units
from steplab.core.input_file import shorten
from steplab.findings import Case, case_of_run, case_of_trace, explain, gain_share, is_note
from steplab.report.budget import print_budget
from steplab.report.pages import write_explain_page
from steplab.store import Store
from steplab.trace.analysis import run_budget
from steplab.trace.load import names_trace

WIDTH = 100


def _flags(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    add = parser.add_argument
    add("run", nargs="?", default="last", metavar="RUN",
        help="a Run's id, part of it, `last`, or a trace file (.json, .json.gz)")  # fmt: skip
    add_store_flag(parser)
    add("--page", type=page_to_write("--page"), default=None, metavar="FILE",
        help="also write a page (.html)")  # fmt: skip


def _run(args: argparse.Namespace) -> int:
    trace = args.run if names_trace(args.run) else ""
    if trace:
        case = case_of_trace(Path(trace))
        print(f"{shorten(trace)}: a trace on its own")
    else:
        store = Store(args.store)
        case = case_of_run(store.load(args.run), store)
        _print_run(case)
    findings = explain(case)
    if args.page:
        write_explain_page(case.run, case.analysis, findings, args.page, trace, "--page")
    budget = run_budget(case.run, case.analysis)
    if budget is not None:
        print_budget(budget)
    _print_findings(findings, case)
    if args.page:
        print(f"\nwritten {args.page}")
    return 0


def _print_run(case: Case) -> None:
    run = case.run
    assert run is not None
    print(f"{run.id}: {run.status}{f', {run.reason}' if run.reason else ''}")
    if case.analysis is None and run.status == "ok":
        command = shlex.join(["steplab", "profile", run.spec.workload])
        print(f"no trace: `{command}` records one, which shows more")


def _print_findings(findings: Sequence[Finding], case: Case) -> None:
    large = [finding for finding in findings if not is_note(finding, case)]
    for number, finding in enumerate(large, 1):
        print(f"\n{number}. {finding.rule}{_stake(finding, case)}")
        _print_part("", finding.claim)
        for line in finding.evidence:
            _print_part("seen", line)
        _print_part("why", finding.why)
        _print_part("remedy", finding.remedy)
        _print_part("gain", _gain(finding, case))
    notes = [finding for finding in findings if is_note(finding, case)]
    if not large:
        print("\nno rule finds anything that is worth 3 % of the step")
    if notes:
        print("\nnotes, each under 3 % or without effect on the step:")
    for finding in notes:
        print(f"  {finding.rule}: {finding.claim}; {finding.remedy}")


def _print_part(name: str, text: str) -> None:
    if text:
        first = f"   {name + ':':<8}" if name else "   "
        print(textwrap.fill(text, WIDTH, initial_indent=first, subsequent_indent=" " * 11))


def _stake(finding: Finding, case: Case) -> str:
    if finding.stake_ms is not None:
        part = units.percent(finding.stake_ms / case.step_ms) if case.step_ms > 0 else "?"
        return f" [{units.milliseconds(finding.stake_ms)}, {part} of the step]"
    if finding.stake_bytes is not None:
        part = units.percent(gain_share(finding, case)) if case.capacity_bytes else "?"
        return f" [{units.bytes_(finding.stake_bytes)}, {part} of the memory]"
    return " [cost unknown]"


def _gain(finding: Finding, case: Case) -> str:
    if finding.gain_ms is None:
        return ""
    return f"{units.milliseconds(finding.gain_ms)} ({units.percent(gain_share(finding, case))})"


COMMAND = Command(_flags, _run)
