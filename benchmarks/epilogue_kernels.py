"""Times grouped products with gelu in their kernels at the flagship's shapes on one GPU.

    PYTHONPATH=src python benchmarks/epilogue_kernels.py [seconds]

131,072 rows in 8 groups, width 768, inner width 3072, bf16; balanced, and with a first group twice
as large as the others. The number to beat is torch's grouped product and one pass of ours after it.
Every candidate is compiled and compared with fp64 by a process of its own, so that one that fails
or hangs is a row with its reason; those that are right are timed in a CUDA graph over rotating
inputs, with all that they launch. The last line says what a step of 12 layers, each with such
experts and one dense one of 65,536 rows, would win. About 80 seconds.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import queue
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import triton
import triton.language as tl
from graph_timing import graph_ms

from steplab.cli.flags import exit_without_gpu
from steplab.kernels.grouped_mm._epilogue import Tiling
from steplab.kernels.grouped_mm._epilogue_kernels import find_tile, load_step

R, T, E, D, F = 131_072, 65_536, 8, 768, 3072
CHECKED = 1536  # rows; as divisible by 16 as R, so that the same kernels are compiled
LAYERS = 12
ROTATION = 2
# rows, columns, inner, finished at a time, warps, stages, programs of a multiprocessor, form
CANDIDATES = [
    ("forward", Tiling(128, 256, 64, 16, 8, 3, 1, "shadow")),
    ("forward", Tiling(128, 256, 64, 16, 8, 4, 1, "shadow")),
    ("forward", Tiling(128, 256, 64, 64, 8, 4, 1, "flat")),
    ("forward", Tiling(128, 128, 64, 64, 4, 3, 2, "plain")),
    ("forward", Tiling(128, 128, 64, 32, 8, 3, 2, "plain")),
    ("forward", Tiling(128, 256, 64, 256, 4, 4, 1, "warps")),
    ("backward", Tiling(128, 256, 64, 16, 8, 3, 1, "shadow")),
    ("backward", Tiling(128, 256, 64, 16, 8, 4, 1, "shadow")),
    ("backward", Tiling(128, 256, 64, 32, 8, 4, 1, "flat")),
    ("backward", Tiling(128, 128, 64, 32, 4, 3, 2, "plain")),
    ("backward", Tiling(128, 128, 64, 16, 8, 3, 2, "plain")),
    ("product", Tiling(128, 256, 64, 256, 8, 3, 1, "flat")),
    ("product", Tiling(128, 256, 64, 256, 8, 4, 1, "flat")),
    ("product", Tiling(128, 128, 64, 128, 4, 3, 2, "plain")),
    ("product", Tiling(128, 256, 64, 256, 4, 4, 1, "warps")),
]
Won = dict[tuple[str, int], dict[str, float]]  # ms by kind and number of candidate, and load
LOADS = {"balanced": [1.0] * E, "skewed 2:1": [2.0] + [1.0] * (E - 1)}


@triton.jit
def product_kernel(  # type: ignore[no-untyped-def]
    x, w, table, out, blocks, INNER: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr, K: tl.constexpr, FLATTEN: tl.constexpr, SPECIALIZE: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """Write x w^T alone."""
    tiles = tl.load(table + 3 * blocks) * (WIDTH // N)
    for tile in tl.range(
        tl.program_id(0), tiles, tl.num_programs(0), flatten=FLATTEN, warp_specialize=SPECIALIZE
    ):
        group, row, end, column = find_tile(table, blocks, tile, WIDTH, N)
        total_MN = tl.zeros([M, N], tl.float32)
        for k in range(INNER // K):
            x_MK, w_KN = load_step(x, w, group, row, column, k, INNER, WIDTH, True, K, UPCAST)
            total_MN = tl.dot(x_MK, w_KN, total_MN)
        row_M = row + tl.arange(0, M)
        place_MN = row_M.to(tl.int64)[:, None] * WIDTH + (column + tl.arange(0, N))[None, :]
        tl.store(out + place_MN, total_MN.to(out.dtype.element_ty), mask=(row_M < end)[:, None])


def product(x: Any, w_EFD: Any, ends: Any, tiling: Tiling) -> Any:
    """Return x w^T of each group, by the loop that the kernels with gelu share."""
    from steplab.kernels.grouped_mm import _epilogue as launch

    out = x.new_empty(x.shape[0], w_EFD.shape[1])
    table, blocks = launch.find_blocks(ends, x.shape[0], tiling.rows)
    product_kernel[(launch.programs(x, tiling),)](
        launch.describe(x, tiling.rows, tiling.inner),
        launch.describe(w_EFD.flatten(0, 1), tiling.columns, tiling.inner),
        table,
        out,
        blocks,
        *reversed(w_EFD.shape[1:]),
        FLATTEN=tiling.form == "flat",
        SPECIALIZE=tiling.form == "warps",
        **launch.options(tiling),
    )
    return out


def make(rows: int, shares: Sequence[float]) -> dict[str, Any]:
    """Return inputs whose groups have these shares of the rows; the last takes what is left."""
    import torch

    from steplab.kernels.activation import RowWeights

    made = torch.Generator(device="cuda").manual_seed(0)

    def normal(*shape: int) -> Any:
        x = torch.randn(shape, generator=made, device="cuda", dtype=torch.bfloat16)
        return x * shape[-1] ** -0.5

    bounds = [int(rows * part / sum(shares)) for part in itertools.accumulate(shares)]
    source = torch.randperm(rows, generator=made, device="cuda").int()
    values = torch.rand(rows, generator=made, device="cuda")
    return {
        "x": 4 * normal(rows, D),
        "w_in": normal(len(shares), F, D),
        "w_out": normal(len(shares), D, F),
        "ends": torch.tensor([*bounds[:-1], rows], dtype=torch.int32, device="cuda"),
        "weights": RowWeights(values, source if len(shares) > 1 else None),
        "z": 2 * normal(rows, F) * F**0.5,
    }


def ours(kind: str, tiling: Tiling, i: dict[str, Any]) -> list[Any]:
    """Return what one candidate computes."""
    from steplab.kernels.grouped_mm import _epilogue as launch

    if kind == "product":
        return [product(i["x"], i["w_in"], i["ends"], tiling)]
    if kind == "forward":
        return [*launch.product_gelu(i["x"], i["w_in"], i["ends"], i["weights"], tiling)]
    found = launch.product_slope(i["x"], i["w_out"], i["ends"], i["z"], i["weights"], tiling)
    return [*found]


def apart(kind: str, impl: str, activation: str, i: dict[str, Any]) -> list[Any]:
    """Return the same by a product of `impl` (dense: one group) and a pass after it."""
    from steplab.kernels import activation as activation_op
    from steplab.kernels import grouped_mm as grouped_mm_op

    def multiply(w: Any) -> Any:
        if impl == "dense":
            return i["x"] @ w[0]
        return grouped_mm_op.product(impl, i["x"], w, i["ends"])

    if kind == "backward":
        dh = multiply(i["w_out"])
        return [*activation_op.backward(activation, i["z"], dh, "gelu", i["weights"])]
    z = multiply(i["w_in"].mT)
    if kind == "product":
        return [z]
    return [z, activation_op.forward(activation, z, "gelu", i["weights"])]


def check(kind: str, tiling: Tiling) -> tuple[str, float]:
    """Compare a candidate with fp64 on groups of odd sizes, one empty; runs in a process."""
    import torch

    i = make(CHECKED, [0.31, 0.0, 0.001, 0.2, 0.1, 0.25, 0.08, 0.06])
    found = ours(kind, tiling, i)
    torch.cuda.synchronize()
    wide = {name: t.double() for name, t in i.items() if name not in ("ends", "weights")}
    weights = i["weights"]._replace(values_R=i["weights"].values_R.double())
    truth = apart(kind, "loop", "reference", {**i, **wide, "weights": weights})
    pairs = zip(found, truth, strict=True)
    wrong = max(float((a.double() - b).norm() / b.norm()) for a, b in pairs)
    return ("ok" if wrong < 4e-3 else "WRONG"), wrong  # two roundings to bf16: 2.4e-3


def answer(answers: Any, number: int) -> None:
    """Put a candidate's number and what came of its check into the queue."""
    try:
        found = check(*CANDIDATES[number])
    except Exception as problem:
        words = " ".join(str(problem).split())
        found = (f"{type(problem).__name__}: {words[-90:]}", math.nan)
    answers.put((number, *found))


