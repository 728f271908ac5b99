"""Train two recipes in pairs and tell whether one learns what the other learns."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from steplab.bench.convergence import (
    TRAIN_ONCE,
    VALIDATIONS,
    Progress,
    Study,
    open_study,
    record,
    run_pairs,
)
from steplab.bench.loss_gap import FEWEST_PAIRS, LIMIT, MOST_PAIRS, Training
from steplab.cli.command import Command
from steplab.cli.flags import (
    add_device_flag,
    add_out_flag,
    add_store_flag,
    given_fields,
    resolve_device,
)
from steplab.cli.progress import ItemProgress
from steplab.cli.step_flags import (
    add_recipe_flag,
    add_workload_flags,
    asked_workload,
    assumed_device,
)
from steplab.core import PLAIN, TrainSettings, TrainSpec, units
from steplab.core.errors import MeasurementError, UserError
from steplab.report.export import write_table
from steplab.report.terminal import print_table
from steplab.store import Store
from steplab.techniques.recipes import parse_recipe
from steplab.workers.client import Worker, WorkerLost

DEFAULT_WORKLOAD = "tsmoe"
START_SECONDS = 120.0  # the worker imports torch
RED = 1  # exit code where the candidate is not shown to learn the same
DECAY = 20  # the last learning rate is this much smaller than the highest
# Flags that are settings of a training, under the names and with the defaults of `train`.
SETTINGS: dict[str, tuple[type, str]] = {
    "batch_size": (int, "windows per micro-batch"),
    "accumulate": (int, "micro-batches per step"),
    "lr": (float, f"highest learning rate; a cosine ends at 1/{DECAY} of it"),
    "seed": (int, "seed of the first pair; the next pairs count up from it"),
    "dataset_path": (str, "file or folder of series or text; default: generated"),
    "val_path": (str, "the same for validation"),
    "validation_batches": (int, f"batches of each of {VALIDATIONS} validations"),
}


def _flags(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    add_workload_flags(parser, words, DEFAULT_WORKLOAD)
    add_recipe_flag(parser)
    add = parser.add_argument
    add("--reference", type=parse_recipe, default=PLAIN, metavar="RECIPE",
        help="the recipe to compare with; default: plain")  # fmt: skip
    add("--pairs", type=int, default=FEWEST_PAIRS, metavar="N",
        help=f"trainings of each recipe, with the same seeds; at most {MOST_PAIRS}")  # fmt: skip
    add("--steps", type=int, default=1000, metavar="N", help="steps of each training")
    add("--limit", type=float, default=LIMIT * 100, metavar="PERCENT",
        help="the gap of the losses that is allowed")  # fmt: skip
    for name, (kind, about) in SETTINGS.items():
        add(f"--{name.replace('_', '-')}", dest=f"train_{name}", type=kind,
            default=argparse.SUPPRESS, metavar="TEXT" if kind is str else "N",
            help=about)  # fmt: skip
    add_device_flag(parser)
    add("--timeout", type=float, default=7200.0, metavar="SECONDS",
        help="seconds that a training may take")  # fmt: skip
    add_store_flag(parser)
    add_out_flag(parser)


def _run(args: argparse.Namespace) -> int:
    _study(args, assumed_device(args.device))  # reports typos before a worker starts (2 s)
    store = Store(args.store)
    store.check_writable()
    with Worker() as worker:
        environment = worker.environment(START_SECONDS)
        asked = _study(args, resolve_device(args.device, environment))
        study, folder = open_study(store, asked, environment)
        if folder.finished_pairs() == study.pairs:
            print(
                f"All {study.pairs} pairs here are finished, in {folder.path}. To train them anew, "
                "remove that folder or name another --store.",
                file=sys.stderr,
            )

        def train(spec: TrainSpec, progress: Progress) -> Training:
            try:
                return worker.call(
                    TRAIN_ONCE, Training, timeout=args.timeout, progress=progress, spec=spec
                )
            except WorkerLost as lost:
                raise MeasurementError(
                    f"The training of {spec.recipe} with seed {spec.settings.seed} was lost: "
                    f"{lost.reason}.",
                    f"The same command goes on from what is in {folder.path}.",
                ) from None

        with StudyProgress(study) as progress:
            try:
                gap = run_pairs(study, folder, train, progress)
            except KeyboardInterrupt:
                print(f"The same command goes on from what is in {folder.path}.", file=sys.stderr)
                raise
    run = record(study, gap, environment)
    for path in args.out:  # before printing: a closed pipe must not cost the files
        for name, table in run.tables.items():
            write_table(table, path.with_name(f"{path.stem}.{name}{path.suffix}"))
    saved = store.save(run)
    print_table(gap.recipe_table())
    print_table(gap.pair_table())
    print(f"{environment.conditions_on(study.spec.device)}\nsaved {saved}")
    return 0 if gap.verdict == "green" else RED


class StudyProgress(ItemProgress):
    """Progress over the steps of all trainings, on stderr; a line for each one that has ended."""

    def __init__(self, study: Study) -> None:
        self.total, self.count = 2 * study.pairs, 0
        super().__init__("steps", self.total * study.spec.settings.total_steps)

    def stepped(self, steps: int) -> None:
        """Move the bar."""
        self.advance(steps)

    def trained(self, spec: TrainSpec, training: Training) -> None:
        """Say how a training ended."""
        self.count += 1
        ended = training.reason or f"loss {training.loss:.5g}"
        rate = f", {units.count(training.tokens_per_s)} tokens/s" if training.tokens_per_s else ""
        self.say(f"[{self.count}/{self.total}] seed {training.seed} {spec.recipe}: {ended}{rate}")


def _study(args: argparse.Namespace, device: str) -> Study:
    """Return what the flags ask for on a device."""
    if not FEWEST_PAIRS <= args.pairs <= MOST_PAIRS:
        raise UserError(
            f"--pairs must be {FEWEST_PAIRS} to {MOST_PAIRS}, not {args.pairs}: the intervals are "
            "made for so many."
        )
    if args.steps < VALIDATIONS:
        raise UserError(f"--steps must be at least {VALIDATIONS}, not {args.steps}.")
    if not args.limit > 0 or not args.timeout > 0:
        raise UserError("--limit and --timeout must be more than 0.")
    entry = asked_workload(args)
    if entry.data is None:
        raise UserError(f"There is no data to train {entry.name} on.", "Try tsmoe.")
    size = args.size or entry.default_size(device)
    config, asked = entry.resolve(size, given_fields(args)), given_fields(args, "train")
    if "dataset_path" in asked and "val_path" not in asked:
        raise UserError("The gap is that of the validation loss.", "Give --val-path too.")
    return Study(
        TrainSpec(
            entry.name,
            config,
            size,
            args.reference,
            device,
            _settings(args.steps, {**entry.training.get(size, {}), **asked}),
            entry.source,
        ),
        args.recipe,
        args.pairs,
        args.limit / 100,
    )


def _settings(steps: int, asked: dict[str, Any]) -> TrainSettings:
    known = {name: value for name, value in asked.items() if name in SETTINGS}
    rate = known.get("lr", TrainSettings().lr)
    return TrainSettings(
        steps_per_epoch=steps,
        min_lr=rate / DECAY,
        log_every=steps,
        validate_every=steps // VALIDATIONS,
        checkpoint_every=0,
        **known,
    )


COMMAND = Command(_flags, _run)
