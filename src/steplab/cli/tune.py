"""Try techniques one by one, prove each, keep what wins.

`steplab tune [workload]` climbs the ladder, puts every rung through the gate and writes the recipe
that won, with a report.
"""

from __future__ import annotations

import argparse
import functools
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any, Self

from rich import box
from rich.console import Group
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table as RichTable
from rich.text import Text

from steplab.cli.command import Command, Parser, split_rest
from steplab.cli.flags import AUTO, add_store_flag, folder_to_write, resolve_device
from steplab.cli.step_flags import (
    add_rank_flags,
    add_step_flags,
    add_workload_flags,
    assumed_device,
    check_gpus,
    step_spec,
    value_of,
)
from steplab.core import Environment, Recipe, RunSpec
from steplab.core.errors import UserError
from steplab.core.ladder import Ladder, Rung, Untried, named_rungs
from steplab.core.output_file import output_file
from steplab.core.printable import printable
from steplab.report.terminal import console, print_table
from steplab.store import Store
from steplab.techniques.context import format_waits
from steplab.techniques.optimizer import ADAM_8BIT
from steplab.techniques.precision import FP8
from steplab.techniques.recipes import parse_recipe, shared_by
from steplab.tune.batch_size import find_batch, forget_batch
from steplab.tune.options import TuneOptions
from steplab.tune.own_loop import own_loop_lines
from steplab.tune.progress import View, format_timings
from steplab.tune.report import (
    PICTURE_FILE,
    RECIPE_FILE,
    REPORT_FILE,
    OutcomeFiles,
    batch_line,
    batches_table,
    expectation,
    gain_text,
    impact_table,
    outlier_lines,
    padding_line,
    peer_line,
    reasons_table,
    total_line,
    undecided_line,
    untried_table,
    write_outcome,
)
from steplab.tune.search import tune
from steplab.verify.remote import ReferenceWorker
from steplab.workers.pool import WorkerPool
from steplab.workers.ranks import start_worker
from steplab.workloads.script.lift import Survey
from steplab.workloads.user_model import SCRIPT
from steplab.workloads.workload import find_workload

DEFAULT_WORKLOAD = "tsmoe"
BATCH = {"cpu": 4, "cuda": 16}
MINUTES = {"cpu": 2.5, "cuda": 8.0}
# Untimed and timed steps of a candidate before the alternation, which decides.
WARMUP, STEPS = 2, 5
START_SECONDS = 120.0  # the worker imports torch
SURVEY = "steplab.workloads.script.lift:survey"
SCRIPT_SECONDS = 600.0  # for a script to load its data and to make its first steps
# A tenth of the tokens for nothing is more than most rungs gain.
MUCH_PADDING = 0.1
TRIAL_SECONDS = 300.0  # for one batch size, when the fastest is looked for


def _flags(parser: Parser, words: Sequence[str]) -> None:
    parser.takes_rest = True
    words, _ = split_rest(words)
    script = value_of("--script", words)
    if script and words and not words[0].startswith("-"):
        raise UserError(f"{words[0]} and --script {script} both name what is tuned.", "Use one.")
    parser.rest_of = script
    add_workload_flags(parser, [f"{SCRIPT}{script}"] if script else words, DEFAULT_WORKLOAD)
    about = "a training script, run unedited until it has made a few steps; its words follow --"
    parser.add_argument("--script", default="", metavar="FILE", help=about)
    add_step_flags(parser, ("accumulate", "clip", "seed"), batch=BATCH, auto_batch=True)
    parser.set_defaults(clip=None)  # what is only a default does not go into the user's loop
    if script:  # it has its own
        parser.set_defaults(accumulate=None)
    add_rank_flags(parser)
    add = parser.add_argument
    add("--objective", default="time", choices=("time", "memory"), help="what to reduce")
    about = "minutes it may take; default: {cpu:g} on a CPU, {cuda:g} on a GPU"
    add("--budget", type=float, metavar="MINUTES", help=about.format(**MINUTES))
    add("--also-batch", type=int, default=None, metavar="N",
        help="another batch size at which the numerics must hold")  # fmt: skip
    add("--memory-limit", type=float, default=None, metavar="GIB",
        help="memory that a step may take at most; default: all that the device has")  # fmt: skip
    add("--against", type=parse_recipe, default=None, metavar="RECIPE",
        help="compare the winner with this recipe at the end, alternating")  # fmt: skip
    add("--allow", action="append", default=[], choices=(ADAM_8BIT, FP8), metavar="SETTING",
        help=f"try a setting that changes what is computed too: {ADAM_8BIT}, {FP8}")  # fmt: skip
    add_store_flag(parser)
    add("--out", type=folder_to_write("--out"), default=None, metavar="DIR",
        help="folder for recipe.toml and report.html; default: in the store")  # fmt: skip


