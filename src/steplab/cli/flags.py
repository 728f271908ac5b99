"""Flags that several commands share, and flags made from the fields of a dataclass."""

from __future__ import annotations

import argparse
import dataclasses
import sys
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from steplab.core import Environment
from steplab.core.codec import read_word, type_hints
from steplab.core.errors import Unsupported, UserError, no_gpu
from steplab.core.input_file import shorten
from steplab.core.output_file import output_file, output_folder
from steplab.report.export import WRITERS, check_suffixes
from steplab.store import DEFAULT_ROOT

AUTO = "auto"
DEVICES = (AUTO, "cpu", "cuda")


def add_device_flag(parser: argparse.ArgumentParser, about: str = "where to run") -> None:
    """Add `--device`; `resolve_device` or `local_device` says what `auto` is."""
    metavar = "|".join(DEVICES)
    parser.add_argument("--device", type=_device, default=AUTO, metavar=metavar, help=about)


def file_to_write(flag: str) -> Callable[[str], Path]:
    """Return the type of a flag that names a file to write; what cannot be is refused at once."""

    def read(word: str) -> Path:
        output_file(Path(word), flag)
        return Path(word)

    return read


def page_to_write(flag: str) -> Callable[[str], Path]:
    """Return the type of a flag that names a page to write, likewise."""

    def read(word: str) -> Path:
        if Path(word).suffix != ".html":
            raise UserError(f"{flag} must end in .html, but is {shorten(word)}.")
        return file_to_write(flag)(word)

    return read


def folder_to_write(flag: str) -> Callable[[str], Path]:
    """Return the type of a flag that names a folder to write into, likewise."""
    return lambda word: output_folder(Path(word), flag)


def add_store_flag(parser: argparse.ArgumentParser) -> None:
    """Add `--store`, the folder of the Runs."""
    parser.add_argument(
        "--store", type=Path, default=DEFAULT_ROOT, metavar="DIR", help="folder of the Runs"
    )


def add_view_flag(parser: argparse.ArgumentParser) -> None:
    """Add `--by`: tables of a profiled step's time by where it comes from."""
    from steplab.trace.work_table import View  # with numpy, which other commands start without

    parser.add_argument(
        "--by",
        nargs="+",
        type=partial(read_word, View, where="--by"),
        default=[],
        metavar="VIEW",
        help="tables of the step's time by phase, module, line or op, or of its copies by line",
    )


def add_out_flag(parser: argparse.ArgumentParser) -> None:
    """Add `--out` for tables; a format that is not known is refused before anything is measured."""
    about = f"also write the tables ({' '.join(WRITERS)})"
    parser.add_argument(
        "--out", nargs="+", type=_table_file, default=[], metavar="FILE", help=about
    )


def resolve_device(asked: str, environment: Environment) -> str:
    """Return "cpu" or "cuda" for what `--device` asked for; `auto`: a GPU where there is one."""
    if asked == "cuda" and not environment.accelerators:
        raise no_gpu()
    if asked == AUTO:
        return "cuda" if environment.accelerators else "cpu"
    return asked


def local_device(asked: str) -> str:
    """Return the same for this process. Imports torch (2 s)."""
    import torch

    available = torch.cuda.is_available()
    if asked == "cuda" and not available:
        raise no_gpu()
    if asked == AUTO:
        return "cuda" if available else "cpu"
    return asked


def add_config_flags(
    parser: argparse.ArgumentParser, title: str, config: Any, many: bool, prefix: str = "config"
) -> None:
    """Add `--field-name` for every field of the dataclass type `config`, under `title` in the help.

    With `many`, a flag takes one or more values, which span a sweep; without, a bool becomes
    `--flag` and `--no-flag`, and of a repeated flag the last one wins. A flag that is not given
    leaves no trace in the namespace, so that a preset is changed only where it was asked for.
    """
    group = parser.add_argument_group(title)
    hints = type_hints(config)
    for field in dataclasses.fields(config):
        kind = hints[field.name]
        options: dict[str, Any] = {
            "dest": f"{prefix}_{field.name}",
            "default": argparse.SUPPRESS,
            "help": _config_help(field),
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


def _device(word: str) -> str:
    if word not in DEVICES:
        raise UserError(f"There is no device {word!r}.", "Use --device auto, cpu or cuda.")
    return word


def _table_file(word: str) -> Path:
    check_suffixes([Path(word)])
    return file_to_write("--out")(word)


def _config_help(field: dataclasses.Field[Any]) -> str:
    about = field.metadata.get("help", field.name)
    return about if field.default in (None, "") else f"{about} [{field.default}]"


def _reader(kind: Any, name: str) -> Callable[[str], Any]:
    return lambda word: read_word(kind, word, f"--{name.replace('_', '-')}")


def _metavar(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "|".join(map(str, get_args(kind)))
    if get_origin(kind) in (Union, types.UnionType):
        kind = next(arg for arg in get_args(kind) if arg is not type(None))
    return {int: "N", float: "X", bool: "true|false"}.get(kind, "TEXT")
