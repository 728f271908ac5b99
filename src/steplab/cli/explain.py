"""`steplab explain [run]`: what is in the way, as far as a stored Run tells."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from steplab import units
from steplab.cli.command import Command
from steplab.explain import explain
from steplab.store import DEFAULT_ROOT, Store


def _flags(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    parser.add_argument("run", nargs="?", default="last", help="a Run's id, part of it, or `last`")
    parser.add_argument("--store", type=Path, default=DEFAULT_ROOT, help="folder of the Runs")


def _run(args: argparse.Namespace) -> int:
    run = Store(args.store).load(args.run)
    print(f"{run.id}: {run.status}{f', {run.reason}' if run.reason else ''}")
    findings = explain(run)
    for finding in findings:
        stake = f" [{units.milliseconds(finding.stake_ms)}]" if finding.stake_ms else ""
        print(f"\n{finding.rule}{stake}: {finding.claim}")
        print(f"  evidence: {'; '.join(finding.evidence)}\n  remedy:   {finding.remedy}")
    if not findings:
        print("no rule finds anything")
    return 0


COMMAND = Command("say what is in the way, from a stored Run", _flags, _run)
