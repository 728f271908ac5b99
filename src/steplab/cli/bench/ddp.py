"""Climb the ladder of data parallelism: the same step, shared by ranks in every way."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from steplab.bench.ddp import BUCKETS_MB, ladder_table, plan
from steplab.bench.gated_trials import GatedTrials
from steplab.bench.sweep import key_of_size, sweep
from steplab.cli.command import Command
from steplab.cli.flags import add_out_flag, add_store_flag, resolve_device
from steplab.cli.progress import CellProgress
from steplab.cli.step_flags import (
    add_rank_flags,
    add_step_flags,
    add_workload_flags,
    assumed_device,
    step_spec,
)
from steplab.cli.sweeps import collect_runs, print_count, require_success
from steplab.core import RunSpec
from steplab.core.errors import UserError
from steplab.report.export import write_table
from steplab.report.terminal import print_table
from steplab.store import Store
from steplab.workers.trials import TrialRunner

DEFAULT_WORKLOAD = "gpt"
RANKS = 2


def _flags(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    add_workload_flags(parser, words, DEFAULT_WORKLOAD)
    add_step_flags(parser, ("warmup", "steps", "accumulate", "clip", "seed"), batch=4)
    add_rank_flags(parser)
    parser.set_defaults(ranks=RANKS)
    add = parser.add_argument
    add("--bucket-mb", nargs="+", type=int, default=list(BUCKETS_MB), metavar="MB",
        help="bytes that the bucket scheme sends together")  # fmt: skip
    add("--timeout", type=float, default=600.0, metavar="SECONDS", help="seconds a rung may take")
    add_store_flag(parser)
    add_out_flag(parser)


def _run(args: argparse.Namespace) -> int:
    if not args.timeout > 0:
        raise UserError(f"--timeout must be more than 0 seconds, not {args.timeout}.")
    _rungs(args, assumed_device(args.device))  # reports typos before a worker starts (2 s)
    store = Store(args.store)
    store.check_writable()
    with TrialRunner(args.timeout) as trials, GatedTrials(trials) as gated:
        environment = trials.environment()
        specs = _rungs(args, resolve_device(args.device, environment))
        with CellProgress(len(specs)) as progress:
            cells = sweep(
                specs,
                store,
                gated,
                environment,
                sys.argv,
                progress.stage,
                progress.say,
                key_of_size,
            )
            runs = collect_runs(cells, len(specs), store, progress.done)
    table = ladder_table(runs)
    for path in args.out:  # before printing: a closed pipe must not cost the files
        write_table(table, path)
    print_table(table)
    print_count(runs, store)
    require_success(runs)
    return 0


def _rungs(args: argparse.Namespace, device: str) -> list[RunSpec]:
    return plan(step_spec(args, device, recipe=args.recipe), args.bucket_mb)


COMMAND = Command(_flags, _run)
