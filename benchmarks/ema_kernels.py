"""Times the ComplexEMA on one GPU: cuts of the scan, then whole ops; about 80 seconds.

    PYTHONPATH=src python benchmarks/ema_kernels.py [seconds]

At B4 L4096 D1024 N16. Candidates are compiled by worker processes and checked against fp64 at a
short length; those that are right are timed one kernel at a time, in a CUDA graph over rotating
inputs. Then each implementation as a user calls it: forward and backward from (B, L, D) tensors
and stored parameters, so that tables, layout copies and sums are included; peak memory beside
inputs and outputs; errors against fp64. A candidate that fails is a row with its reason.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import math
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

BATCH, LENGTH, WIDTH, MODES = 4, 4096, 1024, 16
CHECKED_LENGTH = 700  # several chunks and a rest
ROTATION = 4  # inputs of 33.5 MB each: together more than the 50 MB of an H200's second-level cache
# chunk, lanes, warps, steps, block, sums
SUMS = [(256, 32, 1, r, u, 2) for r, u in ((1, 8), (2, 8), (2, 16), (4, 4), (4, 8), (4, 16))]
SUMS += [(128, 32, 1, 4, 8, 2), (512, 32, 1, 4, 8, 2), (256, 64, 2, 4, 8, 2)]
OUTPUTS = [(256, 32, 1, r, u, s) for r, u, s in ((1, 4, 4), (1, 8, 2), (2, 2, 2), (2, 4, 1))]
OUTPUTS += [(256, 32, 1, 2, u, s) for u, s in ((4, 2), (4, 4), (8, 2))]
OUTPUTS += [(128, 32, 1, 2, 4, 2), (512, 32, 1, 2, 4, 2), (256, 64, 2, 2, 4, 2)]
OUTPUTS += [(256, 128, 4, 2, 4, 2)]
GRADIENTS = [(256, 32, 1, 1, u, s) for u, s in ((1, 2), (2, 1), (2, 2), (4, 2))]
GRADIENTS += [(128, 32, 1, 1, 2, 2), (512, 32, 1, 1, 2, 2), (256, 64, 2, 1, 2, 2)]
CANDIDATES = [
    *(("sums", c) for c in SUMS),
    *(("outputs", c) for c in OUTPUTS),
    *(("gradients", c) for c in GRADIENTS),
    ("carry", (256, 32, 1, 1, 4, 2)),
]


def cut_of(kernel: str, candidate: Sequence[int]) -> Any:
    """Return the table's cut with one kernel changed."""
    from steplab.kernels.ema._scan_config import Cut

    chunk, lanes, warps, steps, block, sums = candidate
    cut = replace(Cut(), chunk=chunk, lanes=lanes, warps=warps, sums=sums)
    if kernel == "sums":
        return replace(cut, sum_steps=steps, sum_block=block)
    if kernel == "outputs":
        return replace(cut, output_steps=steps, output_block=block)
    return replace(cut, gradient_block=block)


def make(length: int, batch: int, dtype: Any, width: int = WIDTH) -> tuple[Any, Any, Any]:
    """Return x, dy and the parameters in fp32; half of the channels remember for long."""
    import torch

    from steplab.kernels.ema import Parameters

    made = torch.Generator(device="cuda").manual_seed(0)

    def normal(*shape: int) -> Any:
        return torch.randn(shape, generator=made, device="cuda")

    x, dy = (normal(batch, length, width).to(dtype) for _ in range(2))
    memory = torch.where(torch.arange(width, device="cuda") % 2 == 0, 0.0, -3.0)[:, None]
    alpha, delta = (0.2 * normal(width, MODES) + memory for _ in range(2))
    rest = normal(width), normal(width, MODES, 2), normal(width)
    return x, dy, Parameters(alpha, delta, *rest)


def gradients(impl: str, x: Any, dy: Any, parameters: Any) -> list[Any]:
    """Return y and the gradients of x and the five parameters."""
    import torch

    from steplab.kernels import ema as op
    from steplab.kernels.ema import Parameters

    leaves = [t.detach().requires_grad_() for t in (x, *parameters)]
    y, _ = op.ema(impl, leaves[0], Parameters(*leaves[1:]))
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def truth(x: Any, dy: Any, parameters: Any) -> list[Any]:
    """Return the same by the definition, in fp64."""
    from steplab.kernels.ema import Parameters

    wide = Parameters(*(p.double() for p in parameters))
    return gradients("sequential", x.double(), dy.double(), wide)


