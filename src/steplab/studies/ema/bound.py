"""The times beside the least that the memory allows. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from steplab.hardware.catalog import find_card
from steplab.record import Column, Run, Table
from steplab.record.table import Cell
from steplab.studies.ema.plan import OP, bytes_moved
from steplab.studies.ops.op import way_text
from steplab.studies.ops.rows import seen

COLUMNS = (
    *(Column("context"), Column("dtype"), Column("impl")),
    *(Column("forward", "ms"), Column("bound", "ms"), Column("share", "%", 3)),
    *(Column("backward", "ms"), Column("bound", "ms"), Column("share", "%", 3)),
)


def bound_table(runs: Sequence[Run]) -> Table | None:
    """Return the table; None where the memory's bandwidth is not known."""
    card = find_card(runs[0].environment.device_name) if runs[0].spec.device == "cuda" else None
    if card is None:
        return None
    rows: list[tuple[Cell, ...]] = []
    for run in runs:
        if run.status != "ok":
            continue
        config, found = run.spec.config, seen(run)
        row: list[Cell] = [config["context"], config["dtype"], way_text(OP, config)]
        times = (found.forward_ms, found.backward_ms)
        for size, ms in zip(bytes_moved(config), times, strict=True):
            least = size / card.bandwidth_gbs / 1e6
            row += [ms, least, 100 * least / ms if ms else None]
        rows.append(tuple(row))
    told = (
        f"bound: x and y once forward, x, dy and dx once backward, at {card.bandwidth_gbs:,.0f} "
        "GB/s by the datasheet"
    )
    return Table("share of the memory bound", COLUMNS, tuple(rows), told)
