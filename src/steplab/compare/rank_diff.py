"""What takes more or less time between the ranks of B than between those of A."""

from __future__ import annotations

from steplab.core import Cell, Column, Table
from steplab.trace.ranks.analysis import RanksAnalysis


def waits_diff(a: RanksAnalysis, b: RanksAnalysis) -> Table:
    """Return the parts of the exposed communication: transfer, and the wait for every rank."""
    note = "mean of the steps and ranks; only what nothing hides"
    return _table("communication that changed", "part", _parts(a), _parts(b), note)


def collectives_diff(a: RanksAnalysis, b: RanksAnalysis) -> Table:
    """Return waiting and transfer of every kind of collective, hidden or not."""
    note = "per step and rank, hidden or not"
    return _table("collectives that changed", "collective", _kinds(a), _kinds(b), note)


def _parts(ranks: RanksAnalysis) -> dict[str, float]:
    """Return the mean ms of every part over all steps."""
    sums: dict[str, float] = {}
    for parts in ranks.split.values():
        for name, ms in parts.items():
            sums[name] = sums.get(name, 0.0) + ms / len(ranks.split)
    return sums if ranks.tells_waits else {"transfer or waiting": sum(sums.values())}


def _kinds(ranks: RanksAnalysis) -> dict[str, float]:
    """Return ms by kind and group, of any size: B may have more ranks."""
    sums: dict[str, float] = {}
    for kind in ranks.kinds:
        name = f"{kind.kind} of {kind.group}" if kind.group else kind.kind
        for part, ms in (("waiting", kind.waiting_ms), ("transfer", kind.transfer_ms)):
            sums[f"{name}, {part}"] = sums.get(f"{name}, {part}", 0.0) + (ms or 0.0)
    return sums


def _table(title: str, what: str, a: dict[str, float], b: dict[str, float], note: str) -> Table:
    """Return a row for every name of A or B, the largest difference first."""
    names = dict.fromkeys([*a, *b])
    differences = {name: b.get(name, 0.0) - a.get(name, 0.0) for name in names}
    rows: list[tuple[Cell, ...]] = [
        (name, a.get(name, 0.0), b.get(name, 0.0), differences[name])
        for name in sorted(names, key=lambda name: -abs(differences[name]))
    ]
    columns = (Column(what), Column("A", "ms"), Column("B", "ms"), Column("difference", "ms"))
    return Table(title, columns, tuple(rows), note)