def error(actual: Any, expected: Any) -> float:
    """Relative error in the Frobenius norm."""
    return float((actual.double() - expected).norm() / expected.norm())


def check(kernel: str, candidate: Sequence[int]) -> tuple[str, float]:
    """Compile one candidate and compare it with fp64 at a short length; runs in a worker."""
    import torch

    from steplab.kernels.ema import _scan_launch as launch

    x, dy, parameters = make(CHECKED_LENGTH, 1, torch.bfloat16)
    cut = cut_of(kernel, candidate)
    y, _, kept = launch.forward_by(cut, x, parameters, None, False)
    found = [y]
    if kernel == "gradients":
        found += launch.backward_by(cut, dy, None, x, parameters, kept, False)[:-1]
    torch.cuda.synchronize()
    expected = truth(x, dy, parameters)
    errors = [error(a, b) for a, b in zip(found, expected, strict=False)]
    limits = [4e-3, 4e-3, *[2e-5] * 5]  # a rounding to bf16; fp32 sums
    right = all(e <= limit for e, limit in zip(errors, limits, strict=False))
    return ("ok" if right else "WRONG"), max(errors)


def checked(kernel: str, candidate: Sequence[int]) -> tuple[str, float]:
    """`check`, with whatever goes wrong as a status."""
    try:
        return check(kernel, candidate)
    except Exception as problem:
        words = " ".join(str(problem).split())
        return f"{type(problem).__name__}: {words[-80:]}", math.nan


def graph_ms(calls: Sequence[Callable[[], Any]], repeats: int = 7) -> float:
    """Return the median ms of one call, of a CUDA graph that holds them all."""
    import torch

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _, call in itertools.product(range(2), calls):
            call()
    graph.replay()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in itertools.pairwise(events)]
    return statistics.median(times) / (2 * len(calls))


def eager_ms(call: Callable[[], Any], repeats: int = 15) -> float:
    """Return the median ms of one call by device events, the host's launches included."""
    import torch

    for _ in range(3):
        call()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events))


def backward_ms(y: Any, leaves: Sequence[Any], dy: Any) -> float:
    """Return the median ms of a backward alone."""
    import torch

    return eager_ms(lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True))


def time_kernel(kernel: str, candidate: Sequence[int], inputs: Any) -> float:
    """Return the ms of one kernel (gradients: with the sums before and after them)."""
    from steplab.kernels.ema import _scan_launch as launch

    xs, dys, parameters = inputs
    cut = cut_of(kernel, candidate)
    tables = launch.tables_by(cut, LENGTH, parameters)
    if kernel == "sums":
        return graph_ms([lambda x=x: launch.sums_by(cut, x, tables[0], False) for x in xs])
    entering = launch.carry(launch.sums_by(cut, xs[0], tables[0], False), None, tables[0], False)
    if kernel == "carry":
        return graph_ms([lambda: launch.carry(entering, None, tables[0], False)] * 8)
    if kernel == "outputs":
        rest = (tables, entering, False)
        return graph_ms([lambda x=x: launch.outputs_by(cut, x, *rest) for x in xs])
    weights = tables[0][cut.sum_steps + cut.output_steps]
    rest = (parameters.omega_D, launch.Kept(tables[0], entering), weights, None, False)
    return graph_ms(
        [
            lambda x=x, dy=dy: launch.gradients_by(cut, dy, x, *rest)
            for x, dy in zip(xs, dys, strict=True)
        ]
    )


