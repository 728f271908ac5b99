"""An evaluation as two tables: the metrics of both forecasts, and their ratios."""

from __future__ import annotations

import math

from steplab.core import Cell, Column, Table
from steplab.forecasting.evaluation.evaluate import Evaluation, SeriesGroup, Summary
from steplab.forecasting.evaluation.metrics import NAMES, Metrics

UNSEEN = " *"
POINT_MODEL = "WQL takes the point forecast for every level, which is ND = sum |error| / sum |y|"


def metrics_table(found: Evaluation) -> Table:
    """One row per group and per summary; each metric beside that of seasonal naive."""
    columns = [Column("series of"), Column("windows")]
    for name in NAMES:
        columns += [Column(name), Column("naive")]
    rows = [(label(group), group.windows, *_pairs(group)) for group in found.groups]
    rows += [(one.name, one.windows, *_pairs(one)) for one in found.summaries]
    return Table(_title(found), tuple(columns), tuple(rows), _note(found))


def ratios_table(found: Evaluation) -> Table:
    """One row per group; per summary one of plain and one of geometric means."""
    columns = (Column("series of"), *(Column(name) for name in NAMES))
    rows: list[tuple[Cell, ...]] = []
    for group in found.groups:
        rows.append((label(group), *(_known(group.ratio(name)) for name in NAMES)))
    for one in found.summaries:
        plain = (_known(one.ratio(name)) for name in NAMES)
        rows.append((f"{one.name}: plain mean", *plain))
        geometric = (_known(one.geometric[name]) for name in NAMES)
        rows.append((f"{one.name}: geometric mean", *geometric))
    return Table("ratio to seasonal naive; below 1 the model is better", columns, tuple(rows))


def verdict(found: Evaluation) -> str:
    """Return a sentence per summary: whether the model beats seasonal naive in MASE."""
    return "\n".join(_sentence(one) for one in found.summaries)


def _sentence(one: Summary) -> str:
    plain, geometric = one.ratio("MASE"), one.geometric["MASE"]
    if math.isnan(plain):
        return f"{one.name}: MASE is undefined, because seasonal naive makes no error."
    if max(plain, geometric) < 1:
        judged = "the model beats seasonal naive"
    elif min(plain, geometric) >= 1:
        judged = "the model does not beat seasonal naive"
    else:
        judged = "whether the model beats seasonal naive depends on how groups are weighted"
    return (
        f"{one.name}: {judged}: MASE {one.model.mase:.3f} against {one.naive.mase:.3f} over all "
        f"windows (ratio {plain:.3f}), geometric mean of the groups' ratios {geometric:.3f}, "
        f"better in {one.won['MASE']} of {one.groups} groups."
    )


def _pairs(one: SeriesGroup | Summary) -> list[Cell]:
    return [_known(x) for pair in _each(one.model, one.naive) for x in pair]


def _each(model: Metrics, naive: Metrics) -> list[tuple[float, float]]:
    return list(zip(model.by_name().values(), naive.by_name().values(), strict=True))


def label(group: SeriesGroup) -> str:
    """Return the name of a group, marked if its kind is never trained on."""
    return f"{group.name}{UNSEEN if group.unseen else ''}"


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value


def _title(found: Evaluation) -> str:
    return (
        f"{found.model} on {found.data}: {found.horizon} points ahead, up to {found.windows} "
        f"windows per series, context {found.context}"
    )


def _note(found: Evaluation) -> str:
    levels = ", ".join(f"{level:g}" for level in found.levels)
    lines = [
        f"Seasonal naive used {found.period}. MAE and MSE are in the units of the series.",
        f"WQL is the mean over the levels {levels}." if levels else f"{POINT_MODEL}.",
    ]
    if any(group.unseen for group in found.groups):
        lines.append("* a family that is never trained on")
    bare = sum(group.without_scale for group in found.groups)
    if bare:
        lines.append(f"{bare:,} windows have no MASE: seasonal naive makes no error before them.")
    if found.left_out:
        lines.append(
            f"{found.left_out:,} series were left out: too short, or without known points."
        )
    return "\n".join(lines)
