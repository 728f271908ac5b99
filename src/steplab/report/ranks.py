"""Several ranks on a terminal: one budget, their collectives, and what each rank waits for."""

from __future__ import annotations

from steplab.core import Column, Table, units
from steplab.core.printable import printable
from steplab.report.budget import print_budget
from steplab.report.terminal import console, print_table
from steplab.trace.ranks.analysis import RanksAnalysis

GB = 1e9


def print_ranks(ranks: RanksAnalysis) -> None:
    """Print the budget of all ranks, the tables, and what limits them."""
    print_budget(ranks.budget, split=ranks.split if ranks.tells_waits else None)
    for table in (collectives_table(ranks), ranks_table(ranks)):
        if table.rows:
            print_table(table)
    told = [ranks.missing_sentence, *ranks.notes]
    console().print(printable("\n".join(filter(None, told))), style="dim", markup=False)


def communication_table(ranks: RanksAnalysis) -> Table:
    """Return the parts of the exposed communication in the typical step, where they are known."""
    step = ranks.budget.typical
    parts = ranks.split[step.number] if ranks.tells_waits else {}
    columns = (Column("communication"), Column("time", "ms"), Column("of the step", "%", 3))
    rows = tuple((name, ms, step.share(ms) * 100) for name, ms in parts.items())
    return Table("communication", columns, rows, "mean of the ranks; only what nothing hides")


def collectives_table(ranks: RanksAnalysis) -> Table:
    """Return a row per kind of collective, and size and purpose of group."""
    columns = (
        Column("collective"),
        Column("group"),
        Column("ranks"),
        Column("a step", "", 3),
        Column("message"),
        Column("waiting", "ms"),
        Column(_moving(ranks), "ms"),
        Column("exposed", "%", 3),
        Column("bus", "GB/s", 3),
        Column("of the link", "%", 3),
    )
    peak = ranks.link.gbs * GB if ranks.link else None
    rows = tuple(
        (
            kind.kind,
            kind.group or None,
            kind.size or None,
            kind.count,
            None if kind.bytes is None else units.bytes_(kind.bytes),
            kind.waiting_ms,
            kind.transfer_ms,
            kind.exposed * 100,
            None if kind.bus_bytes_per_s is None else kind.bus_bytes_per_s / GB,
            None if kind.bus_bytes_per_s is None or not peak else 100 * kind.bus_bytes_per_s / peak,
        )
        for kind in ranks.kinds
    )
    has_sizes = any(kind.bytes is not None for kind in ranks.kinds)
    note = ["per step and rank, hidden or not" + ("; message: the median" if has_sizes else "")]
    if ranks.tells_waits:
        note += ["waiting: before the last rank has come"]
    if any(kind.bus_bytes_per_s for kind in ranks.kinds):
        note += ["bus: what the link of a rank carries while it transfers, as NCCL's tests count"]
        if ranks.link:
            note += [f"link: {ranks.link.name}, {ranks.link.gbs:g} GB/s ({ranks.link.source})"]
    return Table("collectives", columns, rows, "\n".join(note)).without_unknown_columns()


def ranks_table(ranks: RanksAnalysis) -> Table:
    """Return a row per rank."""
    columns = (
        Column("rank"),
        Column("machine"),
        Column("step", "ms"),
        Column(ranks.budget.term_name("kernels"), "ms"),
        Column(_moving(ranks), "ms"),
        Column("waiting", "ms"),
        Column("waited for", "ms"),
        Column("hidden", "%", 3),
        Column("clock ahead", "us", dispensable=1),
    )
    moved = any(row.clock_ahead_us for row in ranks.rows)
    several = len({row.host for row in ranks.rows}) > 1
    rows = tuple(
        (
            row.rank,
            row.host if several else None,
            row.step_ms,
            row.computing_ms,
            row.transfer_ms,
            row.waiting_ms,
            row.waited_for_ms,
            None if row.overlap is None else row.overlap * 100,
            row.clock_ahead_us if moved else None,
        )
        for row in ranks.rows
    )
    note = [
        "medians of the steps that all ranks have; transfer and waiting: what nothing hides",
        "hidden: share of all communication behind which something computes",
    ]
    if ranks.tells_waits:
        note += ["waited for: by the others, each of those that waited"]
    return Table("ranks", columns, rows, "\n".join(note)).without_unknown_columns()


def _moving(ranks: RanksAnalysis) -> str:
    return "transfer" if ranks.tells_waits else "transfer or waiting"
