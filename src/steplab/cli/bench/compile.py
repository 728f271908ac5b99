"""Time the modes of torch.compile: cold and warm start, step, and when it pays."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

from steplab.bench.compile_modes import (
    EAGER,
    MODES,
    CompileMode,
    ModeRuns,
    empty_caches,
    mode_specs,
    mode_table,
)
from steplab.cli.command import Command
from steplab.cli.flags import add_out_flag, add_store_flag, resolve_device
from steplab.cli.progress import CellProgress, step_name
from steplab.cli.step_flags import add_step_flags, add_workload_flags, assumed_device, step_spec
from steplab.cli.sweeps import print_count, require_success
from steplab.core import Environment, Run, RunSpec
from steplab.core.codec import read_word
from steplab.core.errors import UserError
from steplab.report.export import write_table
from steplab.report.terminal import print_table
from steplab.store import Store
from steplab.workers.trials import TrialRunner

DEFAULT_WORKLOAD = "gpt"


def _flags(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    add_workload_flags(parser, words, DEFAULT_WORKLOAD)
    add_step_flags(parser, ("warmup", "steps", "accumulate", "clip", "seed"), batch=4)
    add = parser.add_argument
    scope = partial(read_word, Literal["blocks", "whole", "loss"], where="--scope")
    add(
        "--scope",
        type=scope,
        default="blocks",
        metavar="blocks|whole|loss",
        help="what is compiled",
    )
    mode = partial(read_word, CompileMode, where="--modes")
    add("--modes", nargs="+", type=mode, default=list(MODES), metavar="MODE",
        help=f"{', '.join(MODES)}; default: all")  # fmt: skip
    add("--timeout", type=float, default=1800.0, metavar="SECONDS",
        help="seconds a mode may take; autotuning takes minutes")  # fmt: skip
    add_store_flag(parser)
    add_out_flag(parser)


def _run(args: argparse.Namespace) -> int:
    if not args.timeout > 0:
        raise UserError(f"--timeout must be more than 0 seconds, not {args.timeout}.")
    _specs(args, assumed_device(args.device))  # reports typos before a worker starts (2 s)
    store = Store(args.store)
    store.check_writable()
    with TrialRunner(args.timeout) as trials:
        environment = trials.environment()
    specs = _specs(args, resolve_device(args.device, environment))
    name = partial(step_name, among=list(specs.values()))
    found = []
    with CellProgress(2 * len(specs) - 1, name) as progress:
        for mode, spec in specs.items():
            with empty_caches():
                cold = _measure(args, spec, environment, store, progress)
                again = mode != EAGER and cold.status == "ok"
                warm = _measure(args, spec, environment, store, progress) if again else None
            found.append(ModeRuns(mode, cold, warm))
    table = mode_table(found)
    for path in args.out:  # before printing: a closed pipe must not cost the files
        write_table(table, path)
    print_table(table)
    runs = [run for one in found for run in (one.cold, one.warm) if run is not None]
    print_count(runs, store)
    require_success(runs)
    return 0


def _specs(args: argparse.Namespace, device: str) -> dict[str, RunSpec]:
    return mode_specs(step_spec(args, device), args.scope, args.modes)


def _measure(
    args: argparse.Namespace,
    spec: RunSpec,
    environment: Environment,
    store: Store,
    progress: CellProgress,
) -> Run:
    """Measure in a process of its own, which reads and fills the present caches."""
    with TrialRunner(args.timeout) as trials:
        run = trials.trial(spec, environment, progress=partial(progress.stage, spec))
    run = replace(run, command=tuple(sys.argv))
    store.save(run)
    progress.done(run)
    return run


COMMAND = Command(_flags, _run)
