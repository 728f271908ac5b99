"""Times the ComplexEMA on one GPU: whole ops, the kernels of the scan, then other cuts of them.

    PYTHONPATH=src python benchmarks/ema_kernels.py [seconds]

At B4 L4096 D1024 N16, within 80 seconds; every row is printed as soon as it is there, and one that
fails has its reason. First each implementation as a user calls it: forward and backward from
(B, L, D) tensors and stored parameters, so that tables, layout copies and sums are included;
eagerly and in a CUDA graph; peak memory beside inputs and outputs; errors against fp64. Then the
timestep norm likewise, the kernels of one scan by the profiler, and cuts: each is checked against
fp64 at a short length and timed one kernel at a time, in a CUDA graph over rotating inputs.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from graph_timing import graph_ms

from steplab.cli.flags import exit_without_gpu

BATCH, LENGTH, WIDTH, MODES, GROUPS = 4, 4096, 1024, 16, 32
CHECKED_LENGTH = 700  # several chunks and a rest
ROTATION = 4  # inputs of 33.5 MB each: together more than the 50 MB of an H200's second-level cache
# chunk, lanes, warps, steps at once, block
GRADIENTS = [(256, 32, 1, 1, u) for u in (2, 1, 4)]
GRADIENTS += [(128, 32, 1, 1, 2), (512, 32, 1, 1, 2), (256, 64, 2, 1, 2), (256, 128, 4, 1, 2)]
OUTPUTS = [(256, 32, 1, r, u) for r, u in ((2, 4), (1, 4), (2, 2), (2, 8), (1, 8))]
OUTPUTS += [(128, 32, 1, 2, 4), (512, 32, 1, 2, 4), (256, 64, 2, 2, 4), (256, 128, 4, 2, 4)]
SUMS = [(256, 32, 1, r, u) for r, u in ((4, 8), (2, 8), (4, 4), (4, 16), (1, 8))]
SUMS += [(128, 32, 1, 4, 8), (512, 32, 1, 4, 8), (256, 64, 2, 4, 8)]
CANDIDATES = [
    *(("gradients", c) for c in GRADIENTS),
    *(("outputs", c) for c in OUTPUTS),
    *(("sums", c) for c in SUMS),
]


def tiling_with(kernel: str, candidate: Sequence[int]) -> Any:
    """Return the table's tiling with one kernel changed."""
    from steplab.kernels.ema.scan import ScanTiling

    chunk, lanes, warps, steps, block = candidate
    tiling = replace(ScanTiling(), chunk=chunk, lanes=lanes, warps=warps)
    if kernel == "sums":
        return replace(tiling, sum_steps=steps, sum_block=block)
    if kernel == "outputs":
        return replace(tiling, output_steps=steps, output_block=block)
    return replace(tiling, gradient_block=block)


def make(length: int, batch: int, dtype: Any, width: int = WIDTH) -> tuple[Any, Any, Any]:
    """Return x, dy and the parameters in fp32; half of the channels remember for long."""
    import torch

    from steplab.kernels.ema import EMAParameters

    made = torch.Generator(device="cuda").manual_seed(0)

    def normal(*shape: int) -> Any:
        return torch.randn(shape, generator=made, device="cuda")

    x, dy = (normal(batch, length, width).to(dtype) for _ in range(2))
    memory = torch.where(torch.arange(width, device="cuda") % 2 == 0, 0.0, -3.0)[:, None]
    alpha, delta = (0.2 * normal(width, MODES) + memory for _ in range(2))
    rest = normal(width), normal(width, MODES, 2), normal(width)
    return x, dy, EMAParameters(alpha, delta, *rest)


def gradients(impl: str, x: Any, dy: Any, parameters: Any) -> list[Any]:
    """Return y and the gradients of x and the five parameters."""
    import torch

    from steplab.kernels import ema as op
    from steplab.kernels.ema import EMAParameters

    leaves = [t.detach().requires_grad_() for t in (x, *parameters)]
    y, _ = op.ema(impl, leaves[0], EMAParameters(*leaves[1:]))
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


@functools.cache
def example(length: int, width: int, dtype: Any) -> tuple[Any, list[Any]]:
    """Return inputs of one row, and what the definition makes of them in fp64."""
    from steplab.kernels.ema import EMAParameters

    x, dy, parameters = make(length, 1, dtype, width)
    wide = EMAParameters(*(p.double() for p in parameters))
    return (x, dy, parameters), gradients("sequential", x.double(), dy.double(), wide)


