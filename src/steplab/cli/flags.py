"""Flags made from a config dataclass, never listed twice."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any, Literal, get_args, get_origin

from steplab.codec import read_word, type_hints


def add_config_flags(parser: argparse.ArgumentParser, config: Any, many: bool) -> None:
    """Add `--field-name` for every field of the dataclass type `config`.

    With `many`, a flag takes one or more values, which span a sweep. A flag that is not given
    leaves no trace in the namespace, so that a preset is changed only where it was asked for.
    """
    group = parser.add_argument_group(f"{config.__name__}")
    hints = type_hints(config)
    for field in dataclasses.fields(config):
        group.add_argument(
            f"--{field.name.replace('_', '-')}",
            dest=f"config_{field.name}",
            type=_reader(hints[field.name], field.name),
            nargs="+" if many else None,
            default=argparse.SUPPRESS,
            metavar=_metavar(hints[field.name]),
            help=f"{field.metadata.get('help', field.name)} [{field.default}]",
        )


def given(args: argparse.Namespace) -> dict[str, Any]:
    """Return the config fields that were given on the command line."""
    return {
        key.removeprefix("config_"): value
        for key, value in vars(args).items()
        if key.startswith("config_")
    }


def _reader(kind: Any, name: str) -> Callable[[str], Any]:
    return lambda word: read_word(kind, word, f"--{name.replace('_', '-')}")


def _metavar(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "|".join(map(str, get_args(kind)))
    return {int: "N", float: "X", bool: "true|false"}.get(kind, "TEXT")
