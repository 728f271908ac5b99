"""The playbook of `steplab profile megalodon --seq-lens ...`: its flags and its table.

Any of its flags turns the playbook on; other flags of `profile` are then refused, not ignored.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from steplab.bench.playbook import (
    COLUMNS,
    DEFAULT_PRESET,
    WORKLOAD,
    Playbook,
    playbook_cells,
)
from steplab.cli.flags import given_fields, resolve_device
from steplab.core import PLAIN, Column, Table, units
from steplab.core.errors import Unsupported, UserError
from steplab.profiling.plan import ProfilePlan
from steplab.report.summary_file import SummaryFile
from steplab.report.terminal import print_table

PREFIX = "playbook"  # of its flags in the namespace
DEFAULT_LENGTH = 2048
# Flags of `profile` that the playbook does not use, with their defaults.
UNUSED = {"size": "", "batch": 4, "mode": "full", "recipe": PLAIN, "accumulate": 1}
UNUSED |= {"range": "", "by": []}
SHOWN = {
    "seq_len": Column("length"),
    "bf16_reduction": Column("bf16 reduction"),
    "ema": Column("ema"),
    "ms_per_step": Column("step", "ms"),
    "median_ms": Column("median", "ms"),
    "forward_ms": Column("forward", "ms"),
    "backward_ms": Column("backward", "ms"),
    "optimizer_ms": Column("optimizer", "ms"),
    "tokens_per_s": Column("tokens/s"),
    "peak_mem_gb": Column("peak", "GiB"),
    "status": Column("status"),
}

NOTE = "step and its phases: means of the timed steps; tokens/s: by the median"


def has_playbook(workload: str) -> bool:
    """Whether `profile` has a playbook for this workload."""
    return workload == WORKLOAD


def add_playbook_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags; those that are not given leave no trace in the namespace."""
    group = parser.add_argument_group("playbook: any of these turns it on")

    def add(name: str, about: str, **options: Any) -> None:
        dest = f"{PREFIX}_{name}"
        flag = f"--{name.replace('_', '-')}"
        group.add_argument(flag, dest=dest, default=argparse.SUPPRESS, help=about, **options)

    yes = {"action": "store_true"}
    add("seq_lens", f"lengths [{DEFAULT_LENGTH}]", nargs="+", type=int, metavar="N")
    add("preset", f"size of the model [{DEFAULT_PRESET}]", metavar="SIZE")
    add("batch_size", "sequences per batch [2]", type=int, metavar="N")
    add("dtype", "fp32 or bf16 [fp32]", metavar="DTYPE")
    add("bf16_sweep", "partial sums of bf16 products in bf16: on and off", **yes)
    paths = "fft, scan, sequential (its traces are large) or auto [auto]"
    add("ema", f"path of the moving averages: {paths}", metavar="PATH")
    add("train_use_cache", "compute the states after each sequence too", **yes)
    add("forward_only", "inference instead of training", **yes)


def asks_for_playbook(args: argparse.Namespace) -> bool:
    """Whether any of the playbook's flags was given."""
    return bool(given_fields(args, PREFIX))


def run_playbook(args: argparse.Namespace) -> int:
    """Profile every cell; a failed one is a line with a status, and the exit code says so."""
    for name, default in UNUSED.items():
        if getattr(args, name) != default:
            raise UserError(
                f"The playbook does not take --{name}.",
                "It has --preset, --batch-size, --dtype, --ema and --forward-only.",
            )
    _playbook(args, "cpu")  # reports typos before torch is imported
    # On a CPU the memory profiler warns about every block that is older than itself.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    from steplab.bench.playbook_cell import run_cell
    from steplab.probes.environment import capture_environment

    book = _playbook(args, resolve_device(args.device, capture_environment()))
    if book.bf16_sweep and book.device == "cpu":
        raise Unsupported("--bf16-sweep sets cuBLAS, which a CPU does not use.", "Leave it out.")
    summary = SummaryFile(book.out, COLUMNS)
    summary.check()
    lines: list[dict[str, Any]] = []
    for cell in playbook_cells(book):
        print(f"{cell.folder} ...", flush=True)
        lines.append(run_cell(cell, book))
        summary.append([lines[-1].get(name) for name in COLUMNS])
    print_table(_table(f"megalodon {book.preset}, {book.dtype}", lines))
    print(f"{summary.path}: {units.counted(len(lines), 'line')} more")
    return 0 if all(line["status"] == "ok" for line in lines) else 4


def _table(title: str, lines: list[dict[str, Any]]) -> Table:
    """Leave out what no line has: phases of inference, the peak on a CPU."""
    shown = [name for name in SHOWN if any(line.get(name) is not None for line in lines)]
    rows = tuple(tuple(line.get(name) for name in shown) for line in lines)
    return Table(title, tuple(SHOWN[name] for name in shown), rows, NOTE)


def _playbook(args: argparse.Namespace, device: str) -> Playbook:
    """Return what the flags ask for; making its cells checks the config."""
    asked = {"seq_lens": [DEFAULT_LENGTH], **given_fields(args, PREFIX)}
    renamed = {"batch_size": "batch", "train_use_cache": "use_cache"}
    book = Playbook(
        schedule=ProfilePlan(tuple(args.schedule), detail=False),
        out=args.out or Path("profile"),
        config=given_fields(args),
        device=device,
        seed=args.seed,
        **{renamed.get(name, name): value for name, value in asked.items()},
    )
    playbook_cells(book)
    return book
