"""Functions that the program calls in its tests."""

from collections.abc import Callable
from pathlib import Path

from steplab.core import Samples
from steplab.core.errors import Unsupported


def scaled(samples: Samples, factor: float, progress: Callable[[str], None]) -> Samples:
    progress(f"scaling by {factor:g}")
    return Samples(tuple(value * factor for value in samples.values), samples.unit)


def refuse(reason: str) -> None:
    raise Unsupported(f"{reason}.", "Try something else.")


def fail() -> None:
    raise ZeroDivisionError("nothing left")


class Counter:
    def __init__(self, folder: Path, start: int) -> None:
        self.folder, self.count = folder, start

    def add(self, steps: int) -> int:
        self.count += steps
        return self.count

    def name(self) -> str:
        return self.folder.name