def sweep(deadline: float) -> None:
    """Check all candidates in parallel, time those that are right, print a table."""
    import torch

    context = multiprocessing.get_context("spawn")
    workers = min(14, os.cpu_count() or 1)
    pool = concurrent.futures.ProcessPoolExecutor(workers, mp_context=context)
    futures = [pool.submit(checked, *candidate) for candidate in reversed(CANDIDATES)][::-1]
    rows: list[list[Any]] = []
    for (kernel, candidate), future in zip(CANDIDATES, futures, strict=True):
        try:
            status, wrong = future.result(max(0.1, deadline - time.monotonic()))
        except Exception as problem:
            status, wrong = type(problem).__name__, math.nan
        rows.append([kernel, candidate, status, wrong, math.nan])
    pool.shutdown(wait=False, cancel_futures=True)
    print(f"checked {len(rows)} cuts; timing", flush=True)
    made = [make(LENGTH, BATCH, torch.bfloat16) for _ in range(ROTATION)]
    inputs = [m[0] for m in made], [m[1] for m in made], made[0][2]
    for row in rows:
        if row[2] == "ok":
            try:
                row[4] = time_kernel(row[0], row[1], inputs)
            except Exception as problem:
                row[2] = f"{type(problem).__name__}: {' '.join(str(problem).split())[-80:]}"
    print(f"{'kernel':10} chunk lanes warps steps block sums {'us':>8} {'error':>8}  status")
    for kernel in ("sums", "carry", "outputs", "gradients"):
        group = [row for row in rows if row[0] == kernel]
        for _, candidate, status, wrong, ms in sorted(group, key=lambda r: (r[4] != r[4], r[4])):
            words = " ".join(f"{value:5}" for value in candidate)
            print(f"{kernel:10} {words} {ms * 1e3:8.1f} {wrong:8.1e}  {status}")


def whole(impl: str, dtype_name: str) -> str:
    """Return a line: one implementation as a user calls it."""
    import torch

    from steplab.kernels import ema as op
    from steplab.kernels.ema import Parameters

    dtype = getattr(torch, dtype_name)
    x, dy, parameters = make(LENGTH, BATCH, dtype)
    leaves = [t.detach().requires_grad_() for t in (x, *parameters)]
    stored = Parameters(*leaves[1:])

    def forward() -> Any:
        return op.ema(impl, leaves[0], stored)[0]

    def plain() -> Any:
        with torch.no_grad():
            return op.ema(impl, x, parameters)[0]

    y = forward()
    torch.autograd.grad(y, leaves, dy)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() - x.nbytes  # y is still there and about to be replaced
    y = forward()
    peak_forward = torch.cuda.max_memory_allocated() - before - 2 * x.nbytes
    torch.autograd.grad(y, leaves, dy)
    peak = torch.cuda.max_memory_allocated() - before - 2 * x.nbytes
    del y
    figures = [eager_ms(forward), backward_ms(forward(), leaves, dy), math.nan, math.nan]
    if impl == "scan":
        figures[2] = graph_ms([plain])
        figures[3] = graph_ms([lambda: torch.autograd.grad(forward(), leaves, dy)])
    short = make(1024, 1, dtype, 64)
    errors = [error(a, b) for a, b in zip(gradients(impl, *short), truth(*short), strict=True)]
    times = " ".join(f"{value:9.3f}" for value in figures)
    mib = f"{peak_forward / 2**20:9.0f} {peak / 2**20:9.0f}"
    return f"{impl:10} {dtype_name:8} {times} {mib}  " + " ".join(f"{e:.0e}" for e in errors)


def main() -> None:
    """Sweep, then the whole ops."""
    import torch

    begin = time.monotonic()
    total = float(sys.argv[1]) if len(sys.argv) > 1 else 85.0
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    sweep(begin + 0.6 * total)
    print(
        f"\n{'op':10} {'dtype':8}   fwd ms    bwd ms  graph fwd  graph fwd+bwd  extra MiB fwd, both"
        "  errors y dx alpha delta theta gamma omega"
    )
    for impl, dtype in itertools.product(("scan", "fft", "fft_table"), ("bfloat16", "float32")):
        if time.monotonic() > begin + total:
            print(f"{impl:10} {dtype:8} no time left")
            continue
        try:
            print(whole(impl, dtype), flush=True)
        except Exception as problem:
            print(f"{impl:10} {dtype:8} {type(problem).__name__}: {str(problem)[:120]}")
        torch.cuda.empty_cache()
    print(f"\n{time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
