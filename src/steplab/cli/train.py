"""Train a model on series or text, with checkpoints that resume exactly."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import shlex
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steplab.cli.command import Command
from steplab.cli.flags import add_config_flags, add_device_flag, given_fields, local_device
from steplab.cli.step_flags import (
    add_model_flag,
    add_recipe_flag,
    add_workload_flags,
    asked_workload,
    own_model,
)
from steplab.core import PLAIN, Recipe, TrainSettings, TrainSpec, registry
from steplab.core.codec import decode
from steplab.core.errors import UserError
from steplab.core.input_file import shorten
from steplab.techniques.recipes import check_recipe
from steplab.workloads.recorded import note_on_code, workload_of_record
from steplab.workloads.workload import WorkloadEntry, find_workload, is_user_model

if TYPE_CHECKING:
    from steplab.train.loop import TrainResult

DEFAULT_WORKLOAD = "tsmoe"
# Settings that may change when a run is resumed; the others define the run.
RESUMABLE = frozenset(f.name for f in dataclasses.fields(TrainSettings) if f.metadata["resumable"])


def _flags(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    add_workload_flags(parser, words, DEFAULT_WORKLOAD)
    add_recipe_flag(parser)
    add_device_flag(parser)
    add = parser.add_argument
    add("--amp", action=argparse.BooleanOptionalAction, default=None,
        help="bf16 autocast; default: on with a GPU")  # fmt: skip
    add("--compile", action="store_true", help="the same as --recipe compile=whole")
    add("--resume", nargs="?", const="newest", default=None, metavar="CHECKPOINT",
        help="continue from a checkpoint, or from the newest in --checkpoint-dir")  # fmt: skip
    add_model_flag(parser, "--resume and --from-checkpoint")
    add_config_flags(parser, "training", TrainSettings, many=False, prefix="train")
    free = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(RESUMABLE))
    parser.epilog = f"A run that is resumed may change --device, {free}."


def _run(args: argparse.Namespace) -> int:
    resume = _resumed(args)
    spec = _resumed_spec(args, resume) if resume else _new_spec(args)
    return run_training(spec, resume)


def _own_model(args: argparse.Namespace) -> WorkloadEntry | None:
    """Return the user's own model, named by `--model` or as the first word; None: a built-in."""
    first = asked_workload(args)
    return own_model(args.model) or (first if is_user_model(first.name) else None)


def _new_spec(args: argparse.Namespace) -> TrainSpec:
    # Everything is checked before torch is imported, which takes 2 s: typos are reported at once.
    entry = asked_workload(args)
    asked, model_flags = given_fields(args, "train"), given_fields(args)
    settings: TrainSettings = decode(TrainSettings, asked, "flags")
    recipe = _recipe(args)
    if settings.from_checkpoint:
        return _fine_tuning_spec(args, settings, recipe)
    if args.model:
        raise UserError(
            "--model is for --resume and --from-checkpoint.",
            f"Name a new model right after the command: steplab train {args.model}",
        )
    if entry.data is None and settings.total_steps:
        raise _no_data(entry.name)
    entry.resolve(args.size or entry.cpu_preset, model_flags)
    device = local_device(args.device)
    size = args.size or _default_size(entry, device, model_flags)
    suited = {k: v for k, v in entry.training.get(size, {}).items() if k not in asked}
    settings = dataclasses.replace(settings, **suited)
    recipe = _with_default_precision(args, recipe, device)
    config = entry.resolve(size, model_flags)
    return TrainSpec(entry.name, config, size, recipe, device, settings, entry.source)


def _no_data(workload: str) -> UserError:
    names = registry.names("steplab.workloads", "WORKLOAD")
    trained = [name for name in names if find_workload(name).data]
    return UserError(
        f"There is no data to train {workload} on; what can be trained: {', '.join(trained)}.",
        "In a loop of your own, steplab.apply gives it the same step.",
    )


def _default_size(entry: WorkloadEntry, device: str, model_flags: Mapping[str, Any]) -> str:
    """Return the size when none is named; flags of the model change a plain preset."""
    if device == "cpu" and not model_flags and entry.starter:
        return entry.starter
    return entry.default_size(device)