def _run(args: argparse.Namespace) -> int:
    for flag in ("budget", "memory_limit", "also_batch"):
        value = getattr(args, flag)
        if value is not None and not value > 0:
            raise UserError(f"--{flag.replace('_', '-')} must be more than 0, not {value}.")
    if args.rest and not args.script:
        raise UserError("Words after -- are for a script.", "Name it: --script train.py -- ARGS.")
    if args.script:
        args.config_arguments = shlex.join(args.rest)
    _spec(args, assumed_device(args.device))  # reports typos before a worker starts (2 s)
    Store(args.store).check_writable()
    if args.out is not None:
        for name in (RECIPE_FILE, REPORT_FILE, PICTURE_FILE):
            output_file(args.out / name)
    started = monotonic()
    with ReferenceWorker() as reference, WorkerPool() as workers:
        if args.ranks == 1:  # several join a group on their device, which is not known yet
            workers.refill()
        try:
            with LadderView(args.objective == "time") as view:
                ladder, files = search(args, started, reference, workers, view)
        except KeyboardInterrupt:
            console(sys.stderr).print("interrupted. The same command goes on from there.")
            raise
    show(ladder, files, clip_is_theirs=args.clip is not None or bool(args.script))
    return 0


def search(
    args: argparse.Namespace,
    started: float,
    reference: ReferenceWorker,
    workers: WorkerPool,
    view: View,
) -> tuple[Ladder, OutcomeFiles]:
    """Do what the flags ask for, its time counted from `started` on; write recipe and report."""
    store = Store(args.store)
    environment = reference.environment(START_SECONDS)
    device = resolve_device(args.device, environment)
    spec = _spec(args, device)
    check_gpus(spec, environment)
    own_recipe = None
    if args.script:
        spec, own_recipe = lift_script(spec, args, reference, view)
    if spec.ranks > 1:
        workers.start = functools.partial(start_worker, spec)
        workers.refill()
    if args.batch == AUTO:
        batch = find_batch(spec, store, environment, workers, TRIAL_SECONDS, view)
        spec = replace(spec, batch=batch)
    limit = None if args.memory_limit is None else int(args.memory_limit * 2**30)
    minutes = args.budget or MINUTES[device]
    against, own = (
        None if one is None else shared_by(one, spec.ranks) for one in (args.against, own_recipe)
    )
    options = TuneOptions(
        objective=args.objective,
        minutes=minutes,
        begun=started,
        memory_limit=limit,
        also_batch=args.also_batch,
        against=against,
        own=own,
        larger_batches=args.batch == AUTO and args.objective == "time",
        allowed=tuple(sorted(set(args.allow))),
    )
    ladder, folder = tune(spec, options, store, reference, environment, view, workers)
    if args.batch == AUTO and ladder.finished:
        forget_batch(spec, store, environment)
    view.stage("writing the report")
    if args.out is not None:
        return ladder, write_outcome(ladder, store, args.out, "--out")
    return ladder, write_outcome(ladder, store, folder.path, "--store")


def _spec(args: argparse.Namespace, device: str) -> RunSpec:
    clip = 0.0 if args.script else RunSpec.clip
    defaults = {"batch": BATCH[device], "accumulate": 1, "clip": clip}
    unset: dict[str, Any] = {
        key: value for key, value in defaults.items() if getattr(args, key) is None
    }
    return step_spec(args, device, warmup=WARMUP, steps=STEPS, **unset)


def lift_script(
    spec: RunSpec, args: argparse.Namespace, reference: ReferenceWorker, view: View
) -> tuple[RunSpec, Recipe | None]:
    """Return the spec of a script's step, and the recipe that the script has already."""
    view.stage(f"running {args.script} until it has made a few steps")
    found = reference.worker.call(SURVEY, Survey, timeout=SCRIPT_SECONDS, spec=spec)
    if found.refusal:
        raise _refusal(found, reference.worker.printed())
    view.say(f"{args.script}: {found.words}")
    own: dict[str, Any] = {"batch": found.batch, "accumulate": found.accumulate, "clip": found.clip}
    unset = {key: value for key, value in own.items() if getattr(args, key) is None}
    spec = replace(spec, config={**spec.config, "start": found.start}, **unset)
    if found.recipe == "plain":
        return spec, None
    view.say(f"it has {found.recipe} already, with which the winner is compared at the end")
    return spec, parse_recipe(found.recipe)


def _refusal(found: Survey, printed: Sequence[str]) -> UserError:
    """Return the error for a script that cannot be lifted out; print the start of a factory."""
    message, remedy = found.refusal, found.remedy
    if found.ended and printed:
        message += f" Its last words: {printed[-1].rstrip('.')}."
    if found.beginning:
        print(found.beginning)
        remedy = f"{remedy} Write it as a factory; a start is printed above.".lstrip()
    return UserError(message, remedy)


