"""Flags of the commands that run a training step, and the RunSpec that they ask for.

`bench step`, `tune`, `profile`, `lint` and `train` name the same things by the same flags.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from steplab.cli.flags import AUTO, add_config_flags, add_device_flag, given_fields
from steplab.core import MODES, PLAIN, Environment, RunSpec, fingerprint
from steplab.core.errors import UserError
from steplab.core.spec import BACKENDS
from steplab.parallel.environment import launched_size
from steplab.techniques.recipes import parse_recipe, shared_by
from steplab.workloads.user_model import load_user_model
from steplab.workloads.workload import HUGGING_FACE, WorkloadEntry, requested_workload

# Fields of RunSpec that commands may take as flags: type and help. The defaults are RunSpec's.
SPEC_FLAGS: Mapping[str, tuple[type, str]] = {
    "warmup": (int, "untimed steps"),
    "steps": (int, "timed steps"),
    "accumulate": (int, "micro-batches per step"),
    "clip": (float, "largest gradient norm; 0: no clipping"),
    "seed": (int, "seed of weights and data"),
    "peak_tflops": (float, "dense peak for MFU in TFLOP/s; default: that of the catalog"),
}
SPELLINGS = {"peak_tflops": "--mfu-peak-tflops"}


def add_workload_flags(
    parser: argparse.ArgumentParser, words: Sequence[str], default: str, many: bool = False
) -> WorkloadEntry:
    """Add the workload as the first word, `--size`, and a flag for every field of its config.

    With `many`, flags take one or more values, which span a grid.
    """
    model = value_of("--hf", words)
    named = words[0] if words and not words[0].startswith("-") else ""
    if model and named:
        raise UserError(f"There are two workloads, {named} and --hf {model}.", "Name one of them.")
    name = named or (f"{HUGGING_FACE}{model}" if model else default)
    entry = requested_workload(name)
    about = "a built-in workload, path/to/file.py:factory or package.module:factory; comes first"
    parser.add_argument("workload", nargs="?", default=name, help=about)
    about = "a Hugging Face model with random weights: a model type, a folder or its config.json"
    parser.add_argument("--hf", default="", metavar="NAME_OR_FOLDER", help=about)
    parser.set_defaults(entry=entry)
    presets = ", ".join(entry.presets) or "this workload has none"
    about = f"preset ({presets}); default depends on the device"
    parser.add_argument(
        "--size", nargs="+" if many else None, default=[] if many else "", help=about
    )
    add_config_flags(parser, f"{entry.name}, {entry.summary}", entry.config, many)
    return entry


def value_of(flag: str, words: Sequence[str]) -> str:
    """Return the value of a flag that decides which flags there are; "" where it is not given."""
    for word, following in itertools.pairwise([*words, ""]):
        if word == flag:
            return following
        if word.startswith(f"{flag}="):
            return word.removeprefix(f"{flag}=")
    return ""


def add_model_flag(parser: argparse.ArgumentParser, record: str = "a checkpoint") -> None:
    """Add `--model`: a record of one's own model holds no code, so the user names the file."""
    about = f"the file of your own model, for {record} of one: my_model.py:make"
    parser.add_argument("--model", default="", metavar="FILE:FACTORY", help=about)


def own_model(word: str) -> WorkloadEntry | None:
    """Return the model that `--model` names, imported; None where the flag is not given."""
    return load_user_model(word) if word else None


def add_recipe_flag(parser: argparse.ArgumentParser, many: bool = False) -> None:
    """Add `--recipe`, read and checked while the command line is parsed."""
    about = "plain, technique=value,..., a preset or a .toml file"
    options: dict[str, Any] = {"nargs": "+", "default": [PLAIN]} if many else {"default": PLAIN}
    parser.add_argument("--recipe", type=parse_recipe, help=about, **options)


def add_step_flags(
    parser: argparse.ArgumentParser,
    fields: Sequence[str],
    batch: int | Mapping[str, int],
    many: bool = False,
    auto_batch: bool = False,
) -> None:
    """Add `--batch`, `--mode`, `--recipe`, `--device` and the flags of SPEC_FLAGS named `fields`.

    `batch` is the default, or the default on each device. `auto_batch`: `--batch auto` is taken.
    """
    several: dict[str, Any] = {"nargs": "+"} if many else {}
    about = "sequences per micro-batch"
    default: Any = [batch] if many else batch
    if auto_batch:
        about += "; auto: the fastest that fits"
    if isinstance(batch, Mapping):
        about += f"; default: {batch['cpu']} on a CPU, {batch['cuda']} on a GPU"
        default = None
    add = parser.add_argument
    reader = _batch_or_auto if auto_batch else int
    add("--batch", type=reader, default=default, metavar="N", help=about, **several)
    default = list(MODES) if many else "full"
    about = f"how far the step goes: {', '.join(MODES)}"
    add("--mode", type=_mode, default=default, metavar="MODE", help=about, **several)
    add_recipe_flag(parser, many)
    defaults = {field.name: field.default for field in dataclasses.fields(RunSpec)}
    for name in fields:
        kind, about = SPEC_FLAGS[name]
        flag = SPELLINGS.get(name, f"--{name}")
        default = [defaults[name]] if name == "warmup" and many else defaults[name]
        options = several if name == "warmup" else {}
        metavar = "N" if kind is int else "X"
        add(flag, dest=name, type=kind, default=default, metavar=metavar, help=about, **options)
    add_device_flag(parser)


