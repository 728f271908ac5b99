"""Where the Meter's readings go: a JSONL file, a TensorBoard folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from steplab.core.errors import Unsupported, UserError


class Sink(Protocol):
    """Takes one reading at a time; may raise an OSError while writing."""

    path: Path

    def write(self, step: int, metrics: Mapping[str, float], about: Mapping[str, Any]) -> None:
        """Write the metrics of `step`; `about` says under which conditions they hold."""
        ...


class JsonlSink:
    """One JSON object per reading, appended to the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("a").close()
        except OSError as error:
            raise _not_writable(path, error) from None

    def write(self, step: int, metrics: Mapping[str, float], about: Mapping[str, Any]) -> None:
        """Append one line; the system has it before this returns."""
        line = json.dumps({"step": step, **metrics, **about}, allow_nan=False)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")


class TensorBoardSink:
    """Scalars in an event file of its own; older event files in the folder stay."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise Unsupported(
                "Writing TensorBoard files needs tensorboard, which is not installed.",
                "pip install tensorboard",
            ) from None
        try:
            self._writer = SummaryWriter(str(path))
        except OSError as error:
            raise _not_writable(path, error) from None

    def write(self, step: int, metrics: Mapping[str, float], about: Mapping[str, Any]) -> None:
        """Add one scalar per metric and flush."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()


def open_sinks(jsonl: Path | str | None, tensorboard: Path | str | None) -> list[Sink]:
    """Return the sinks asked for; one that cannot be written fails here, not at step 1000."""
    sinks: list[Sink] = []
    if jsonl is not None:
        sinks.append(JsonlSink(Path(jsonl)))
    if tensorboard is not None:
        sinks.append(TensorBoardSink(Path(tensorboard)))
    return sinks


def write_to_sinks(
    sinks: Sequence[Sink], step: int, metrics: Mapping[str, float], about: Mapping[str, Any]
) -> list[str]:
    """Write to all sinks; return a warning for each that failed.

    A full disk must not end a training run.
    """
    warnings = []
    for sink in sinks:
        try:
            sink.write(step, metrics, about)
        except OSError as error:
            reason = error.strerror or str(error)
            warnings.append(f"warning: {sink.path} was not written: {reason}")
    return warnings


def _not_writable(path: Path, error: OSError) -> UserError:
    reason = error.strerror or str(error)
    return UserError(f"Cannot write {path}: {reason}.", "Choose another path.")
