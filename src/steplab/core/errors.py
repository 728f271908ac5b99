"""The three ways steplab fails on purpose. Any other exception that reaches a user is a bug."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

LONGEST_WORD = 100  # letters that are compared; the time grows with their square
ALIKE = 0.65  # of 1, by difflib: "steps" and "store" are 0.6, "gtp" and "gpt" 0.67


class SteplabError(Exception):
    """A failure that is explained in one sentence, with a suggestion where there is one."""

    exit_code = 1

    def __init__(self, message: str, suggestion: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.suggestion = suggestion

    def __str__(self) -> str:
        return f"{self.message} {self.suggestion}".strip()


class UserError(SteplabError):
    """The request is wrong: an unknown flag, a missing file, a device that is not there."""

    exit_code = 2


class Unsupported(SteplabError):
    """The request is sound, but this device, dtype or shape cannot do it. No silent fallback."""

    exit_code = 3


class MeasurementError(SteplabError):
    """Something was measured, but the number would not be true."""

    exit_code = 4


def no_gpu() -> UserError:
    """Return the error for a GPU that was asked for and is not there."""
    return UserError(
        "The device cuda was asked for, but torch sees no GPU.",
        "Use --device cpu, or install a CUDA build of torch and check the driver.",
    )


ERROR_KINDS: dict[str, type[SteplabError]] = {
    kind.__name__: kind for kind in (UserError, Unsupported, MeasurementError)
}


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return a suggestion for a misspelled `word`, or the list of what is known."""
    names = sorted(known)
    word = word[:LONGEST_WORD]
    bare = {name.lstrip("-"): name for name in names}  # leading dashes make all flags look alike
    asked = word.lstrip("-")
    # --steps for --steps-per-epoch; of several that begin so nobody knows which was meant.
    begun = [name for name in bare if len(asked) > 2 and name.startswith(asked)]
    close = begun if len(begun) == 1 else []
    close = close or difflib.get_close_matches(asked, bare, n=1, cutoff=ALIKE)
    if close:
        return f"Did you mean {bare[close[0]]!r}?"
    return f"Known: {', '.join(names)}." if names else "None is known."
