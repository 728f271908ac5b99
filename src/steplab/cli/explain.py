"""Say what slows a step down, from a stored Run or a trace."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from steplab.cli.command import Command
from steplab.cli.flags import add_store_flag, add_view_flag, page_to_write
from steplab.core import codec, units
from steplab.core.errors import UserError
from steplab.core.input_file import shorten
from steplab.findings import Case, case_of_folder, case_of_run, case_of_trace, explain
from steplab.report.budget import print_budget
from steplab.report.pages import write_explain_page
from steplab.report.ranks import print_ranks
from steplab.report.terminal import print_table
from steplab.store import Store
from steplab.trace.analysis import Analysis, run_budget
from steplab.trace.load import names_trace
from steplab.trace.work_table import work_table

NO_TRACE = "Record one with: steplab profile"


def _flags(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    add = parser.add_argument
    add("run", nargs="?", default="last", metavar="RUN",
        help="a Run's id, part of it, `last`, a trace file (.json, .json.gz), or a folder of "
        "traces, one per rank")  # fmt: skip
    add_store_flag(parser)
    add("--page", type=page_to_write("--page"), default=None, metavar="FILE",
        help="also write a page (.html)")  # fmt: skip
    add_view_flag(parser)
    add("--json", action="store_true", help="print the findings as JSON, and nothing else")


def _run(args: argparse.Namespace) -> int:
    trace = args.run if names_trace(args.run) else ""
    if trace:
        path = Path(trace)
        case = case_of_folder(path) if path.is_dir() else case_of_trace(path)
    else:
        store = Store(args.store)
        case = case_of_run(store.load(args.run), store)
    findings = explain(case)
    if args.page:
        write_explain_page(
            case.run, case.analysis, findings, args.page, trace, "--page", case.ranks
        )
    if args.json:
        print(json.dumps(codec.encode(findings.record()), indent=2))
        return 0
    if trace:
        what = f"traces of {units.counted(len(case.ranks.rows), 'rank')}" if case.ranks else ""
        print(f"{shorten(trace)}: {what or 'a trace on its own'}")
    else:
        _print_run(case)
    budget = run_budget(case.run, case.analysis)
    if case.ranks is not None:
        print_ranks(case.ranks)
    elif budget is not None:
        print_budget(budget)
    for view in args.by:
        print_table(work_table(_analysis(case), view))
    print(f"\n{findings}")
    if args.page:
        print(f"\nwritten {args.page}")
    return 0


def _analysis(case: Case) -> Analysis:
    if case.analysis is None:
        raise UserError("This Run has no trace, so --by has nothing to show.", NO_TRACE)
    return case.analysis


def _print_run(case: Case) -> None:
    run = case.run
    assert run is not None
    print(f"{run.id}: {run.status}{f', {run.reason}' if run.reason else ''}")
    if case.analysis is None and run.status == "ok":
        command = shlex.join(["steplab", "profile", run.spec.workload])
        print(f"no trace: `{command}` records one, which shows more")


COMMAND = Command(_flags, _run)
