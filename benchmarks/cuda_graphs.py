"""What a CUDA graph gives: python benchmarks/cuda_graphs.py (about a minute on an H200).

Every row is a Run of its own; one that fails is a row that says why. Training: the small tsmoe at
batch 4 (launch-bound), plain and compiled, with and without the graph of the whole step, beside
Inductor's own graphs. Inference: the same model at batch 1, and `steplab.graph` of its module.
"""

from __future__ import annotations

import sys
from time import perf_counter
from typing import Any

import torch

import steplab
import steplab.errors
from steplab.engine.trial import trial
from steplab.record import Run, Table
from steplab.record.table import Column
from steplab.report.export import write_table
from steplab.report.terminal import print_table
from steplab.spec import RunSpec
from steplab.techniques.parse import parse_recipe
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
COLUMNS = (
    Column("mode"),
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


def spec(recipe: str, mode: str, batch: int) -> RunSpec:
    """Return the spec of one row; the smallest size where there is no GPU."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = "small" if device == "cuda" else "tiny"
    config = find_workload("tsmoe").resolve(size, {})
    fields: dict[str, Any] = {"batch": batch, "mode": mode, "device": device}
    chosen = parse_recipe(recipe)
    return RunSpec("tsmoe", config, size, recipe=chosen, warmup=3, steps=20, **fields)


def rows(recipes: tuple[str, ...], mode: str, batch: int) -> list[tuple[Any, ...]]:
    """Measure the recipes of one mode; speed-ups are over the first."""
    found: list[tuple[Any, ...]] = []
    baseline = None
    for recipe in recipes:
        start = perf_counter()
        try:
            run = trial(spec(recipe, mode, batch))
        except steplab.errors.SteplabError as error:
            found.append((mode, recipe, *[None] * 6, perf_counter() - start, str(error)))
            continue
        ms = run.clock.step.median if run.status == "ok" and run.clock else None
        baseline = baseline or ms
        figures = _figures(run, ms, baseline)
        status = run.status if run.status == "ok" else f"{run.status}: {run.reason}"
        found.append((mode, recipe, *figures, perf_counter() - start, status))
        print(found[-1], file=sys.stderr, flush=True)
    return found


def _figures(run: Run, ms: float | None, baseline: float | None) -> tuple[Any, ...]:
    peak = run.memory.peak / 2**30 if run.memory else None
    launches = run.ran.kernel_launches if run.ran else None
    graphs = run.ran.graph_launches if run.ran else None
    speedup = baseline / ms if ms and baseline else None
    return ms, speedup, peak, launches, graphs, run.losses[-1] if run.losses else None


def direct() -> list[tuple[Any, ...]]:
    """`steplab.graph` of the module itself, against calling it; batch 1, bf16 autocast."""
    if not torch.cuda.is_available():
        return []
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
    return [
        ("infer", "module(x)", plain_ms, 1.0, *blank, "ok"),
        ("infer", "steplab.graph(module, (x,))", ms, plain_ms / ms, *blank, equal),
    ]


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


def main() -> None:
    """Measure everything and print one table; with an argument, write it there too."""
    found = rows(TRAINING, "full", 4) + rows(INFERENCE, "infer", 1)
    try:
        found += direct()
    except Exception as error:
        found.append(("infer", "steplab.graph(module, (x,))", *[None] * 7, str(error)))
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    table = Table(f"CUDA graphs of tsmoe, {name}", COLUMNS, tuple(found), torch.__version__)
    print_table(table)
    for path in sys.argv[1:]:
        from pathlib import Path

        write_table(table, Path(path))


if __name__ == "__main__":
    main()
