"""summary.csv: one line per profile, for those who keep a table of their own. No torch."""

from __future__ import annotations

import csv
import io
import os
import secrets
from pathlib import Path

from steplab.errors import UserError
from steplab.record import Run
from steplab.store.atomic import disk_errors

SUMMARY = "summary.csv"
COLUMNS = (
    "date",
    "run",
    "workload",
    "size",
    "recipe",
    "mode",
    "batch",
    "context",
    "device",
    "step_ms",
    "profiled_ms",
    "peak_gib",
    "kernels_per_step",
    "trace",
)


def check_summary(folder: Path) -> None:
    """Refuse, before anything is measured, a summary.csv that has other columns."""
    path = folder / SUMMARY
    with disk_errors(folder, "--out"):
        if not path.exists():
            return
        with path.open(encoding="utf-8", errors="replace") as file:
            first = file.readline()
    if first != _line(COLUMNS):
        raise UserError(f"{path} has other columns.", "Move it away, or give another --out.")


def append_summary(folder: Path, run: Run, trace: Path) -> Path:
    """Add the Run's line to `folder`/summary.csv, which begins with one header; return the file.

    Several processes may do so at once: whoever comes first links a complete header into place,
    and a line is one write at the end of the file.
    """
    path = folder / SUMMARY
    with disk_errors(folder, "--out"):
        folder.mkdir(parents=True, exist_ok=True)
        _begin(path)
        with path.open("ab", buffering=0) as file:
            file.write(_line(_cells(run, trace)).encode())
    return path


def _begin(path: Path) -> None:
    if path.exists():
        return
    draft = path.with_name(f".{SUMMARY}.{secrets.token_hex(4)}")
    draft.write_text(_line(COLUMNS), encoding="utf-8")
    try:
        os.link(draft, path)
    except FileExistsError:
        pass
    finally:
        draft.unlink()


def _cells(run: Run, trace: Path) -> tuple[object, ...]:
    spec, environment = run.spec, run.environment
    budget = run.profile.budget if run.profile else None
    step = budget.typical if budget else None
    return (
        run.created,
        run.id,
        spec.workload,
        spec.size,
        spec.recipe.label,
        spec.mode,
        spec.batch,
        spec.config.get("context") or spec.config.get("seq_max_len") or "",
        environment.device_name if spec.device == "cuda" else environment.cpu,
        run.clock.step.median if run.clock else "",
        step.wall_ms if step else "",
        run.memory.peak / 2**30 if run.memory else "",
        sum(category.launches for category in step.categories) if step else "",
        trace,
    )


def _line(cells: tuple[object, ...]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerow(cells)
    return out.getvalue()
