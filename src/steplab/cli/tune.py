"""`steplab tune [workload]`: climb the ladder, prove every rung, write the winning recipe."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from time import monotonic

from steplab.cli.again import bench_command
from steplab.cli.command import Command
from steplab.cli.flags import (
    add_config_flags,
    add_workload,
    check_device,
    chosen_device,
    given,
    workload_name,
)
from steplab.cli.ladder_view import LadderView
from steplab.engine.gate.remote import Scout
from steplab.engine.gate.spares import Spares
from steplab.errors import UserError
from steplab.record.ladder import Ladder
from steplab.report.terminal import console, print_table
from steplab.spec import RunSpec
from steplab.store import DEFAULT_ROOT, Store
from steplab.store.atomic import disk_errors
from steplab.techniques.parse import parse_recipe
from steplab.techniques.situation import where
from steplab.tune.batch import find_batch, forget_batch
from steplab.tune.impact import impact_table, reasons_table, total_line, untried_table
from steplab.tune.outcome import Files, write_outcome
from steplab.tune.peer import peer_line
from steplab.tune.search import Wish, tune
from steplab.tune.view import View
from steplab.workloads.workload import find_workload

DEFAULT_WORKLOAD = "tsmoe"
BATCH = {"cpu": 4, "cuda": 16}
MINUTES = {"cpu": 2.5, "cuda": 8.0}
# Untimed and timed steps of a candidate before its turns, which are what decides.
WARMUP, STEPS = 2, 5
START_SECONDS = 120.0  # the worker imports torch
TRIAL_SECONDS = 300.0  # that one batch may take when the fastest is looked for
AUTO = "auto"


def _flags(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    entry = add_workload(parser, words, DEFAULT_WORKLOAD)
    add = parser.add_argument
    sizes = ", ".join(entry.presets) or "this workload has none"
    add("--objective", default="time", choices=("time", "memory"), help="what is to be less")
    by_device = "by default {cpu:g} on a CPU, {cuda:g} on a GPU"
    add("--budget", type=float, default=None, metavar="MINUTES",
        help=f"minutes it may take; {by_device.format(**MINUTES)}")  # fmt: skip
    add("--size", default="", help=f"preset size ({sizes}); empty: by the device")
    add("--batch", type=_batch, default=None, metavar="N",
        help=f"sequences per micro-batch, or auto; {by_device.format(**BATCH)}")  # fmt: skip
    add("--also-batch", type=int, default=None, metavar="N",
        help="another batch size at which the numerics must hold")  # fmt: skip
    add("--memory-limit", type=float, default=None, metavar="GIB",
        help="most memory that a step may take; none: what the device has")  # fmt: skip
    add("--mode", default="full", help="how far the step goes")
    add("--recipe", default="plain", help="what to begin with: plain, technique=value,..., a file")
    add("--against", default="", metavar="RECIPE",
        help="hold the winner against this recipe at the end, in turns")  # fmt: skip
    add("--accumulate", type=int, default=1, help="micro-batches per step")
    add("--clip", type=float, default=1.0, help="largest gradient norm; 0 for none")
    add("--seed", type=int, default=42, help="of weights and data")
    add("--device", default="auto", help="cpu, cuda, or auto")
    add("--store", type=Path, default=DEFAULT_ROOT, help="folder of the Runs and ladders")
    add("--out", type=Path, default=None, metavar="DIR",
        help="folder for recipe.toml and report.html; none: in the store")  # fmt: skip
    add_config_flags(parser, entry.config, many=False)


def _run(args: argparse.Namespace) -> int:
    # Checked before a worker is started (2 s), so that a slip of the pen is told at once.
    check_device(args.device)
    _check_numbers(args)
    parse_recipe(args.against or "plain")
    _spec(args, "cpu" if args.device == "auto" else args.device)
    Store(args.store).check_writable()
    if args.out is not None:
        with disk_errors(args.out, "--out"):
            args.out.mkdir(parents=True, exist_ok=True)
    begun, scout, spares = monotonic(), Scout(), Spares()
    try:
        spares.prepare()
        with LadderView(args.objective == "time") as view:
            ladder, files = search(args, begun, scout, spares, view)
    except KeyboardInterrupt:
        console(sys.stderr).print("interrupted. The same command goes on from there.")
        raise
    finally:
        scout.close()
        spares.close()
    show(ladder, files)
    return 0


def search(
    args: argparse.Namespace, begun: float, scout: Scout, spares: Spares, view: View
) -> tuple[Ladder, Files]:
    """Do what the flags ask for, its time counted from `begun` on; write recipe and report."""
    store = Store(args.store)
    environment = scout.environment(START_SECONDS)
    device = chosen_device(args.device, environment)
    spec = _spec(args, device)
    if args.batch == AUTO:
        asked = (spec, store, environment)
        spec = replace(spec, batch=find_batch(*asked, spares, TRIAL_SECONDS, view))
    limit = None if args.memory_limit is None else int(args.memory_limit * 2**30)
    minutes = args.budget or MINUTES[device]
    against = parse_recipe(args.against) if args.against else None
    wish = Wish(args.objective, minutes, begun, limit, args.also_batch, against)
    ladder, folder = tune(spec, wish, store, scout, environment, view, spares)
    if args.batch == AUTO and ladder.finished:
        forget_batch(spec, store, environment)
    view.stage("writing the report")
    return ladder, write_outcome(ladder, store, args.out or folder.path)


def _spec(args: argparse.Namespace, device: str) -> RunSpec:
    name = workload_name(args)
    entry = find_workload(name)
    size = args.size or (entry.gpu_preset if device == "cuda" else entry.cpu_preset)
    return RunSpec(
        workload=name,
        config=entry.resolve(size, given(args)),
        size=size,
        batch={None: BATCH[device], AUTO: 1}.get(args.batch, args.batch),
        accumulate=args.accumulate,
        mode=args.mode,
        recipe=parse_recipe(args.recipe),
        device=device,
        clip=args.clip,
        warmup=WARMUP,
        steps=STEPS,
        seed=args.seed,
        source=entry.source,
    )


def _batch(word: str) -> int | str:
    if word != AUTO and not word.lstrip("-").isdigit():
        raise argparse.ArgumentTypeError(f"a number or auto, not {word!r}")
    return AUTO if word == AUTO else int(word)


def _check_numbers(args: argparse.Namespace) -> None:
    for flag in ("budget", "memory_limit", "also_batch"):
        value = getattr(args, flag)
        if value is not None and not value > 0:
            raise UserError(f"--{flag.replace('_', '-')} must be more than 0, not {value}.")


def show(ladder: Ladder, files: Files) -> None:
    """Print what each rung gained, why, the winner, and where the files are."""
    print_table(impact_table(ladder))
    for table in (reasons_table(ladder, all_rungs=False), untried_table(ladder)):
        if table.rows:
            print_table(table)
    print(f"\n{total_line(ladder)}")
    if ladder.peer is not None:
        print(peer_line(ladder.peer))
    if ladder.waits:
        print(f"the baseline waits for the device {len(ladder.waits)} times: {where(ladder.waits)}")
    print(f"stopped: {ladder.stopped}")
    if ladder.left:
        print(f"left for another call of the same command: {', '.join(ladder.left)}")
    print(f"report  {files.report}")
    if files.recipe is not None:
        print(f"recipe  {files.recipe}")
        print(f"  {bench_command(ladder.spec, files.recipe)}")


COMMAND = Command("try techniques one by one, prove each, keep what wins", _flags, _run)