def error(actual: Any, expected: Any) -> float:
    """Relative error in the Frobenius norm."""
    return float((actual.double() - expected).norm() / expected.norm())


def check(kernel: str, candidate: Sequence[int]) -> float:
    """Compare one candidate with fp64 at a short length; return the worst error, NaN if wrong."""
    import torch

    from steplab.kernels.ema import scan as launch

    (x, dy, parameters), expected = example(CHECKED_LENGTH, WIDTH, torch.bfloat16)
    tiling = tiling_with(kernel, candidate)
    y, _, kept = launch.forward_by(tiling, x, parameters, None, False)
    found = [y]
    if kernel == "gradients":
        found += launch.backward_by(tiling, dy, None, x, parameters, kept, False)[:-1]
    errors = [error(a, b) for a, b in zip(found, expected, strict=False)]
    limits = [4e-3, 4e-3, *[2e-5] * 5]  # a rounding to bf16; fp32 sums
    right = all(e <= limit for e, limit in zip(errors, limits, strict=False))
    return max(errors) if right else math.nan


def eager_ms(call: Callable[[], Any], repeats: int = 9) -> float:
    """Return the median ms of one call by device events, the host's launches included."""
    import torch

    for _ in range(2):
        call()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events))


def backward_ms(forward: Callable[[], Any], leaves: Sequence[Any], dy: Any) -> float:
    """Return the median ms of a backward. Its graph must not live on: it would stop a capture."""
    import torch

    y = forward()
    return eager_ms(lambda: torch.autograd.grad(y, leaves, dy, retain_graph=True))


def op_times(forward: Callable[[], Any], leaves: Sequence[Any], dy: Any) -> list[float]:
    """Return ms of forward and backward, eagerly; then of forward and of both, in a CUDA graph."""
    import torch

    def plain() -> Any:
        with torch.no_grad():
            return forward()

    found = [eager_ms(forward), backward_ms(forward, leaves, dy), math.nan, math.nan]
    for place, call in enumerate((plain, lambda: torch.autograd.grad(forward(), leaves, dy))):
        try:
            found[2 + place] = graph_ms([call])
        except Exception as problem:
            print(f"  not captured: {' '.join(str(problem).split())[:100]}", flush=True)
            torch.cuda.synchronize()
    return found


def extra_mib(forward: Callable[[], Any], leaves: Sequence[Any], dy: Any) -> list[float]:
    """Return the peak memory of forward, and of both, beside inputs, outputs and gradients."""
    import torch

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    y = forward()
    peaks = [torch.cuda.max_memory_allocated() - before - y.nbytes]
    torch.autograd.grad(y, leaves, dy)
    results = y.nbytes + sum(leaf.nbytes for leaf in leaves)
    peaks.append(torch.cuda.max_memory_allocated() - before - results)
    return [peak / 2**20 for peak in peaks]


def whole(impl: str, dtype_name: str) -> str:
    """Return a line: one implementation as a user calls it."""
    import torch

    from steplab.kernels import ema as op
    from steplab.kernels.ema import EMAParameters

    dtype = getattr(torch, dtype_name)
    x, dy, parameters = make(LENGTH, BATCH, dtype)
    leaves = [t.detach().requires_grad_() for t in (x, *parameters)]
    stored = EMAParameters(*leaves[1:])

    def forward() -> Any:
        return op.ema(impl, leaves[0], stored)[0]

    torch.autograd.grad(forward(), leaves, dy)
    figures = [*op_times(forward, leaves, dy), *extra_mib(forward, leaves, dy)]
    inputs, expected = example(512, 64, dtype)
    errors = [error(a, b) for a, b in zip(gradients(impl, *inputs), expected, strict=True)]
    return told(figures) + "  " + " ".join(f"{e:.0e}" for e in errors)


def told(figures: Sequence[float]) -> str:
    """Return four times and two sizes in columns."""
    times = " ".join(f"{value:9.3f}" for value in figures[:4])
    return f"{times} " + " ".join(f"{value:9.1f}" for value in figures[4:])