def _fine_tuning_spec(
    args: argparse.Namespace, settings: TrainSettings, recipe: Recipe
) -> TrainSpec:
    """Return the spec of a new run on the model that `--from-checkpoint` names."""
    from steplab.train.pretrained import find_pretrained

    origin = find_pretrained(Path(settings.from_checkpoint), _own_model(args))
    _check_workload(args, origin.path, origin.workload.name)
    _say_note(origin.note)
    if args.size not in ("", origin.size):
        raise origin.conflict("size", args.size, origin.size)
    config = origin.config_with(given_fields(args))
    device = local_device(args.device)
    recipe = _with_default_precision(args, recipe, device)
    settings = dataclasses.replace(settings, from_checkpoint=str(origin.path))
    name, source = origin.workload.name, origin.workload.source
    return TrainSpec(name, config, origin.size, recipe, device, settings, source)


def _check_workload(args: argparse.Namespace, path: Path, name: str) -> None:
    """Refuse another built-in workload than that of a checkpoint."""
    if not is_user_model(args.workload) and args.workload not in (DEFAULT_WORKLOAD, name):
        raise UserError(
            f"{path} is a model of {shorten(name)}, not of {args.workload}.",
            f"Leave {args.workload} out: the checkpoint knows what it is.",
        )


def _say_note(note: str) -> None:
    if note:
        say(f"note: {note}")


def _recipe(args: argparse.Namespace) -> Recipe:
    """Return `--recipe` with what `--amp` and `--compile` add to it."""
    techniques = dict(args.recipe.techniques)
    for flag, technique in (("amp", "precision"), ("compile", "compile")):
        if getattr(args, flag) and technique in techniques:
            raise UserError(f"--{flag} and the recipe's {technique} contradict.", "Use one.")
    if args.amp:
        techniques["precision"] = {"dtype": "bf16"}
    if args.compile:
        techniques["compile"] = {"scope": "whole"}
    recipe = Recipe(techniques)
    check_recipe(recipe)
    return recipe


def _with_default_precision(args: argparse.Namespace, recipe: Recipe, device: str) -> Recipe:
    """Add bf16 autocast on a GPU, where neither `--amp` nor the recipe says anything about it."""
    if device == "cpu" or args.amp is not None or "precision" in recipe.techniques:
        return recipe
    recipe = Recipe({**recipe.techniques, "precision": {"dtype": "bf16"}})
    check_recipe(recipe)
    return recipe


def _resumed(args: argparse.Namespace) -> Path | None:
    if args.resume is None:
        return None
    from steplab.train.checkpoint_files import find_checkpoint, newest_checkpoint

    if args.resume != "newest":
        return find_checkpoint(Path(args.resume))
    folder = Path(given_fields(args, "train").get("checkpoint_dir", TrainSettings().checkpoint_dir))
    found = newest_checkpoint(folder)
    if found is None:
        raise UserError(f"There is no checkpoint in {folder}.", "Train first: steplab train")
    return found


def _resumed_spec(args: argparse.Namespace, path: Path) -> TrainSpec:
    """Return the checkpoint's spec with the settings that may change; refuse the others."""
    from steplab.train.checkpoint import read_progress

    saved: TrainSpec = decode(TrainSpec, dict(read_progress(path).spec), f"{path}: spec")
    asked, own = given_fields(args, "train"), _own_model(args)
    _check_workload(args, path, saved.workload)
    workload = workload_of_record(saved.workload, path, own)
    _say_note(note_on_code(workload, saved.workload, saved.source, path))
    for name, value, has in _asked_of_the_run(args, saved):
        if value != has:
            raise _changed(name, has, value)
    for name, value in given_fields(args).items():
        if saved.config.get(name) != value:
            raise _changed(name, saved.config.get(name), value)
    for name, value in asked.items():
        if name not in RESUMABLE and getattr(saved.settings, name) != value:
            raise _changed(name, getattr(saved.settings, name), value)
    free = {name: value for name, value in asked.items() if name in RESUMABLE}
    if "checkpoint_dir" not in free:
        free["checkpoint_dir"] = str(path.parent)
    device = saved.device if args.device == "auto" else local_device(args.device)
    settings = dataclasses.replace(saved.settings, **free)
    name, source = workload.name, workload.source
    return dataclasses.replace(
        saved, workload=name, source=source, settings=settings, device=device
    )