def check_all(deadline: float) -> dict[int, tuple[str, float]]:
    """Return the status and error of every candidate, checked at the same time."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    workers = [
        context.Process(target=answer, args=(answers, number), daemon=True)
        for number in range(len(CANDIDATES))
    ]
    for worker in workers:
        worker.start()
    found: dict[int, tuple[str, float]] = {}
    while len(found) < len(workers) and time.monotonic() < deadline:
        try:
            number, status, wrong = answers.get(timeout=1.0)
        except queue.Empty:
            if not any(worker.is_alive() for worker in workers):
                break
            continue
        found[number] = status, wrong
    for worker in workers:
        worker.kill()
    for worker in workers:
        worker.join(2.0)
    return found


def row(name: str, rows: int, run: Callable[[Any], Any], inputs: Sequence[Any], note: str) -> float:
    """Print one line as soon as it is known; return its ms, or nan where it failed."""
    try:
        ms = graph_ms([partial(run, i) for i in inputs])
    except Exception as problem:
        words = " ".join(str(problem).split())
        print(f"{name:58} {type(problem).__name__}: {words[-90:]}", flush=True)
        return math.nan
    rate = 2e-9 * rows * D * F / ms
    print(f"{name:58} {ms * 1e3:8.1f} us {rate:6.0f} TFLOP/s  {note}", flush=True)
    return ms


def time_load(load: str, checked: dict[int, tuple[str, float]], won: Won) -> None:
    """Time everything under one load; note the ms that each candidate wins."""
    shares = [1.0] if load == "dense" else LOADS[load]
    rows, theirs = (T, "dense") if load == "dense" else (R, "aten")
    inputs = [make(rows, shares) for _ in range(ROTATION)]
    for kind in ("forward", "backward", "product"):
        passes = row(
            f"{load}: {theirs} {kind}" + (" and pass" if kind != "product" else ""),
            rows,
            partial(apart, kind, theirs, "triton_rows"),
            inputs,
            "" if kind == "product" else "<- to beat",
        )
        for number, (own, tiling) in enumerate(CANDIDATES):
            status, wrong = checked.get(number, ("no answer", math.nan))
            if own != kind or (load == "dense" and kind == "product"):
                continue
            name = f"{load}: {kind} " + " ".join(map(str, tiling))
            if status != "ok":
                print(f"{name:58} {status} {wrong:.1e}", flush=True)
                continue
            ms = row(
                name,
                rows,
                partial(ours, kind, tiling),
                inputs,
                f"error {wrong:.1e}",
            )
            won.setdefault((kind, number), {})[load] = passes - ms


def main() -> None:
    """Check, time, and say what is won."""
    import torch

    exit_without_gpu(__file__)
    begin = time.monotonic()
    total = float(sys.argv[1]) if len(sys.argv) > 1 else 80.0
    print(torch.cuda.get_device_name(), torch.__version__, triton.__version__, flush=True)
    checked = check_all(begin + 0.6 * total)
    print(f"checked {len(checked)} of {len(CANDIDATES)}, {time.monotonic() - begin:.0f} s")
    won: Won = {}
    for load in ("balanced", "dense", "skewed 2:1"):
        if time.monotonic() > begin + total:
            print(f"{load}: no time left")
            continue
        time_load(load, checked, won)
        torch.cuda.empty_cache()
    step = 0.0
    for kind in ("forward", "backward"):
        sums = {
            number: LAYERS * (by_load["balanced"] + by_load["dense"])
            for (own, number), by_load in won.items()
            if own == kind and {"balanced", "dense"} <= set(by_load)
        }
        sums = {number: ms for number, ms in sums.items() if ms == ms}
        if not sums:
            print(f"{kind}: nothing to compare")
            continue
        number = max(sums, key=lambda n: sums[n])
        step += max(0.0, sums[number])
        print(f"{kind}: {sums[number]:+.2f} ms a step by {CANDIDATES[number][1]}")
    print(f"won: {step:.2f} ms a step of {LAYERS} layers; {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
