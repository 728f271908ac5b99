"""Flags made from a config dataclass, never listed twice."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from steplab.core import Environment
from steplab.core.codec import read_word, type_hints
from steplab.core.errors import Unsupported, UserError, no_gpu
from steplab.workloads.workload import WorkloadEntry, find_workload


def add_workload_argument(
    parser: argparse.ArgumentParser, words: Sequence[str], default: str
) -> WorkloadEntry:
    """Add the workload as the first word and return it: the flags that follow depend on it."""
    name = words[0] if words and not words[0].startswith("-") else default
    about = "a built-in workload or path/to/file.py:factory; stands before all flags"
    parser.add_argument("workload", nargs="?", default=default, help=about)
    parser.set_defaults(flags_of=name)
    return find_workload(name)


def workload_name(args: argparse.Namespace) -> str:
    """Return the workload's name; one that came after flags was not asked for its own flags."""
    if args.workload != args.flags_of:
        raise UserError(
            f"The workload {args.workload!r} comes after flags.", "Name it right after the command."
        )
    return str(args.workload)


def add_config_flags(
    parser: argparse.ArgumentParser, config: Any, many: bool, prefix: str = "config"
) -> None:
    """Add `--field-name` for every field of the dataclass type `config`.

    With `many`, a flag takes one or more values, which span a sweep; without, a bool becomes
    `--flag` and `--no-flag`, and of a repeated flag the last one wins. A flag that is not given
    leaves no trace in the namespace, so that a preset is changed only where it was asked for.
    """
    group = parser.add_argument_group(f"{config.__name__}")
    hints = type_hints(config)
    for field in dataclasses.fields(config):
        kind = hints[field.name]
        options: dict[str, Any] = {
            "dest": f"{prefix}_{field.name}",
            "default": argparse.SUPPRESS,
            "help": f"{field.metadata.get('help', field.name)} [{field.default}]",
        }
        if kind is bool and not many:
            options |= {"action": argparse.BooleanOptionalAction}
        else:
            reader = _reader(kind, field.name)
            options |= {"type": reader, "nargs": "+" if many else None, "metavar": _metavar(kind)}
        group.add_argument(f"--{field.name.replace('_', '-')}", **options)


def given_fields(args: argparse.Namespace, prefix: str = "config") -> dict[str, Any]:
    """Return the fields that were given on the command line, of the config with that prefix."""
    start = f"{prefix}_"
    return {
        key.removeprefix(start): value for key, value in vars(args).items() if key.startswith(start)
    }


def _reader(kind: Any, name: str) -> Callable[[str], Any]:
    return lambda word: read_word(kind, word, f"--{name.replace('_', '-')}")


def _metavar(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "|".join(map(str, get_args(kind)))
    if get_origin(kind) in (Union, types.UnionType):
        kind = next(arg for arg in get_args(kind) if arg is not type(None))
    return {int: "N", float: "X", bool: "true|false"}.get(kind, "TEXT")


def check_device(asked: str) -> None:
    """Refuse what `--device` does not know, before anything is started."""
    if asked not in ("auto", "cpu", "cuda"):
        raise UserError(f"There is no device {asked!r}.", "Use cpu, cuda or auto.")


def resolve_device(asked: str, environment: Environment) -> str:
    """Return "cpu" or "cuda" for what `--device` asked for; `auto`: a GPU where there is one."""
    check_device(asked)
    if asked == "cuda" and not environment.accelerators:
        raise no_gpu()
    if asked == "auto":
        return "cuda" if environment.accelerators else "cpu"
    return asked


def exit_without_gpu(script: str) -> None:
    """End a script that measures GPUs only where there is none: one sentence, exit code 3."""
    import torch

    if not torch.cuda.is_available():
        error = Unsupported(
            "There is nothing to measure: torch sees no GPU.",
            "Install a CUDA build of torch and check the driver.",
        )
        print(f"{Path(script).name}: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
