"""Command: what a file in `cli/` defines to become one; groups of them; their parser."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from steplab.core import registry, units
from steplab.core.errors import UserError, did_you_mean


@dataclass(frozen=True)
class Command:
    """A command: `flags(parser, words)` declares its flags, `run(args)` does it.

    `words` are the words after the command's name, so that flags may depend on the workload
    among them. `run` returns the exit code. The first line of the module's docstring is what
    `--help` says about it.
    """

    flags: Callable[[Parser, Sequence[str]], None]
    run: Callable[[argparse.Namespace], int]


@dataclass(frozen=True)
class Group:
    """Commands that share their first word, as in `steplab bench step`: the files of a package."""

    package: str

    def names(self) -> list[str]:
        """Return the commands of the group, sorted."""
        return registry.names(self.package, "COMMAND")

    def summary(self, name: str) -> str:
        """Return one line about a command, without importing it."""
        return registry.summary(self.package, name)

    def load(self, name: str) -> Command | Group:
        """Import a command."""
        command: Command | Group = registry.load(self.package, name, "COMMAND")
        return command


class Parser(argparse.ArgumentParser):
    """argparse that raises UserError with a suggestion instead of exiting."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(
            prog=prog,
            description=description,
            allow_abbrev=False,
            formatter_class=HelpFormatter,
        )
        self.takes_rest = False  # whether words after -- are somebody else's: `args.rest`
        self.rest_of = ""  # the script that they are for, where it is named

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse all of `words`; an unknown flag is an error that names the nearest one."""
        words, rest = split_rest(words) if self.takes_rest else (list(words), [])
        args, unknown = self.parse_known_args(words)
        args.rest = rest
        if unknown:
            word = unknown[0].split("=")[0]
            if word.startswith("-"):
                known = [o for action in self._actions for o in action.option_strings]
                hint = did_you_mean(word, known)
                if self.rest_of and not rest and hint.startswith("Known"):
                    hint = f"Words for {self.rest_of} come after two dashes: -- {word} ..."
                raise UserError(f"{self.prog} has no flag {word}.", hint)
            raise UserError(f"{self.prog} does not expect {word!r}.", f"See: {self.prog} --help")
        return args

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage."""
        raise UserError(f"{self.prog}: {message}.", f"See: {self.prog} --help")


def split_rest(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words before the first `--` and those after it."""
    end = list(words).index("--") if "--" in words else len(words)
    return list(words[:end]), list(words[end + 1 :])


def add_memory_flag(parser: argparse.ArgumentParser) -> None:
    """Add `--max-memory`, which every command has: each of them opens files of somebody's."""
    parser.add_argument(
        "--max-memory",
        type=_bytes,
        default=None,
        metavar="SIZE",
        help="most memory that reading one file may take, as in 16GiB "
        "(default: a quarter of this machine's)",
    )


def _bytes(word: str) -> int:
    try:
        return units.read_bytes_count(word)
    except ValueError as error:
        raise UserError(f"--max-memory: {error}.", "Write 16GiB, for example.") from None


class HelpFormatter(argparse.HelpFormatter):
    """Appends the default, where there is one to show: not None, "", [] or False."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default = action.default
        if action.help is None or default == argparse.SUPPRESS or default in (None, "", [], False):
            return action.help
        shown = " ".join(map(str, default)) if isinstance(default, list) else str(default)
        return f"{action.help} (default: {shown.replace('%', '%%')})"
