"""The large mixture's step beside its peers, on one GPU, in one process, one after another.

    PYTHONPATH=src python benchmarks/flagship.py [CELL ...] [--steps N] [--out FILE ...]

Every cell is the same work: 538 million parameters of which 198 million are active, 16 x 4096
tokens, forward, backward, clip at 1.0, AdamW. MFU is model FLOPs (6 per active matrix parameter and
token, plus the visible pairs of attention) over the dense bf16 peak; the FLOPs of our model are
taken for all. A cell that fails is a row with its reason.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from steplab.cli.command import Parser
from steplab.cli.flags import exit_without_gpu
from steplab.core import Cell, Column, Counters, Run, RunSpec, Table
from steplab.core.errors import SteplabError, UserError, did_you_mean
from steplab.hardware.catalog import find_card
from steplab.report.export import check_suffixes, write_table
from steplab.report.terminal import print_table
from steplab.step.trial import trial
from steplab.techniques.recipes import parse_recipe
from steplab.workloads.tsmoe.config import PRESETS
from steplab.workloads.tsmoe.flops import work
from steplab.workloads.workload import requested_workload

HERE = Path(__file__).parent
AUTOCAST = "precision=bf16,optimizer=fused"
OURS = "flagship"
OURS_FP8 = f"{OURS},precision=fp8-bf16-weights"
# torch's own kernels around the experts and the attention that a cell names.
TORCH = f"{AUTOCAST},impl.router=reference,impl.feed_forward=reference,impl.rms_norm=aten"
TORCH += ",impl.rotary=reference"
LOOP = f"{TORCH},impl.experts=loop"
# name: workload, its settings, recipe
CELLS: dict[str, tuple[str, dict[str, str], str]] = {
    "expert by expert, dense mask, eager": ("tsmoe", {}, f"{LOOP},impl.attention=dense_mask"),
    "expert by expert, flash, eager": ("tsmoe", {}, f"{LOOP},impl.attention=flash"),
    "Hugging Face Qwen2-MoE, sdpa, eager": ("qwen2_moe", {}, AUTOCAST),
    "grouped_mm, cuDNN, compiled blocks": (
        "tsmoe", {}, f"{TORCH},compile=blocks,impl.experts=grouped",
    ),
    "ours": ("tsmoe", {}, OURS),
    "ours, fp8": ("tsmoe", {}, OURS_FP8),
    "ours, experts balanced": ("routed", {"routing": "balanced"}, OURS),
    "ours, experts skewed 2:1": ("routed", {"routing": "skewed"}, OURS),
    "ours, two experts take all": ("routed", {"routing": "collapsed"}, OURS),
}  # fmt: skip
PEER = "Hugging Face Qwen2-MoE, sdpa, eager"
COLUMNS = (
    *(Column("cell"), Column("step", "ms"), Column("spread", "%"), Column("tokens/s")),
    *(Column("MFU", "%"), Column("peak", "GiB"), Column("compile", "s"), Column("x the peer")),
    *(Column("power", "W"), Column("SM clock", "MHz"), Column("held back by"), Column("status")),
)


def main() -> int:
    """Measure, print, write; return the exit code."""
    parser = Parser("flagship.py", "The large mixture's step beside its peers.")
    about = "a cell, or all whose names begin so"
    parser.add_argument("only", nargs="*", metavar="CELL", help=about)
    parser.add_argument("--size", default="flagship", help="preset of tsmoe")
    parser.add_argument("--batch", type=int, default=16, help="sequences per step")
    parser.add_argument(
        "--steps", type=int, default=50, help="timed steps of ours; others: a fifth"
    )
    parser.add_argument("--out", type=Path, nargs="*", default=[], help="write the table")
    try:
        args = parser.parse(sys.argv[1:])
        check_suffixes(args.out)
        names = chosen(args.only)
        exit_without_gpu(__file__)
        runs = {}
        for name in names:
            runs[name] = trial(spec_of(name, args.size, args.batch, args.steps))
            took = runs[name].clock
            shown = f"{took.step.median:.1f} ms" if took else runs[name].reason
            print(f"{name}: {shown}", file=sys.stderr, flush=True)
        table = tabulated(runs, args.size, args.batch)
        print_table(table)
        for path in args.out:
            write_table(table, path)
    except SteplabError as error:
        print(f"flagship.py: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def chosen(only: list[str]) -> list[str]:
    """Return the cells to measure: those with these names, or whose names begin so."""
    found: set[str] = set()
    for word in only or [""]:
        named = {word} & CELLS.keys() or {name for name in CELLS if name.startswith(word)}
        if not named:
            raise UserError(f"There is no cell {word!r}.", did_you_mean(word, CELLS))
        found |= named
    return [name for name in CELLS if name in found]


def spec_of(name: str, size: str, batch: int, steps: int) -> RunSpec:
    """Return what one cell measures."""
    short, settings, recipe = CELLS[name]
    overrides: dict[str, Any] = dict(settings)
    own = short == "tsmoe"
    workload = short if own else f"{HERE / 'flagship_peers.py'}:{short}"
    entry = requested_workload(workload)
    if short == "routed":
        overrides = {"size": size, "batch": batch, **overrides}
    steps = steps if recipe.startswith(OURS) and own else max(5, steps // 5)
    return RunSpec(
        workload, entry.resolve(size if own else "", overrides), size if own else "",
        batch=batch, recipe=parse_recipe(recipe), device="cuda", steps=steps, source=entry.source,
    )  # fmt: skip


def tabulated(runs: dict[str, Run], size: str, batch: int) -> Table:
    """Return the table; ratios are of tokens/s to the peer of the same run."""
    flops = work(PRESETS[size], batch, "full", {"attention": "cudnn"}).model
    assert flops is not None
    tokens = batch * PRESETS[size].tokens
    peer = runs.get(PEER)
    base = peer.clock.step.median if peer and peer.clock and peer.status == "ok" else None
    rows: list[tuple[Cell, ...]] = []
    for name, run in runs.items():
        if run.clock is None:
            rows.append((name, *[None] * 10, f"{run.status}: {run.reason}"))
            continue
        ms = run.clock.step.median
        card = find_card(run.environment.device_name)
        peak = card.peak("bf16") if card else None
        mfu = 100 * flops / (ms * 1e-3) / (peak * 1e12) if peak else None
        memory = run.memory.peak / 2**30 if run.memory else None
        compiled = run.compilation.first_seconds if run.compilation else None
        ratio = base / ms if base else None
        spread = 100 * run.clock.step.spread
        counters = run.counters or Counters()
        read = (counters.power_w, counters.sm_clock_mhz)
        card_state = (*(seen.median if seen else None for seen in read), counters.held_by)
        times = (ms, spread, 1e3 * tokens / ms, mfu, memory, compiled, ratio)
        rows.append((name, *times, *card_state, run.status))
    conditions = next(iter(runs.values())).environment.conditions_on("cuda")
    note = (
        f"{size}, batch {batch}, {tokens:,} tokens a step; median of the timed steps, spread of "
        f"their middle half. {flops / tokens / 1e9:.4f} GFLOP per token.\n{conditions}"
    )
    notes = [f"{name}: {text}" for name, run in runs.items() for text in run.notes]
    return Table("The large mixture's step", COLUMNS, tuple(rows), "\n".join([note, *notes]))


if __name__ == "__main__":
    sys.exit(main())
