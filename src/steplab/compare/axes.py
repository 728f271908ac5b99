"""What tells several Runs apart."""

from __future__ import annotations

from collections.abc import Sequence

from steplab.record import Run
from steplab.record.table import Cell

LENGTHS = ("context", "seq_max_len")  # the length of a sequence is shown even where it is constant


def varying_axes(runs: Sequence[Run]) -> list[str]:
    """Return what tells the Runs apart; size, batch, mode and recipe are always shown."""
    config = dict.fromkeys(key for run in runs for key in run.spec.config)
    shown = [key for key in config if key in LENGTHS or _distinct(runs, key) > 1]
    # A size sets many fields at once; only those that vary within a size say something new.
    sizes = {run.spec.size for run in runs}
    own = [
        key
        for key in shown
        if key in LENGTHS
        or any(_distinct([r for r in runs if r.spec.size == size], key) > 1 for size in sizes)
    ]
    axes = ["size"] if any(sizes) else []
    axes += [*own, "batch", "mode", "recipe"]
    for extra in ("accumulate", "warmup"):
        if len({getattr(run.spec, extra) for run in runs}) > 1:
            axes.append(extra)
    return axes


def axis_value(run: Run, axis: str) -> Cell:
    """Return a Run's value on an axis of `varying_axes`."""
    if axis == "recipe":
        return run.spec.recipe.label
    if axis in ("size", "batch", "mode", "accumulate", "warmup"):
        value: Cell = getattr(run.spec, axis)
        return value
    found: Cell = run.spec.config.get(axis)
    return found


def numeric_axes(runs: Sequence[Run]) -> list[str]:
    """Return the axes along which scaling can be told."""
    return [
        axis
        for axis in varying_axes(runs)
        if axis not in ("warmup", "size", "mode", "recipe")
        and len({axis_value(run, axis) for run in runs}) > 1
        and all(isinstance(axis_value(run, axis), (int, float)) for run in runs)
    ]


def _distinct(runs: Sequence[Run], key: str) -> int:
    return len({str(run.spec.config.get(key)) for run in runs})