def add_rank_flags(parser: argparse.ArgumentParser, many: bool = False) -> None:
    """Add `--ranks`, the processes on this machine that share the step, and `--backend`."""
    add = parser.add_argument
    several: dict[str, Any] = {"nargs": "+", "default": [1]} if many else {"default": 1}
    add(
        "--ranks",
        type=int,
        metavar="N",
        help="processes that share the step, one per GPU",
        **several,
    )
    add("--backend", default="", metavar="|".join(BACKENDS),
        help="how ranks talk: nccl between GPUs, gloo between CPUs or on one GPU; "
        "default: by the device")  # fmt: skip


def asked_workload(args: argparse.Namespace) -> WorkloadEntry:
    """Return the workload; one that came after flags was not asked for its own flags."""
    entry: WorkloadEntry = args.entry
    if args.workload != entry.name:
        raise UserError(
            f"The workload {args.workload!r} comes after flags.", "Name it right after the command."
        )
    return entry


def step_spec(args: argparse.Namespace, device: str, **changes: Any) -> RunSpec:
    """Return what the flags ask for on a device; `changes` are fields that they do not decide.

    `--batch auto` begins with one sequence.
    """
    entry = asked_workload(args)
    size = args.size or entry.default_size(device)
    config = entry.resolve(size, given_fields(args))
    if "ranks" in args:
        _refuse_launcher()
        changes = {"recipe": shared_by(args.recipe, args.ranks), **changes}
    return _spec(args, entry, size, config, device, changes)


def _spec(
    args: argparse.Namespace,
    entry: WorkloadEntry,
    size: str,
    config: Mapping[str, Any],
    device: str,
    changes: Mapping[str, Any],
) -> RunSpec:
    names = ("batch", "mode", "recipe", "ranks", "backend", *SPEC_FLAGS)
    given = {key: value for key, value in vars(args).items() if key in names}
    if given.get("batch") == AUTO:
        given["batch"] = 1
    return RunSpec(
        workload=entry.name,
        config=config,
        size=size,
        device=device,
        source=entry.source,
        overrides=entry.overrides(size, config),
        **{**given, **changes},
    )


def step_grid(args: argparse.Namespace, device: str) -> tuple[list[RunSpec], dict[str, str]]:
    """Return one spec for every combination of the flags' values, and why some cannot be.

    The reasons are by the fingerprints of their specs; where every cell has one, the first is
    raised. Sizes come outermost, so that one worker serves all cells of a size.
    """
    axes: dict[str, Sequence[Any]] = {
        "size": args.size or [""],
        **{key: values for key, values in vars(args).items() if key.startswith("config_")},
        **{key: getattr(args, key) for key in ("recipe", "ranks", "mode", "batch", "warmup")},
    }
    specs: list[RunSpec] = []
    refused: dict[str, UserError] = {}
    for values in itertools.product(*axes.values()):
        cell = argparse.Namespace(**{**vars(args), **dict(zip(axes, values, strict=True))})
        try:
            specs.append(step_spec(cell, device))
        except UserError as error:
            specs.append(_refused_spec(cell, device))
            refused[fingerprint(specs[-1])] = error
    if len(refused) == len(specs):
        raise next(iter(refused.values()))
    return specs, {cell: str(error) for cell, error in refused.items()}


def _refused_spec(args: argparse.Namespace, device: str) -> RunSpec:
    """Return the spec of a cell whose settings contradict each other, for its row in the table."""
    entry = asked_workload(args)
    size = args.size or entry.default_size(device)
    config = entry.unchecked(size, given_fields(args))
    return _spec(args, entry, size, config, device, {})


def assumed_device(asked: str) -> str:
    """Return the device for which flags are checked before a worker, which takes 2 s, is asked."""
    return "cpu" if asked == AUTO else asked


def check_gpus(spec: RunSpec, environment: Environment) -> None:
    """Refuse ranks that are to talk by nccl without a GPU each."""
    on_gpus = spec.device == "cuda"
    by_nccl = spec.backend == "nccl" or (on_gpus and spec.backend == "")
    count = len(environment.accelerators) if on_gpus else 0
    if spec.ranks > 1 and by_nccl and spec.ranks > count:
        found = f"there are {count}" if on_gpus else f"the device is {spec.device}"
        raise UserError(
            f"nccl needs a GPU for each of {spec.ranks} ranks, but {found}.",
            "Start fewer ranks, or use --backend gloo, with which they may share a GPU.",
        )


def _refuse_launcher() -> None:
    """Measurements start their own ranks: started N times, they would all be taken N times."""
    size = launched_size()
    if size > 1:
        raise UserError(
            f"A launcher has started {size} of these, but steplab starts the ranks that it "
            "measures by itself.",
            f"Leave out the launcher and add --ranks {size}.",
        )


def _mode(word: str) -> str:
    if word not in MODES:
        raise UserError(f"There is no mode {word!r}.", f"Known: {', '.join(MODES)}.")
    return word


def _batch_or_auto(word: str) -> int | str:
    if word == AUTO:
        return AUTO
    try:
        return int(word)
    except ValueError:
        raise argparse.ArgumentTypeError(f"a number or auto, not {word!r}") from None
