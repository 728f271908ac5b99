"""A word of the command line becomes one side of a comparison."""

from __future__ import annotations

from pathlib import Path

from steplab.compare.sides import Side
from steplab.store import Store
from steplab.trace.analyse import analyse
from steplab.trace.load import load_trace, names_trace
from steplab.trace.stored import analyse_cycles


def open_side(word: str, store: Store) -> Side:
    """Return the trace file `word`, or the Run of that id, with its traces where it has them."""
    if names_trace(word):
        return Side(word, cycles=(analyse(load_trace(Path(word))),))
    run = store.load(word)
    return Side(run.id, run, tuple(analyse_cycles(run, store.runs / run.id)))
