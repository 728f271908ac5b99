"""Train a model on series or text, with checkpoints that resume exactly."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from steplab.cli.command import Command
from steplab.cli.flags import add_config_flags, add_workload_argument, given_fields, workload_name
from steplab.core import PLAIN, Recipe, registry
from steplab.core.codec import decode
from steplab.core.errors import UserError
from steplab.core.spec import TrainSettings, TrainSpec
from steplab.techniques.recipes import check_recipe, parse_recipe
from steplab.workloads.workload import WorkloadEntry, find_workload

DEFAULT_WORKLOAD = "tsmoe"
# What may differ when a run is resumed: the others make the run what it is.
FREE_SETTINGS = frozenset(
    f.name for f in dataclasses.fields(TrainSettings) if f.metadata["help"].startswith("*")
)


def _flags(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    entry = add_workload_argument(parser, words, DEFAULT_WORKLOAD)
    add = parser.add_argument
    add("--size", default="", help=f"preset: {', '.join(entry.presets)}; empty: by the device")
    add("--device", default="auto", help="cpu, cuda, or auto")
    add("--recipe", default="plain", help="plain, technique=value,..., a preset or a file")
    boolean = argparse.BooleanOptionalAction
    add("--amp", action=boolean, default=None, help="bf16 autocast; default: on with a GPU")
    add("--compile", action="store_true", help="the same as --recipe compile=whole")
    add("--resume", nargs="?", const="newest", default=None, metavar="CHECKPOINT",
        help="go on from a checkpoint, or from the newest in --checkpoint-dir")  # fmt: skip
    add_config_flags(parser, TrainSettings, many=False, prefix="train")
    add_config_flags(parser, entry.config, many=False)


def _run(args: argparse.Namespace) -> int:
    resume = _resumed(args)
    spec = _resumed_spec(args, resume) if resume else _new_spec(args)
    from steplab.cli.training import run_training  # imports torch

    return run_training(spec, resume)


def _new_spec(args: argparse.Namespace) -> TrainSpec:
    name = workload_name(args)
    entry = find_workload(name)
    asked = given_fields(args, "train")
    settings = decode(TrainSettings, asked, "flags")
    if settings.from_checkpoint:
        return _tuned_spec(args, settings)
    if entry.data is None and settings.total_steps:
        raise _no_data(name)
    # Checked before torch is imported (2 s), so that a slip of the pen is told at once.
    entry.resolve(args.size or entry.cpu_preset, given_fields(args))
    recipe = _recipe(args, on_gpu=False)
    device = _device(args.device)
    recipe = _recipe(args, device == "cuda")
    size = args.size or _default_size(entry, device, given_fields(args))
    settings = decode(TrainSettings, {**entry.training.get(size, {}), **asked}, "flags")
    return TrainSpec(name, entry.resolve(size, given_fields(args)), size, recipe, device, settings)


def _no_data(workload: str) -> UserError:
    trained = [n for n in registry.names("steplab.workloads", "WORKLOAD") if find_workload(n).data]
    return UserError(
        f"There is no data to train {workload} on; what can be trained: {', '.join(trained)}.",
        "In a loop of your own, steplab.apply gives it the same step.",
    )


def _default_size(entry: WorkloadEntry, device: str, model_flags: Mapping[str, Any]) -> str:
    """Return the size when none is named; flags of the model change a plain preset."""
    if device == "cuda":
        return entry.gpu_preset
    return entry.cpu_preset if model_flags else entry.starter or entry.cpu_preset


def _tuned_spec(args: argparse.Namespace, settings: TrainSettings) -> TrainSpec:
    """Return the spec of a new run on the model that `--from-checkpoint` names."""
    from steplab.train.pretrained import find_pretrained

    origin = find_pretrained(Path(settings.from_checkpoint))
    if args.workload not in (DEFAULT_WORKLOAD, origin.workload):
        raise UserError(
            f"{origin.path} is a model of {origin.workload}, not of {args.workload}.",
            f"Leave {args.workload} out: the checkpoint knows what it is.",
        )
    if args.size not in ("", origin.size):
        raise origin.conflict("size", args.size, origin.size)
    config = origin.config_with(given_fields(args))
    _recipe(args, on_gpu=False)
    device = _device(args.device)
    recipe = _recipe(args, device == "cuda")
    settings = dataclasses.replace(settings, from_checkpoint=str(origin.path))
    return TrainSpec(origin.workload, config, origin.size, recipe, device, settings)


def _recipe(args: argparse.Namespace, on_gpu: bool) -> Recipe:
    recipe = parse_recipe(args.recipe)
    techniques: dict[str, Any] = dict(recipe.techniques)
    for flag, technique in (("amp", "precision"), ("compile", "compile")):
        if getattr(args, flag) and technique in techniques:
            raise UserError(f"--{flag} and the recipe's {technique} contradict.", "Use one.")
    if args.amp or (args.amp is None and on_gpu and "precision" not in techniques):
        techniques["precision"] = {"dtype": "bf16"}
    if args.compile:
        techniques["compile"] = {"scope": "whole"}
    combined = Recipe(techniques) if techniques else PLAIN
    check_recipe(combined)
    return combined


def _device(asked: str) -> str:
    from steplab.step.assemble import find_device

    if asked != "auto":
        return find_device(asked).type
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _resumed(args: argparse.Namespace) -> Path | None:
    if args.resume is None:
        return None
    from steplab.train.checkpoint_folder import find_checkpoint, newest_checkpoint

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
    asked = given_fields(args, "train")
    if args.workload not in (DEFAULT_WORKLOAD, saved.workload):
        raise UserError(
            f"{path} is a run of {saved.workload}, not of {args.workload}.",
            f"Leave {args.workload} out: the checkpoint knows what it is.",
        )
    for name, value, has in _asked_of_the_run(args, saved):
        if value != has:
            raise _changed(name, has, value)
    for name, value in given_fields(args).items():
        if saved.config.get(name) != value:
            raise _changed(name, saved.config.get(name), value)
    for name, value in asked.items():
        if name not in FREE_SETTINGS and getattr(saved.settings, name) != value:
            raise _changed(name, getattr(saved.settings, name), value)
    free = {name: value for name, value in asked.items() if name in FREE_SETTINGS}
    if "checkpoint_dir" not in free:
        free["checkpoint_dir"] = str(path.parent)
    device = saved.device if args.device == "auto" else _device(args.device)
    settings = dataclasses.replace(saved.settings, **free)
    return dataclasses.replace(saved, settings=settings, device=device)


def _asked_of_the_run(args: argparse.Namespace, saved: TrainSpec) -> list[tuple[str, str, str]]:
    """Return (flag, asked for, saved) for what was given beside settings and config."""
    found = [("size", args.size, saved.size)] if args.size else []
    if args.recipe != "plain" or args.amp is not None or args.compile:
        recipe = _recipe(args, on_gpu=False)
        found.append(("recipe", recipe.label, saved.recipe.label))
    return found


def _changed(name: str, saved: Any, asked: Any) -> UserError:
    flag = name.replace("_", "-")
    return UserError(
        f"--{flag} {asked} differs from the checkpoint's {saved}: that would be another run.",
        f"Leave --{flag} out to resume, or train anew in another --checkpoint-dir.",
    )


COMMAND = Command(_flags, _run)