def _asked_of_the_run(args: argparse.Namespace, saved: TrainSpec) -> list[tuple[str, str, str]]:
    """Return (flag, asked for, saved) for what was given besides settings and config."""
    found = [("size", args.size, saved.size)] if args.size else []
    if args.recipe != PLAIN or args.amp is not None or args.compile:
        found.append(("recipe", _recipe(args).label, saved.recipe.label))
    return found


def _changed(name: str, saved: Any, asked: Any) -> UserError:
    flag = name.replace("_", "-")
    return UserError(
        f"--{flag} {asked} differs from the checkpoint's {saved}: that would be another run.",
        f"Leave --{flag} out to resume, or train anew in another --checkpoint-dir.",
    )


def run_training(spec: TrainSpec, resume: Path | None) -> int:
    """Train, print how it goes, and return the exit code. Imports torch."""
    import torch

    from steplab.cli.progress import StepProgress
    from steplab.step.assemble import find_device
    from steplab.train.checkpoint import read_progress
    from steplab.train.checkpoint_files import lock_checkpoint_folder, newest_checkpoint
    from steplab.train.log import TrainingLog, describe_parameters, peak_memory_line
    from steplab.train.loop import stop_on_signal, train

    device = find_device(spec.device)
    precision = str(spec.recipe.techniques.get("precision", {}).get("dtype", "fp32"))
    say(describe_parameters(*_parameters(spec)))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    say(f"device model={name} precision={precision}")
    if not spec.settings.total_steps:
        return 0
    folder = Path(spec.settings.checkpoint_dir) if spec.settings.checkpoint_every else None
    held = newest_checkpoint(folder) if folder and resume is None else None
    if held is not None:
        workload = read_progress(held).spec["workload"]
        elsewhere = "choose another --checkpoint-dir."
        same = workload == spec.workload
        raise UserError(
            f"{folder} holds the checkpoints of another run, of {workload}.",
            f"Go on with it by --resume, or {elsewhere}" if same else elsewhere.capitalize(),
        )
    with contextlib.ExitStack() as stack:
        if folder:
            stack.enter_context(lock_checkpoint_folder(folder))
        stop = stack.enter_context(stop_on_signal())
        progress = stack.enter_context(StepProgress(spec.settings.total_steps))
        log = TrainingLog(progress.say, folder, spec.settings.log_perf_metrics, progress.advance)
        outcome = train(spec, log, stop, resume)
    say(peak_memory_line(device, precision))
    for line in closing_lines(spec, outcome):
        say(line)
    # As shells report it: 128 and the number of the signal.
    return 128 + signal.Signals[stop.signal] if outcome.stopped else 0


def closing_lines(spec: TrainSpec, outcome: TrainResult) -> list[str]:
    """Say where the run ended and how to continue it."""
    total, folder = spec.settings.total_steps, spec.settings.checkpoint_dir
    where = f" --checkpoint-dir {shlex.quote(folder)}" if folder != "checkpoints" else ""
    where += f" --model {shlex.quote(spec.workload)}" if spec.source else ""
    lines = []
    if outcome.stopped:
        lines.append(f"stopped by a signal at step {outcome.step} of {total}")
    if outcome.saved is None:
        return [*lines, "no checkpoint was written (--checkpoint-every 0)"]
    lines.append(f"checkpoint {outcome.saved}")
    more = "" if outcome.stopped else f" --epochs {spec.settings.epochs + 1}"
    return [*lines, f"next: steplab train --resume{where}{more}"]


def say(line: str) -> None:
    """Print one line at once, also into a file."""
    print(line, flush=True)


def _parameters(spec: TrainSpec) -> tuple[int, int]:
    """Return (all, active) parameters; a model without a formula of its own has all active."""
    import torch

    workload = find_workload(spec.workload, spec.source).open(spec.config)
    with torch.device("meta"):
        model = workload.model()
    total = sum(p.numel() for p in model.parameters())
    active = getattr(workload, "active_parameters", None)
    return total, active() if active else total


COMMAND = Command(_flags, _run)
