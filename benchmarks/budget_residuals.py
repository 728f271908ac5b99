"""Does the time budget add up? The residual of every profiled Run in the stores, as a table.

    PYTHONPATH=src python benchmarks/budget_residuals.py STORE [STORE ...] [--out FILE ...]

The residual is the wall time of a step that no term of the budget explains; the worst step counts.
"""

from __future__ import annotations

import sys
from pathlib import Path

from steplab.cli.command import Parser
from steplab.core import Cell, Column, Run, Table
from steplab.core.errors import SteplabError, UserError
from steplab.report.export import check_suffixes, write_table
from steplab.report.terminal import print_table
from steplab.store import Store

RESIDUAL = Column("worst residual", "%")
COLUMNS = (
    *(Column("device"), Column("torch"), Column("workload"), Column("recipe")),
    *(Column("steps"), Column("step", "ms"), Column("kernels", "%"), Column("launch", "%")),
    *(RESIDUAL, Column("profiled / unprofiled")),
)


def main() -> int:
    """Print the table, write it where asked; return the exit code."""
    parser = Parser("budget_residuals.py", "The residual of every profiled Run.")
    parser.add_argument("stores", type=Path, nargs="+", metavar="STORE", help="folders of Runs")
    parser.add_argument("--out", type=Path, nargs="*", default=[], help="write the table")
    try:
        args = parser.parse(sys.argv[1:])
        check_suffixes(args.out)
        rows = sorted((row(run) for path in args.stores for run in profiled(Store(path))), key=str)
        if not rows:
            raise UserError("No profiled Run was found.", "Record one: steplab profile")
        worst = max(float(str(cells[COLUMNS.index(RESIDUAL)])) for cells in rows)
        note = f"{len(rows)} Runs; the worst residual of a step is {worst:.2f} %."
        table = Table("Residual of the time budget", COLUMNS, tuple(rows), note)
        print_table(table)
        for path in args.out:
            write_table(table, path)
    except SteplabError as error:
        print(f"budget_residuals.py: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def profiled(store: Store) -> list[Run]:
    """Return the Runs of a store that have a budget."""
    runs = [run for _, run in store.all() if isinstance(run, Run)]
    return [run for run in runs if run.profile and run.profile.budget]


def row(run: Run) -> tuple[Cell, ...]:
    """Return one line of the table."""
    assert run.profile and run.profile.budget
    budget = run.profile.budget
    typical = budget.typical
    worst = max(abs(step.residual_ms) / step.wall_ms for step in budget.steps)
    shares = [
        100 * typical.terms.get(term, 0.0) / typical.wall_ms for term in ("kernels", "launch")
    ]
    spec = run.spec
    name = f"{Path(spec.workload).name} {spec.size}".strip()
    where = (run.environment.device_name, run.environment.torch)
    return (
        *(*where, name, spec.recipe.label, len(budget.steps), typical.wall_ms, *shares),
        *(round(100 * worst, 4), budget.profiled_ratio),
    )


if __name__ == "__main__":
    sys.exit(main())
