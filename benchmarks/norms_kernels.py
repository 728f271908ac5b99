"""Times norm, rotation and update on one GPU at the large mixture's shapes; about 45 seconds.

    PYTHONPATH=src python benchmarks/norms_kernels.py [seconds]

Every row is checked against fp64 or torch first and has the bytes that must move at least; the
rate is those bytes over the time. Then the tilings of each kernel, best first. A row that fails
says why; rows that come too late are left out.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from steplab.cli.flags import exit_without_gpu
from steplab.kernels import rms_norm as norm_op
from steplab.kernels import rotary as rotary_op
from steplab.kernels.adamw import Hyperparameters, ParameterState
from steplab.modules.optimizer import OnePassAdamW

BATCH, TOKENS, HEADS, HEAD = 16, 4096, 12, 64
ROWS, WIDTH = BATCH * TOKENS, HEADS * HEAD
EPS = 1e-6
A = ROWS * WIDTH * 2  # bytes of one bf16 tensor
BF16 = torch.bfloat16
COMPILED = " compiled"
Run = Callable[[], Any]


@dataclass(frozen=True)
class Row:
    """One thing to time: `prepare` makes the inputs and returns what runs."""

    name: str
    bytes: float
    prepare: Callable[[], Run]


def milliseconds(run: Run, repeats: int = 12) -> float:
    """Return the median time on the device; the inputs are larger than its caches."""
    for _ in range(3):
        run()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for start, stop in events:
        start.record()
        run()
        stop.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(stop) for start, stop in events)


def show(row: Row) -> float:
    """Print one line; return the milliseconds, or infinity for a row that failed."""
    try:
        ms = milliseconds(row.prepare())
    except Exception as error:
        said = " ".join(str(error).split())[:90]
        print(f"  {row.name:44} {type(error).__name__}: {said}", flush=True)
        torch.cuda.empty_cache()
        return float("inf")
    rate = row.bytes / ms / 1e9
    print(f"  {row.name:44} {ms:8.4f} ms {row.bytes / 1e6:9.0f} MB {rate:7.2f} TB/s", flush=True)
    torch.cuda.empty_cache()
    return ms


def normal(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """Return random numbers on the device."""
    return torch.randn(shape, device="cuda", dtype=dtype)


def norm_rows(how: str) -> Iterator[Row]:
    """Norm forward and backward, alone and with the addition, by every implementation."""
    for added in (False, True):
        what = "add + norm" if added else "norm"
        forward_bytes, backward_bytes = (4 * A, 4 * A) if added else (2 * A, 4 * A)
        for impl in ("reference",) if how else ("triton_norm", "aten"):
            label = f"{impl}{how}"
            yield Row(f"{what} forward {label}", forward_bytes, norm_run(impl, how, added, False))
            yield Row(f"{what} backward {label}", backward_bytes, norm_run(impl, how, added, True))


def norm_run(impl: str, how: str, added: bool, backward: bool) -> Callable[[], Run]:
    """Return what prepares a forward, or a backward in which the stream has a gradient too."""

    def prepare() -> Run:
        x, weight = normal(ROWS, WIDTH), torch.ones(WIDTH, device="cuda", dtype=BF16)
        more = normal(ROWS, WIDTH) if added else None

        def norm(x: Tensor, weight: Tensor, more: Tensor | None) -> tuple[Tensor, Tensor]:
            return norm_op.rms_norm(impl, x, weight, EPS, more)

        run = torch.compile(norm, fullgraph=True) if how else norm
        # Also for the forward alone, so that both are one graph to the compiler's cache.
        leaves = [t.requires_grad_() for t in (x, weight, more) if t is not None]
        if not backward:
            return lambda: run(x, weight, more)
        out = run(x, weight, more)
        gradients = [normal(ROWS, WIDTH) for _ in range(2)]
        return lambda: torch.autograd.grad(out, leaves, gradients, retain_graph=True)

    return prepare


def rotary_rows(how: str) -> Iterator[Row]:
    """The rotation of q and k out of the product, and its gradient."""
    for impl in ("reference",) if how else ("triton_rotary", "reference"):
        yield Row(f"rotary forward {impl}{how}", 4 * A, rotary_run(impl, how, False))
        yield Row(f"rotary backward {impl}{how}", 6 * A, rotary_run(impl, how, True))


def rotary_run(impl: str, how: str, backward: bool) -> Callable[[], Run]:
    """Return what prepares a rotation or its gradient."""

    def prepare() -> Run:
        qkv = normal(BATCH, TOKENS, 3, HEADS, HEAD).requires_grad_()
        angles = torch.rand(TOKENS, HEAD // 2, device="cuda")
        cos, sin = angles.cos(), angles.sin()

        def rotate(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return rotary_op.rotary(impl, qkv, cos, sin)

        run = torch.compile(rotate, fullgraph=True) if how else rotate
        if not backward:
            return lambda: run(qkv)
        out = run(qkv)
        gradients = [normal(BATCH, TOKENS, HEADS, HEAD).transpose(1, 2) for _ in range(3)]
        return lambda: torch.autograd.grad(out, [qkv], gradients, retain_graph=True)

    return prepare


def parameters(dtype: torch.dtype) -> list[torch.nn.Parameter]:
    """Return parameters of the large mixture's shapes, with gradients."""
    from steplab.workloads.tsmoe.config import PRESETS
    from steplab.workloads.tsmoe.model import Tsmoe

    with torch.device("meta"):
        shapes = [p.shape for p in Tsmoe(PRESETS["flagship"]).parameters()]
    found = []
    for shape in shapes:
        found.append(torch.nn.Parameter(0.02 * torch.randn(shape, device="cuda", dtype=dtype)))
        found[-1].grad = 1e-3 * torch.randn(shape, device="cuda", dtype=dtype)
    return found