def show(ladder: Ladder, files: OutcomeFiles, clip_is_theirs: bool = False) -> None:
    """Print what each rung gained, why, the winner, and where the files are.

    `clip_is_theirs`: see `own_loop_lines`.
    """
    print_table(impact_table(ladder))
    tables = (reasons_table(ladder, all_rungs=False), batches_table(ladder), untried_table(ladder))
    for table in tables:
        if table.rows:
            print_table(table)
    print(f"\n{total_line(ladder)}")
    if ladder.peer is not None:
        print(peer_line(ladder.peer))
    if ladder.waits:
        lines = format_waits(ladder.waits)
        print(f"the baseline waits for the device {len(ladder.waits)} times: {lines}")
    for line in outlier_lines(ladder):
        print(line)
    if ladder.batches:
        print(batch_line(ladder))
    if ladder.padding > MUCH_PADDING:
        print(padding_line(ladder))
    print(f"stopped: {ladder.stopped}")
    if line := undecided_line(ladder):
        print(line)
    if ladder.left:
        print(f"left for another call of the same command: {', '.join(ladder.left)}")
    print(f"report  {files.report}")
    if files.recipe is not None:
        print(f"recipe  {files.recipe}")
        print(f"  {bench_command(ladder.spec, files.recipe, ladder.environment)}")
        for line in own_loop_lines(ladder, files.recipe, clip_is_theirs):
            print(line)


def bench_command(spec: RunSpec, recipe: Path, environment: Environment) -> str:
    """Return `steplab bench step ...` for the step of `spec` with the recipe of a file."""
    preset = find_workload(spec.workload, spec.source).resolve(spec.size, {})
    words = ["steplab", "bench", "step", spec.workload]
    words += ["--size", spec.size] if spec.size else []
    words += ["--batch", str(spec.batch)]
    words += ["--accumulate", str(spec.accumulate)] if spec.accumulate > 1 else []
    words += ["--clip", f"{spec.clip:.12g}"] if spec.clip != RunSpec.clip else []
    words += ["--seed", str(spec.seed)] if spec.seed != RunSpec.seed else []
    words += ["--ranks", str(spec.ranks)] if spec.ranks > 1 else []
    words += ["--backend", spec.backend] if spec.backend else []
    words += ["--device", spec.device] if spec.device != resolve_device(AUTO, environment) else []
    for name, value in spec.config.items():
        if value != preset[name]:
            shown = str(value).lower() if isinstance(value, bool) else str(value)
            words += [f"--{name.replace('_', '-')}", shown]
    return shlex.join([*words, "--mode", spec.mode, "--recipe", str(recipe)])


OUTCOME_STYLES = {"kept": "green", "needed": "green", "red gate": "red", "failed": "red"}
COLUMNS = ("rung", "ceiling", "outcome", "speed-up", "why")


class LadderView:
    """What `tune` shows while it climbs: a table that grows on a terminal, plain lines elsewhere.

    On stderr, so that stdout holds the result alone.
    """

    def __init__(self, in_ms: bool) -> None:
        self.out = console(sys.stderr)
        self.in_ms = in_ms
        self.rungs: list[Rung] = []
        self.now = "starting"
        self.live = Live(console=self.out, transient=True, refresh_per_second=4)
        self.drawn = sys.stderr.isatty()

    def __enter__(self) -> Self:
        if self.drawn:
            self.live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self.drawn:
            self.live.stop()

    def stage(self, text: str) -> None:
        """Show what is being done right now, where it can be erased again."""
        self.now = text
        self._draw()

    def say(self, text: str) -> None:
        """Print a line that stays."""
        self.out.print(Text(printable(text)))

    def rung(self, rung: Rung) -> None:
        """Add a row, or print it where nothing is drawn."""
        self.rungs.append(rung)
        if not self.drawn:
            cells = self._cells(*named_rungs(self.rungs)[-1])
            self.say(f"[{len(self.rungs)}] " + ": ".join(filter(None, cells)))
            self.say(f"    {rung.seconds:.1f} s: {format_timings(rung.parts)}")
        self._draw()

    def untried(self, suggestion: Untried) -> None:
        """Print a suggestion that cannot be tried here."""
        if not self.drawn:
            self.say(f"[-] {suggestion.label}: not tried: {suggestion.reason}")

    def _draw(self) -> None:
        if not self.drawn:
            return
        table = RichTable(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
        for name in COLUMNS:
            table.add_column(name)
        for name, rung in named_rungs(self.rungs):
            style = OUTCOME_STYLES.get(rung.outcome, "")
            table.add_row(*(Text(printable(cell), style=style) for cell in self._cells(name, rung)))
        self.live.update(Group(table, Spinner("dots", Text(printable(self.now)))))

    def _cells(self, name: str, rung: Rung) -> tuple[str, ...]:
        """Return the cells of a row; a red gate shows no speed-up."""
        shown = rung.gain if rung.green else None
        gain = gain_text(shown) if shown and not shown.says_nothing else ""
        why = f"{rung.reason}; {rung.remedy}" if rung.remedy else rung.reason
        if self.in_ms and shown:
            why = rung.remedy
        return name, expectation(rung), rung.outcome, gain, why


COMMAND = Command(_flags, _run)