def norm_row(impl: str, dtype_name: str) -> str:
    """Return a line: the timestep norm by one implementation."""
    import torch

    from steplab.kernels import timestep_norm as op
    from steplab.kernels.timestep_norm import Affine

    x, dy, _ = make(LENGTH, BATCH, getattr(torch, dtype_name))
    weight, bias = (torch.zeros(WIDTH, device="cuda") for _ in range(2))
    leaves = [t.detach().requires_grad_() for t in (x, weight, bias)]
    affine = Affine(leaves[1], leaves[2], GROUPS, 1e-5)

    def forward() -> Any:
        return op.timestep_norm(impl, leaves[0], affine)[0]

    torch.autograd.grad(forward(), leaves, dy)
    return told([*op_times(forward, leaves, dy), *extra_mib(forward, leaves, dy)])


def kernel_rows() -> str:
    """Return the kernels of one forward and backward of the scan, by the profiler."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    x, dy, parameters = make(LENGTH, BATCH, torch.bfloat16)
    gradients("scan", x, dy, parameters)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(3):
            gradients("scan", x, dy, parameters)
        torch.cuda.synchronize()
    rows = sorted(found.key_averages(), key=lambda r: -r.device_time_total)[:10]
    return "".join(f"\n  {r.device_time_total / 3:8.1f} us  {r.key[:80]}" for r in rows)


def time_kernel(kernel: str, candidate: Sequence[int], inputs: Any) -> float:
    """Return the ms of one kernel (gradients: with the sums before and after them)."""
    from steplab.kernels.ema import scan as launch

    xs, dys, parameters = inputs
    tiling = tiling_with(kernel, candidate)
    tables = launch.tables_by(tiling, LENGTH, parameters)
    if kernel == "sums":
        return graph_ms([lambda x=x: launch.sums_by(tiling, x, tables[0], False) for x in xs])
    entering = launch.carry(launch.sums_by(tiling, xs[0], tables[0], False), None, tables[0], False)
    if kernel == "outputs":
        return graph_ms([lambda x=x: launch.outputs_by(tiling, x, tables, entering) for x in xs])
    weights = tables[0][tiling.sum_steps + tiling.output_steps]
    rest = (parameters.omega_D, launch.Kept(tables[0], entering), weights, None, False)
    pairs = zip(xs, dys, strict=True)
    return graph_ms(
        [lambda x=x, dy=dy: launch.gradients_by(tiling, dy, x, *rest) for x, dy in pairs]
    )


def row(name: str, run: Callable[[], str], deadline: float) -> None:
    """Print one row, whatever happens."""
    import torch

    if time.monotonic() > deadline:
        print(f"{name} no time left", flush=True)
        return
    try:
        print(f"{name} {run()}", flush=True)
    except Exception as problem:
        print(
            f"{name} {type(problem).__name__}: {' '.join(str(problem).split())[:120]}", flush=True
        )
    torch.cuda.empty_cache()


def main() -> None:
    """Whole ops, then kernels, then cuts for as long as there is time."""
    import torch

    exit_without_gpu(__file__)
    begin = time.monotonic()
    deadline = begin + (float(sys.argv[1]) if len(sys.argv) > 1 else 78.0)
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    print(
        f"{'op':18} {'dtype':8}   fwd ms    bwd ms graph fwd graph both   MiB fwd  MiB both  errors"
    )
    for impl in ("scan", "fft_table", "fft"):
        name = f"{'ema ' + impl:18} bfloat16"
        row(name, lambda i=impl: whole(i, "bfloat16"), deadline)
    for impl in ("triton_running", "reference"):
        name = f"{'norm ' + impl:18} bfloat16"
        row(name, lambda i=impl: norm_row(i, "bfloat16"), deadline)
    for impl in ("scan", "fft_table", "fft"):
        row(f"{'ema ' + impl:18} float32 ", lambda i=impl: whole(i, "float32"), deadline)
    row("kernels of the scan", kernel_rows, deadline)
    print("kernel     chunk lanes warps steps block       us  worst error", flush=True)
    made = [make(LENGTH, BATCH, torch.bfloat16) for _ in range(ROTATION)]
    inputs = [m[0] for m in made], [m[1] for m in made], made[0][2]
    for kernel, candidate in CANDIDATES:

        def timed(kernel: str = kernel, candidate: Sequence[int] = candidate) -> str:
            wrong = check(kernel, candidate)
            return f"{time_kernel(kernel, candidate, inputs) * 1e3:8.1f} {wrong:9.1e}"

        row(f"{kernel:10} " + " ".join(f"{value:5}" for value in candidate), timed, deadline)
    print(f"{time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
