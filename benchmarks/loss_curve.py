"""Does the fast step learn what the plain one learns? Loss curves over the same data.

    PYTHONPATH=src python benchmarks/loss_curve.py [--steps N] [--twins N] [--out FILE ...]

The reference is the definition of every op under bf16 autocast: experts one by one, unfused
attention, torch's optimizer. Its twins start from weights moved by half a rounding of bf16, which
is what any other order of summation does to them at every step. The fast recipe starts from the
unmoved weights. Its curve is right when it lies among the twins' as a twin lies among the others:
counted are the steps at which a loss, averaged over a window of 10, is within the range of the
others, widened by that range on both sides.
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from steplab.cli.command import Parser
from steplab.core import Cell, Column, RunSpec, Table
from steplab.core.errors import SteplabError, UserError
from steplab.probes.environment import capture_environment
from steplab.report.export import check_suffixes, write_table
from steplab.report.terminal import print_table
from steplab.step.assemble import assemble, micro_batches
from steplab.techniques.recipes import parse_recipe
from steplab.workloads.workload import find_workload

REFERENCE = "precision=bf16,impl.experts=loop,impl.attention=math"
WINDOW = 10
HALF_ROUNDING = 2.0**-9  # of bf16, relative
SIZE = "flagship-reduced"  # so that the reference's 200 steps take seconds
Curve = NDArray[np.float64]


def main() -> int:
    """Train all, print the table, write it where asked; return the exit code."""
    parser = Parser("loss_curve.py", "Loss curves of the fast recipe among the reference's twins.")
    add = parser.add_argument
    add("--recipe", default="flagship", help="the recipe to judge")
    add("--steps", type=int, default=200, help="training steps of each run")
    add("--twins", type=int, default=6, help="perturbed runs of the reference")
    add("--context", type=int, default=1024, help="points per window")
    add("--batch", type=int, default=4, help="windows per step")
    add("--device", default="cuda", help="cpu or cuda")
    add("--out", type=Path, nargs="*", default=[], help="write the table")
    try:
        args = parser.parse(sys.argv[1:])
        check_suffixes(args.out)
        if args.steps < 2 * WINDOW or args.twins < 3:
            raise UserError(f"--steps must be at least {2 * WINDOW} and --twins at least 3.")
        table = judged(args)
        print_table(table)
        for path in args.out:
            write_table(table, path)
    except SteplabError as error:
        print(f"loss_curve.py: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def judged(args: argparse.Namespace) -> Table:
    """Return the curves at a few steps, and the verdict as the note."""
    entry = find_workload("tsmoe")
    config = entry.resolve(SIZE, {"seq_max_len": args.context})
    spec = RunSpec(
        "tsmoe", config, SIZE, batch=args.batch, device=args.device,
        recipe=parse_recipe(REFERENCE), steps=args.steps,
    )  # fmt: skip
    fast = replace(spec, recipe=parse_recipe(args.recipe))
    *twins, fast_S = curves([*((spec, n) for n in range(args.twins)), (fast, 0)])
    twins_NS = np.stack(twins)
    low_S, high_S = twins_NS.min(0), twins_NS.max(0)
    inside_S = within(fast_S, twins_NS)
    alone = [
        100 * within(twin_S, np.delete(twins_NS, n, 0)).mean() for n, twin_S in enumerate(twins_NS)
    ]
    shown = np.unique(np.linspace(0, len(fast_S) - 1, 9).astype(int))
    rows: list[tuple[Cell, ...]] = [
        (int(s) + WINDOW, *(float(c[s]) for c in (low_S, high_S, fast_S)), bool(inside_S[s]))
        for s in shown
    ]
    note = (
        f"{inside_S.sum()} of {len(inside_S)} steps within the widened range of {args.twins} runs "
        f"({100 * inside_S.mean():.1f} %); of a twin among the others {min(alone):.1f} to "
        f"{max(alone):.1f} %; means of {WINDOW} steps. tsmoe {SIZE}, batch {args.batch} x "
        f"{args.context}.\n{capture_environment().conditions_on(args.device)}"
    )
    names = ("step", "twins, lowest", "twins, highest", "fast", "within")
    return Table("Loss of the fast recipe among the reference's twins",
                 tuple(Column(name) for name in names), tuple(rows), note)  # fmt: skip


def within(curve_S: Curve, others_NS: Curve) -> NDArray[np.bool_]:
    """Tell for every step whether the curve lies in the widened range of the others."""
    low_S, high_S = others_NS.min(0), others_NS.max(0)
    room_S = high_S - low_S
    inside_S: NDArray[np.bool_] = (curve_S >= low_S - room_S) & (curve_S <= high_S + room_S)
    return inside_S


def curves(jobs: list[tuple[RunSpec, int]]) -> list[Curve]:
    """Return the smoothed losses of all jobs; on a GPU at once, as no time is measured."""
    at_once = len(jobs) if jobs[0][0].device == "cuda" else 1
    with ProcessPoolExecutor(at_once, get_context("spawn")) as pool:
        return [smooth(losses) for losses in pool.map(curve, *zip(*jobs, strict=True))]


def curve(spec: RunSpec, twin: int) -> Curve:
    """Train from the seed's weights, moved at random for every twin but 0; return its losses."""
    step = assemble(spec)
    if twin:
        generator = torch.Generator(device=step.parts.device).manual_seed(twin)
        with torch.no_grad():
            for weight in step.model.parameters():
                noise = torch.empty_like(weight).uniform_(-1, 1, generator=generator)
                weight.mul_(1 + HALF_ROUNDING * noise)
    feed = micro_batches(step, spec)
    losses = [step(next(feed)).loss for _ in range(spec.steps)]
    print(f"{spec.recipe.label}, twin {twin}: {losses[-1]:.4f}", file=sys.stderr, flush=True)
    return torch.stack(losses).double().cpu().numpy()


def smooth(losses: Curve) -> Curve:
    """Return means over WINDOW steps."""
    return np.convolve(losses, np.full(WINDOW, 1 / WINDOW), "valid")


if __name__ == "__main__":
    sys.exit(main())