def update_rows() -> Iterator[Row]:
    """The update of 538 M parameters, alone and with clipping."""
    count = 538_130_793
    for name, dtype in (("bf16 weights + fp32 master", BF16), ("fp32", torch.float32)):
        grad_bytes = count * dtype.itemsize
        yield Row(f"one-pass {name}", 28.0 * count, one_pass(dtype, False))
        yield Row(f"one-pass {name}, clipped", 28.0 * count + grad_bytes, one_pass(dtype, True))
    for kind in ("fused", "foreach"):
        yield Row(f"torch {kind} fp32", 28.0 * count, torchs(kind, False))
        yield Row(f"torch {kind} fp32, clipped", 32.0 * count, torchs(kind, True))


def small_rows() -> Iterator[Row]:
    """The update of 80 small weights in a CUDA graph: together, and in a launch for each."""
    from steplab.kernels.adamw import update, update_all

    def captured(size: int, is_together: bool) -> Callable[[], Run]:
        def prepare() -> Run:
            weights = []
            for _ in range(80):
                master, avg, sq = (normal(size, dtype=torch.float32).abs_() for _ in range(3))
                step = torch.ones((), device="cuda")
                weights.append(ParameterState(normal(size), master, normal(size), avg, sq, step))
            lr = torch.tensor(1e-4, device="cuda", dtype=torch.float64)
            rule = Hyperparameters(0.9, 0.95, 1e-8, 0.1)

            def run() -> None:
                if is_together:
                    update_all("triton_update", weights, rule, lr)
                else:
                    for weight in weights:
                        update("triton_update", weight, rule, lr)

            run()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run()
            return graph.replay

        return prepare

    for size in (768, 8192, 65_536):
        for is_together, how in ((True, "together"), (False, "one by one")):
            yield Row(f"80 updates of {size}, {how}", 80 * 28.0 * size, captured(size, is_together))


def one_pass(dtype: torch.dtype, clipped: bool) -> Callable[[], Run]:
    """Return what prepares a step of our own optimizer."""

    def prepare() -> Run:
        weights = parameters(dtype)
        optimizer = OnePassAdamW(weights, lr=1e-4, weight_decay=0.1)

        def run() -> None:
            if clipped:
                optimizer.clip(weights, 1.0)
            optimizer.step()

        return run

    return prepare


def torchs(kind: str, clipped: bool) -> Callable[[], Run]:
    """Return what prepares a step of torch's AdamW."""

    def prepare() -> Run:
        weights = parameters(torch.float32)
        optimizer = torch.optim.AdamW(weights, lr=1e-4, weight_decay=0.1, **{kind: True})  # type: ignore[arg-type]

        def run() -> None:
            if clipped:
                torch.nn.utils.clip_grad_norm_(weights, 1.0)
            optimizer.step()

        return run

    return prepare


