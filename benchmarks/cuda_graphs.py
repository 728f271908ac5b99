"""What a CUDA graph gives: PYTHONPATH=src python benchmarks/cuda_graphs.py [PART ...] [--out FILE]

Every row is a Run of its own; one that fails is a row that says why, and FILE is written anew after
each. Parts, about half a minute each on an H200:

infer      the small tsmoe at batch 1, by recipe and by `steplab.graph` of its module
experts32  a mixture of 32 experts at the guide's shape: 32 sequences of 128 points, width 512
train      the small tsmoe at batch 4 (launch-bound), plain and compiled, with and without the graph
           of the whole step, beside Inductor's own graphs; and recomputation
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

import steplab
from steplab.cli.command import Parser
from steplab.cli.flags import exit_without_gpu
from steplab.core import Column, Run, RunSpec, Table
from steplab.core.errors import SteplabError, UserError, did_you_mean
from steplab.report.export import check_suffixes, write_table
from steplab.report.terminal import print_table
from steplab.step.trial import trial
from steplab.techniques.recipes import parse_recipe
from steplab.workloads.workload import find_workload

BASE = "precision=bf16,optimizer=fused"
TRAINING = (
    BASE,
    f"{BASE},cuda_graph=step",
    f"{BASE},compile=blocks",
    f"{BASE},compile=blocks,compile.mode=reduce-overhead",
    f"{BASE},compile=blocks,cuda_graph=step",
    f"{BASE},checkpointing=blocks",
    f"{BASE},checkpointing=blocks,checkpointing.rng=false,cuda_graph=step",
)
INFERENCE = ("precision=bf16", "precision=bf16,cuda_graph=step", "production-inference")
THIRTY_TWO = {"num_experts": 32, "hidden_size": 512, "n_head": 8, "seq_max_len": 128}
COLUMNS = (
    Column("part"),
    Column("recipe"),
    Column("step", "ms"),
    Column("speed-up"),
    Column("peak", "GiB"),
    Column("launches"),
    Column("graphs"),
    Column("loss"),
    Column("seconds"),
    Column("status"),
)
DIRECT_CALLS = 200


Row = tuple[Any, ...]


def spec(recipe: str, mode: str, batch: int, changes: Mapping[str, Any]) -> RunSpec:
    """Return the spec of one row."""
    config = find_workload("tsmoe").resolve("small", dict(changes))
    fields: dict[str, Any] = {"batch": batch, "mode": mode, "device": "cuda"}
    chosen = parse_recipe(recipe)
    return RunSpec("tsmoe", config, "small", recipe=chosen, warmup=3, steps=20, **fields)


def rows(
    part: str, recipes: tuple[str, ...], mode: str, batch: int, changes: Mapping[str, Any]
) -> Iterator[Row]:
    """Measure the recipes of one part; speed-ups are over the first."""
    baseline = None
    for recipe in recipes:
        start = perf_counter()
        try:
            run = trial(spec(recipe, mode, batch, changes))
        except SteplabError as error:
            yield (part, recipe, *[None] * 6, perf_counter() - start, str(error))
            continue
        ms = run.clock.step.median if run.status == "ok" and run.clock else None
        baseline = baseline or ms
        status = run.status if run.status == "ok" else f"{run.status}: {run.reason}"
        yield (part, recipe, *_figures(run, ms, baseline), perf_counter() - start, status)


def _figures(run: Run, ms: float | None, baseline: float | None) -> tuple[Any, ...]:
    peak = run.memory.peak / 2**30 if run.memory else None
    launches = run.ran.kernel_launches if run.ran else None
    graphs = run.ran.graph_launches if run.ran else None
    speedup = baseline / ms if ms and baseline else None
    return ms, speedup, peak, launches, graphs, run.losses[-1] if run.losses else None


def direct() -> Iterator[Row]:
    """`steplab.graph` of the module itself, against calling it; batch 1, bf16 autocast."""
    workload = find_workload("tsmoe").open(find_workload("tsmoe").resolve("small", {}))
    with torch.device("cuda"):
        model = workload.model().eval()
    values, _ = next(iter(workload.batches(1, torch.device("cuda"), 0)))

    @torch.no_grad()
    def predict(values_BT: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return model(values_BT).outputs_BNH

    values_BT = values[:, :-1].contiguous()
    plain_ms = _milliseconds(predict, values_BT)
    fast = steplab.graph(predict, (values_BT,))
    ms = _milliseconds(fast, values_BT)
    equal = "equal bits" if torch.equal(fast(values_BT), predict(values_BT)) else "OTHER BITS"
    blank = (None,) * 5
    yield ("infer", "module(x)", plain_ms, 1.0, *blank, "ok")
    yield ("infer", "steplab.graph(module, (x,))", ms, plain_ms / ms, *blank, equal)


def _milliseconds(call: Any, values_BT: torch.Tensor) -> float:
    for _ in range(10):
        call(values_BT)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(DIRECT_CALLS):
        call(values_BT)
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / DIRECT_CALLS


def infer() -> Iterator[Row]:
    """By recipe, then of the module itself."""
    yield from rows("infer", INFERENCE, "infer", 1, {})
    try:
        yield from direct()
    except Exception as error:
        yield ("infer", "steplab.graph(module, (x,))", *[None] * 7, str(error))


PARTS: dict[str, Callable[[], Iterator[Row]]] = {
    "infer": infer,
    "experts32": lambda: rows("experts32", INFERENCE, "infer", 32, THIRTY_TWO),
    "train": lambda: rows("train", TRAINING, "full", 4, {}),
}


def main() -> int:
    """Measure, show every row at once, print one table; return the exit code."""
    parser = Parser("cuda_graphs.py", "What a CUDA graph gives.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--out", type=Path, nargs="*", default=[], help="write the table")
    try:
        args = parser.parse(sys.argv[1:])
        check_suffixes(args.out)
        for part in args.parts:
            if part not in PARTS:
                raise UserError(f"There is no part {part!r}.", did_you_mean(part, PARTS))
        exit_without_gpu(__file__)
        print_table(measured(args.parts or list(PARTS), args.out))
    except SteplabError as error:
        print(f"cuda_graphs.py: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def measured(parts: list[str], out: list[Path]) -> Table:
    """Return the table of the parts; the files are written after every row."""
    name = torch.cuda.get_device_name()
    table = Table(f"CUDA graphs of tsmoe, {name}", COLUMNS, (), f"torch {torch.__version__}")
    for part in parts:
        for row in PARTS[part]():
            print(row, file=sys.stderr, flush=True)
            table = replace(table, rows=(*table.rows, row))
            for path in out:
                write_table(table, path)
    return table


if __name__ == "__main__":
    sys.exit(main())
