"""Pairs of trainings of two recipes, with the same seeds and data, one training after the other.

`run_pairs` keeps every finished training in a folder, so that a study that was interrupted goes on,
and one that could not decide goes on with more pairs. Nothing is ever removed from it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from steplab.bench.loss_gap import LIMIT, MOST_PAIRS, LossGap, Pair, Training
from steplab.core import Environment, Recipe, Run, TrainSpec
from steplab.core.atomic import disk_errors, write_file
from steplab.core.codec import decode, encode
from steplab.core.errors import MeasurementError
from steplab.core.input_file import parse_json, read_input
from steplab.core.run import new_run
from steplab.store import Store, machine_key
from steplab.workloads.workload import find_workload

TRAIN_ONCE = "steplab.bench.convergence:train_once"
VALIDATIONS = 20  # per training: the points of its curve
Side = Literal["reference", "candidate"]
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Study:
    """Two recipes of one workload to train in pairs; `spec` has the reference's."""

    spec: TrainSpec
    candidate: Recipe
    pairs: int
    limit: float = LIMIT

    def training(self, number: int, side: Side) -> TrainSpec:
        """Return one training of pair `number`: its seed is the only thing that pairs differ in."""
        settings = replace(self.spec.settings, seed=self.spec.settings.seed + number)
        recipe = self.spec.recipe if side == "reference" else self.candidate
        return replace(self.spec, settings=settings, recipe=recipe)

    def trainings(self) -> Iterator[tuple[int, Side]]:
        """Yield pair and side in the order of execution: who begins changes from pair to pair.

        First the candidate: what cannot run here is refused before anything has been trained.
        """
        for number in range(self.pairs):
            sides: tuple[Side, Side] = ("candidate", "reference")
            for side in sides if number % 2 == 0 else reversed(sides):
                yield number, side


class StudyFolder:
    """The finished trainings of a study: one small JSON file each."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def load(self, number: int, side: Side) -> Training | None:
        """Return a training that is finished; None: it is still to be done."""
        file = self._file(number, side)
        if not file.exists():
            return None
        found: Training = decode(Training, parse_json(read_input(file), str(file)), str(file))
        return found

    def save(self, number: int, side: Side, training: Training) -> None:
        """Keep a finished training, whole or not at all."""
        with disk_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            text = json.dumps(encode(training), indent=1, allow_nan=False)
            write_file(self._file(number, side), text.encode())

    def finished_pairs(self) -> int:
        """Return how many pairs are finished, from the first one on."""
        for number in range(MOST_PAIRS):
            if not (self.load(number, "reference") and self.load(number, "candidate")):
                return number
        return MOST_PAIRS

    def _file(self, number: int, side: Side) -> Path:
        return self.path / f"{side}-{number:04}.json"


def open_study(store: Store, study: Study, environment: Environment) -> tuple[Study, StudyFolder]:
    """Return a study with all of its pairs that are finished on this machine, and their folder.

    Fewer pairs than are finished cannot be asked for: nobody may choose which of them count.
    """
    work = [encode(study.spec), encode(study.candidate)]
    folder = StudyFolder(store.root / "convergence" / machine_key(environment, work))
    return replace(study, pairs=max(study.pairs, folder.finished_pairs())), folder


class Observer(Protocol):
    """Is told how a study goes on."""

    def stepped(self, steps: int) -> None:
        """So many steps more are done."""

    def trained(self, spec: TrainSpec, training: Training) -> None:
        """A training has ended."""


def run_pairs(
    study: Study,
    folder: StudyFolder,
    train: Callable[[TrainSpec, Progress], Training],
    observer: Observer,
) -> LossGap:
    """Train what is not finished yet, and return what the pairs say."""
    found: dict[tuple[int, Side], Training] = {}
    for number, side in study.trainings():
        spec, training = study.training(number, side), folder.load(number, side)
        done = 0

        def progress(step: str) -> None:
            nonlocal done
            observer.stepped(int(step) - done)
            done = int(step)

        if training is None:
            training = train(spec, progress)
            folder.save(number, side, training)
        progress(str(spec.settings.total_steps))
        observer.trained(spec, training)
        found[number, side] = training
    pairs = [Pair(found[n, "reference"], found[n, "candidate"]) for n in range(study.pairs)]
    return LossGap(study.spec.recipe.label, study.candidate.label, tuple(pairs), study.limit)


def train_once(spec: TrainSpec, progress: Progress) -> Training:
    """Train as `steplab train` does, and return the validation losses; runs in a worker.

    `progress` is told the number of every finished step.
    """
    from steplab.step.trial import clean_up
    from steplab.train.log import TrainingLog
    from steplab.train.loop import train
    from steplab.train.stop import Stop

    log = TrainingLog(lambda line: None, None, False, lambda step: progress(str(step)))
    curve = ValidationCurve()
    log.sinks.append(curve)
    rate, reason = None, ""
    try:
        run = train(spec, log, Stop()).run
        rate = run.tokens_per_second if run else None
    except MeasurementError as error:  # a loss or a weight is not finite
        reason = str(error)
    finally:
        clean_up()
    return Training(spec.settings.seed, tuple(curve.steps), tuple(curve.losses), rate, reason)


class ValidationCurve:
    """A sink of the log that keeps the validation losses."""

    path = Path()

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.losses: list[float] = []

    def write(self, step: int, metrics: Mapping[str, float], about: Mapping[str, Any]) -> None:
        """Keep the loss on the held-out data, where `step` has been validated."""
        if "val/pred" in metrics:
            self.steps.append(step)
            self.losses.append(metrics["val/pred"])


def record(study: Study, gap: LossGap, environment: Environment) -> Run:
    """Return the Run of a study: its tables, its figures as metrics, and the verdict."""
    spec = study.training(0, "candidate")
    overrides = find_workload(spec.workload, spec.source).overrides(spec.size, spec.config)
    step = replace(spec.run_spec(), warmup=0, steps=spec.settings.total_steps, overrides=overrides)
    return replace(
        new_run(step, environment),
        metrics=gap.metrics(),
        tables={
            "pairs": gap.pair_table(),
            "recipes": gap.recipe_table(),
            "curves": gap.curve_table(),
        },
        notes=(f"convergence against {gap.reference}: {gap.sentence}",),
        verdict=gap.verdict,
    )