def tiling_rows() -> Iterator[list[Row]]:
    """The tilings of every kernel."""
    from steplab.kernels.adamw import triton_update as update
    from steplab.kernels.rms_norm import triton_norm as norm
    from steplab.kernels.rotary import triton_rotary as rotary

    def forward(tiling: norm.Tiling) -> Callable[[], Run]:
        def prepare() -> Run:
            x, y, weight = normal(ROWS, WIDTH), normal(ROWS, WIDTH), normal(WIDTH)
            return lambda: norm.launch_forward(x, y, weight, EPS, None, tiling)

        return prepare

    def backward(tiling: norm.Tiling) -> Callable[[], Run]:
        def prepare() -> Run:
            x, y, z, weight = *(normal(ROWS, WIDTH) for _ in range(3)), normal(WIDTH)
            rstd = torch.ones(ROWS, device="cuda")
            return lambda: norm.launch_backward(x, y, z, weight, rstd, tiling)

        return prepare

    def rotation(tile: int, warps: int) -> Callable[[], Run]:
        def prepare() -> Run:
            qkv, q = normal(BATCH, TOKENS, 3, HEADS, HEAD), normal(BATCH, TOKENS, HEADS, HEAD)
            cos = torch.rand(TOKENS, HEAD // 2, device="cuda")
            return lambda: rotary.launch_rotation(qkv[:, :, 0], q, cos, cos, 1, tile, warps)

        return prepare

    def one_weight(*shape: int) -> Callable[[], Run]:
        def prepare() -> Run:
            size = 8 * 3072 * WIDTH * 4
            master, avg, sq = (normal(size, dtype=torch.float32).abs_() for _ in range(3))
            step = torch.ones((), device="cuda")
            weight = ParameterState(normal(size), master, normal(size), avg, sq, step)
            lr, clip = torch.tensor([1e-4, 1.0], device="cuda", dtype=torch.float64)
            rule, clip = Hyperparameters(0.9, 0.95, 1e-8, 0.1), clip.float()
            return lambda: update.update(weight, rule, lr, clip, *shape)

        return prepare

    tiles = [(1, 1), (1, 2), (1, 4), (2, 4), (4, 4), (2, 8), (4, 8), (8, 8)]
    yield [Row(f"add + norm forward {t}", 4 * A, forward(norm.Tiling(*t))) for t in tiles]
    tiles4 = [
        *((1, 4, 8, 1), (1, 4, 8, 2), (1, 4, 16, 1), (1, 4, 4, 3), (2, 4, 6, 1), (2, 4, 4, 2)),
        *((4, 4, 3, 1), (4, 8, 3, 1), (1, 2, 10, 1), (1, 2, 8, 2), (1, 1, 16, 1), (1, 1, 12, 2)),
        *((2, 8, 4, 2), (1, 4, 32, 1), (2, 4, 3, 3), (2, 4, 4, 3)),
    ]
    yield [Row(f"norm backward {t}", 4 * A, backward(norm.Tiling(*t))) for t in tiles4]
    turns = [(256, 1), (512, 2), (512, 4), (1024, 4), (2048, 4), (2048, 8), (4096, 8)]
    yield [Row(f"rotation of one tensor {t}", 2 * A, rotation(*t)) for t in turns]
    shapes = [(512, 8, 4), (512, 1, 4), (512, 4, 4), (512, 32, 4), (1024, 4, 4), (1024, 4, 8)]
    shapes += [(2048, 4, 8), (256, 8, 2), (1024, 16, 8)]
    moved = 28.0 * 8 * 3072 * WIDTH * 4
    yield [Row(f"update of 75 M weights {t}", moved, one_weight(*t)) for t in shapes]


def check() -> None:
    """Compare the kernels with fp64 at a small shape; a wrong one must not get a time."""
    from steplab.testing.tolerance import assert_as_good_as

    x, y, weight = normal(500, WIDTH), normal(500, WIDTH), normal(WIDTH)
    ours, peer = (norm_op.rms_norm(i, x, weight, EPS, y)[0] for i in ("triton_norm", "reference"))
    wide = [t.double() for t in (x, weight, y)]
    truth = norm_op.rms_norm("reference", wide[0], wide[1], EPS, wide[2])[0]
    assert_as_good_as(ours, peer, truth, "norm")
    p, q = (torch.nn.Parameter(torch.ones(1000, device="cuda")) for _ in range(2))
    p.grad, q.grad = torch.ones(2, 1000, device="cuda").unbind()
    OnePassAdamW([p], lr=1e-2).step()
    torch.optim.AdamW([q], lr=1e-2).step()
    torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)
    print("norm and update agree with fp64 and torch")


def main() -> None:
    """Print the comparison, then the tilings."""
    exit_without_gpu(__file__)
    begin = time.monotonic()
    deadline = begin + (float(sys.argv[1]) if len(sys.argv) > 1 else 45.0)
    torch.manual_seed(0)
    print(torch.cuda.get_device_name(), torch.__version__)
    check()
    source = normal(4, ROWS, WIDTH)
    target = torch.empty_like(source)
    show(Row("copy", 8.0 * A, lambda: lambda: target.copy_(source)))
    parts = (norm_rows(""), rotary_rows(""), small_rows(), update_rows())
    for row in chain(*parts, norm_rows(COMPILED), rotary_rows(COMPILED)):
        if time.monotonic() < deadline:
            show(row)
    for group in tiling_rows():
        timed = [(show(row), row.name) for row in group if time.monotonic() < deadline]
        if timed:
            print(f"  best: {min(timed)[1]}\n", flush=True)
    print(f"{time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
