"""What tells several Runs apart."""

from __future__ import annotations

from collections.abc import Sequence

from steplab.record import Run
from steplab.record.table import Cell

SPEC_AXES = ("size", "batch", "mode", "recipe", "accumulate", "warmup")
LENGTHS = ("context", "seq_max_len")  # a condition of every number, even where it is constant


def varying_axes(runs: Sequence[Run]) -> list[str]:
    """Return what tells the Runs apart; for a single one its mode and recipe.

    A size sets many config fields at once: only those that vary within a size say something new.
    """
    sizes = {run.spec.size for run in runs}
    config = dict.fromkeys(key for run in runs for key in run.spec.config)
    own = [
        key
        for key in config
        if any(_distinct([r for r in runs if r.spec.size == size], key) > 1 for size in sizes)
    ]
    axes = ["size", *own, *SPEC_AXES[1:]]
    found = [axis for axis in axes if _distinct(runs, axis) > 1]
    return found or ["mode", "recipe"]


def constants(runs: Sequence[Run]) -> str:
    """Return the main conditions that all Runs share, for a title: `tiny, context 128, batch 4`."""
    words = []
    lengths = [key for key in LENGTHS if all(key in run.spec.config for run in runs)]
    for axis in ("size", *lengths, "batch", "mode", "recipe"):
        if runs and _distinct(runs, axis) == 1:
            value = axis_value(runs[0], axis)
            name = "" if axis in ("size", "mode", "recipe") else f"{axis} "
            words += [f"{name}{value}"] if value not in ("", "plain") else []
    return ", ".join(words)


def axis_value(run: Run, axis: str) -> Cell:
    """Return a Run's value on an axis."""
    if axis == "recipe":
        return run.spec.recipe.label
    if axis in SPEC_AXES:
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
        and all(isinstance(axis_value(run, axis), (int, float)) for run in runs)
    ]


def _distinct(runs: Sequence[Run], axis: str) -> int:
    return len({str(axis_value(run, axis)) for run in runs})
