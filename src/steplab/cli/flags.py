"""Flags made from a config dataclass, never listed twice."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable
from typing import Any, Literal, get_args, get_origin

from steplab.codec import read_word, type_hints


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


def given(args: argparse.Namespace, prefix: str = "config") -> dict[str, Any]:
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
    return {int: "N", float: "X", bool: "true|false"}.get(kind, "TEXT")
