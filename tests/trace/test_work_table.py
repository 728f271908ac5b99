"""Time by module, line and operator, of steps whose kernels are known."""

import pytest

from steplab.trace.kernel_table import kernel_table
from steplab.trace.work_table import MAX_ROWS, work_table
from tests.report.analyses import Kernel, analysis_of


def cells(table):
    return [dict(zip([c.title for c in table.columns], row, strict=True)) for row in table.rows]


def test_modules_are_summed_over_layers_and_the_rows_add_up():
    rows = cells(work_table(analysis_of(), "module"))
    assert [row["module"] for row in rows] == [
        "blocks.*.attention", "unattributed", "blocks.*.norm", "all",
    ]  # fmt: skip
    first, last = rows[0], rows[-1]
    assert first["time [ms]"] == first["forward [ms]"] == pytest.approx(3)
    assert rows[2]["backward [ms]"] == pytest.approx(0.5) and first["launches"] == 2
    assert last["time [ms]"] == pytest.approx(sum(row["time [ms]"] for row in rows[:-1]))


def test_phases_add_up_to_all_kernels():
    rows = cells(work_table(analysis_of(), "phase"))
    times = {row["phase"]: row["time [ms]"] for row in rows}
    assert times == pytest.approx({"forward": 3, "optimizer": 1.5, "backward": 0.5, "all": 5})


def test_copies_only_and_the_rest_in_one_row():
    kernels = [Kernel(f"copy{n}", 1000 * n, 900, "copy", module=f"m{n}x") for n in range(30)]
    kernels.append(Kernel("gemm", 90_000, 900))
    analysis = analysis_of(kernels, steps=1)
    (line, whole) = cells(work_table(analysis, "copies"))
    assert line["launches"] == whole["launches"] == 30
    modules = cells(work_table(analysis, "module"))
    assert modules[-2]["module"] == "(11 others)" and len(modules) == MAX_ROWS + 2


def test_a_star_stands_for_any_layer():
    """`profile --range 'blocks.*.attention'` ran to its end and then knew no such module."""
    table = kernel_table(analysis_of(), module="blocks.*.attention")
    assert len(table.rows) == 2 and "blocks.*.attention" in table.title
    assert len(kernel_table(analysis_of(), module="blocks.*").rows) == 3
