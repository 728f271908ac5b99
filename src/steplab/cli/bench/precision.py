"""Show what low precision does: sums, normalizations, dtypes under autocast."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

from steplab.bench.precision import (
    accumulation_table,
    autocast_table,
    normalization_table,
    workload_was_audited,
)
from steplab.cli.command import Command
from steplab.cli.flags import add_device_flag, add_out_flag, add_store_flag, local_device
from steplab.cli.step_flags import add_workload_flags, step_spec
from steplab.core import PLAIN, RunSpec, Table
from steplab.core.codec import read_word
from steplab.core.errors import MeasurementError
from steplab.core.run import new_run
from steplab.report.export import write_table
from steplab.report.terminal import print_table
from steplab.store import Store
from steplab.techniques.recipes import parse_recipe

DEFAULT_WORKLOAD = "gpt"
DTYPES = ("bf16", "fp16")
BATCH = 2  # dtypes do not depend on it; batch norm refuses a batch of 1


def _flags(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    add_workload_flags(parser, words, DEFAULT_WORKLOAD)
    dtype = partial(read_word, Literal["bf16", "fp16"], where="--dtype")
    parser.add_argument("--dtype", nargs="+", type=dtype, default=list(DTYPES),
        metavar="bf16|fp16", help="16-bit dtypes to look at")  # fmt: skip
    add_device_flag(parser)
    add_store_flag(parser)
    add_out_flag(parser)


def _run(args: argparse.Namespace) -> int:
    store = Store(args.store)
    spec, dtypes = _spec(args), list(dict.fromkeys(args.dtype))
    store.check_writable()

    from steplab.probes.environment import capture_environment

    environment, tables = capture_environment(), {}
    for name, table in _tables(spec, dtypes):
        tables[name] = table
        for path in args.out:
            write_table(table, path.with_name(f"{path.stem}.{name}{path.suffix}"))
        print_table(table)
    notes = (f"dtypes studied: {', '.join(dtypes)}",)
    run = replace(new_run(spec, environment), tables=tables, notes=notes)
    if not workload_was_audited(tables["dtypes"]):
        reason = f"{spec.workload} ran under none of {', '.join(dtypes)}."
        store.save(replace(run, status="failed", reason=reason))
        raise MeasurementError(reason, "The status column says why.")
    print(f"{environment.conditions_on(spec.device)}\nsaved {store.save(run)}")
    return 0


def _tables(spec: RunSpec, dtypes: Sequence[str]) -> Iterator[tuple[str, Table]]:
    """Yield each table under its name as soon as it is made."""
    from steplab.step.assemble import find_device

    device = find_device(spec.device)
    yield "accumulation", accumulation_table(device)
    yield "normalization", normalization_table(device, dtypes)
    yield "dtypes", autocast_table(spec, dtypes)


def _spec(args: argparse.Namespace) -> RunSpec:
    """Return the spec of the workload; with several dtypes its recipe is the plain one."""
    one = len(set(args.dtype)) == 1
    recipe = parse_recipe(f"precision={args.dtype[0]}") if one else PLAIN
    device = local_device(args.device)
    return step_spec(args, device, batch=BATCH, mode="forward+backward", recipe=recipe)


COMMAND = Command(_flags, _run)
