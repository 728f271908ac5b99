"""summary.csv of the playbook: the usual columns, then ours; lines are only added. No torch."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path

from steplab.errors import UserError
from steplab.store.atomic import disk_errors

SUMMARY = "summary.csv"
USUAL = ("dtype", "bf16_reduction", "seq_len", "batch_size", "ms_per_step", "peak_mem_gb")
OURS = (
    *("median_ms", "forward_ms", "backward_ms", "optimizer_ms", "tokens_per_s", "ema", "use_cache"),
    *("mode", "preset", "parameters", "device", "torch", "date", "status"),
)
COLUMNS = USUAL + OURS


def check_summary(folder: Path) -> None:
    """Refuse, before anything is measured, a summary.csv that has other columns."""
    path = folder / SUMMARY
    with disk_errors(folder, "--out"):
        if not path.exists():
            return
        with path.open(encoding="utf-8", errors="replace", newline="") as file:
            first = next(csv.reader(file), [])
    if tuple(first) != COLUMNS:
        raise UserError(f"{path} has other columns.", "Move it away, or give another --out.")


def append_line(folder: Path, values: Mapping[str, object]) -> Path:
    """Add one line; a column without a value stays empty."""
    path = folder / SUMMARY
    with disk_errors(folder, "--out"):
        folder.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        with path.open("a", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, restval="", lineterminator="\n")
            if is_new:
                writer.writeheader()
            writer.writerow(values)
    return path
