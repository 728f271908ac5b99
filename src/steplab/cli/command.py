"""Command: what a file in `cli/` defines to become a command, and the parser they share."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from steplab.core.errors import UserError, did_you_mean


@dataclass(frozen=True)
class Command:
    """A command: `flags(parser, words)` declares its flags, `run(args)` does it.

    `words` are the words after the command's name, so that flags may depend on the workload
    among them. `run` returns the exit code.
    """

    summary: str
    flags: Callable[[argparse.ArgumentParser, Sequence[str]], None]
    run: Callable[[argparse.Namespace], int]


@dataclass(frozen=True)
class Group:
    """A command whose first word names a command of another shelf, as in `steplab bench step`."""

    summary: str
    package: str


class Parser(argparse.ArgumentParser):
    """argparse that raises UserError with a suggestion instead of exiting."""

    def __init__(self, prog: str, description: str) -> None:
        super().__init__(
            prog=prog,
            description=description,
            allow_abbrev=False,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse all of `words`; an unknown flag is an error that names the nearest one."""
        args, unknown = self.parse_known_args(list(words))
        if unknown:
            word = unknown[0].split("=")[0]
            if word.startswith("-"):
                known = [o for action in self._actions for o in action.option_strings]
                raise UserError(f"{self.prog} has no flag {word}.", did_you_mean(word, known))
            raise UserError(f"{self.prog} does not expect {word!r}.", f"See: {self.prog} --help")
        return args

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage."""
        raise UserError(f"{self.prog}: {message}.", f"See: {self.prog} --help")
