"""Head and loss on one GPU: the parts, then the whole beside full logits; about a minute.

    PYTHONPATH=src python benchmarks/loss_kernels.py [tokens width vocabulary [chunks]]

Parts: the products as the chunked losses call them, with the vocabulary as it is and cut to a
multiple of 8, in rows that begin at multiples of 64 elements and in rows that do not; the row
kernels. Whole: forward + backward of a mean, milliseconds and peak memory beyond the inputs (the
gradients are part of it), over the number of chunks; with the word `chunks` nothing but these, of
one implementation. A case that fails is a row with its reason.
"""

from __future__ import annotations

import gc
import math
import statistics
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from steplab.cli.flags import exit_without_gpu
from steplab.kernels import cross_entropy as op
from steplab.kernels.cross_entropy import _chunks, triton_chunked

T, D, V = (int(word) for word in sys.argv[1:4]) if len(sys.argv) > 3 else (16_384, 768, 50_257)
ONLY_CHUNKS = sys.argv[4:] == ["chunks"]
WHOLE_V, PADDED_V = V // 8 * 8, -(-V // 64) * 64
REPEATS = 7
MIB = 2**20
FP32, BF16 = torch.float32, torch.bfloat16
FLOPS, BYTES = "TFLOP/s", "TB/s"
aten = torch.ops.aten
WIDE_MM, WIDE_ADD, WIDE_BMM = aten.mm.dtype_out, aten.addmm.dtype_out, aten.bmm.dtype_out


def normal(*shape: int) -> Tensor:
    """Return random bf16 values on the GPU."""
    return torch.randn(shape, device="cuda", dtype=BF16)


def zeros(*shape: int) -> Tensor:
    """Return fp32 zeros on the GPU."""
    return torch.zeros(shape, device="cuda")


def milliseconds(call: Callable[[], Any]) -> float:
    """Return the median of some calls, each between two events."""
    for _ in range(2):
        call()
    pairs = []
    for _ in range(REPEATS):
        pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        pair[0].record()
        call()
        pair[1].record()
        pairs.append(pair)
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(end) for start, end in pairs)


def row(name: str, work: float, unit: str, function: Any, *args: Any, **options: Any) -> None:
    """Time one part and print its line; `work` is FLOPs or bytes."""
    try:
        ms = milliseconds(lambda: function(*args, **options))
    except Exception as error:
        print(f"{name:58} failed: {str(error).splitlines()[0][:90]}")
        return
    print(f"{name:58} {ms:8.3f} ms  {work / ms / 1e9:8.2f} {unit}", flush=True)


def products_by_tokens(rows: int) -> None:
    """Time the three products of a chunk of tokens, by alignment of the vocabulary and of rows."""
    x, w, dx, short, dw = (
        normal(rows, D),
        normal(V, D),
        zeros(rows, D),
        normal(rows, D),
        zeros(V, D),
    )
    for columns, step in ((V, V), (V, PADDED_V), (WHOLE_V, PADDED_V)):
        z, w_c, dw_c = normal(rows, step)[:, :columns], w[:columns], dw[:columns]
        flops, label = 2.0 * rows * columns * D, f"{rows} x {columns}, rows of {step}"
        row(f"logits {label}", flops, FLOPS, torch.mm, x, w_c.T, out=z)
        row(f"dx, fp32 out {label}", flops, FLOPS, WIDE_MM, z, w_c, FP32, out=dx)
        row(f"dx, bf16 out {label}", flops, FLOPS, torch.mm, z, w_c, out=short)
        row(f"dw, added in fp32 {label}", flops, FLOPS, WIDE_ADD, dw_c, z.T, x, FP32, out=dw_c)
    for splits in (2, 4, 8):
        part = V // splits // 64 * 64
        z = normal(rows, PADDED_V)[:, : part * splits].unflatten(1, (splits, part)).transpose(0, 1)
        parts, flops = w[: part * splits].unflatten(0, (splits, part)), 2.0 * z.numel() * D
        sums = zeros(splits, rows, D)
        row(f"dx of {rows} in {splits} parts", flops, FLOPS, WIDE_BMM, z, parts, FP32, out=sums)


def products_by_words(words: int) -> None:
    """Time the three products of a chunk of words."""
    x, w, z, dx, dw = normal(T, D), normal(words, D), normal(T, words), zeros(T, D), zeros(words, D)
    flops, label = 2.0 * z.numel() * D, f"of {words} words"
    row(f"logits {label}", flops, FLOPS, torch.mm, x, w.T, out=z)
    row(f"dx, added in fp32 {label}", flops, FLOPS, WIDE_ADD, dx, z, w, FP32, out=dx)
    row(f"dw, fp32 out {label}", flops, FLOPS, WIDE_MM, z.T, x, FP32, out=dw)


def row_kernels(rows: int, words: int) -> None:
    """Time the kernels between the products: bytes are one read and one write of the logits."""
    targets, norms, losses = torch.randint(V, (T,), device="cuda"), zeros(2, T), zeros(T)
    z, few = normal(rows, PADDED_V)[:, :V], normal(T, words)
    part, loss = (targets[:rows], -100, losses[:rows], norms[:, :rows]), triton_chunked.loss
    for columns in (2048, 4096, 8192):
        label = f"of {rows} rows, {columns} columns at a time"
        row(f"loss {label}", 2.0 * z.numel(), BYTES, loss, z, *part, None, columns)
        row(f"and gradient {label}", 4.0 * z.numel(), BYTES, loss, z, *part, zeros(1), columns)
    known = (targets, -100, norms, 0, losses)
    row(
        f"gradient of {words} words",
        4.0 * few.numel(),
        BYTES,
        triton_chunked.gradient,
        few,
        *known,
    )


def whole(function: Callable[..., Any], weight_dtype: torch.dtype) -> tuple[float, float]:
    """Return milliseconds and MiB of forward + backward of a mean."""
    x = normal(T, D).requires_grad_()
    w = torch.randn(V, D, device="cuda").div_(D**0.5).to(weight_dtype).requires_grad_()
    targets = torch.randint(V, (T,), device="cuda")

    def step() -> Any:
        return torch.autograd.grad(function(x, w, targets), (x, w))

    ms = milliseconds(step)
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return ms, (torch.cuda.max_memory_allocated() - before) / MIB


def by(impl: str) -> Callable[..., Any]:
    """Return the mean loss by one implementation."""
    return lambda x, w, targets: op.cross_entropy(impl, x, w, targets)


def wholes(weight_dtype: torch.dtype) -> None:
    """Compare everything with full logits under torch.compile."""
    gradients = (T * D * 2 + V * D * weight_dtype.itemsize) / MIB
    print(f"\nmean, forward + backward, weight in {weight_dtype}; gradients: {gradients:.0f} MiB")
    compiled = torch.compile(by("reference"), fullgraph=True, dynamic=False)
    tokens, words = "TOKEN_CHUNKS", "VOCABULARY_CHUNKS"
    cases: list[tuple[str, Any, str, int]] = [("full logits, compiled", compiled, "", 0)]
    cases += [("triton_chunked", by("triton_chunked"), tokens, n) for n in (1, 2, 4, 6, 8, 12, 16)]
    if not ONLY_CHUNKS:
        cases += [("full logits", by("reference"), "", 0)]
        cases += [("chunked", by("chunked"), tokens, _chunks.TOKEN_CHUNKS)]
        cases += [("triton_lean", by("triton_lean"), words, n) for n in (16, 24, 32, 40, 56)]
    _chunks.MAX_TOKEN_BYTES = 2 * T * PADDED_V  # as few chunks as asked for
    _chunks.TILES = 0  # and as many
    base_ms = base_mib = math.nan
    for name, function, setting, chunks in cases:
        label, usual = name, getattr(_chunks, setting) if setting else 0
        if setting:
            label = f"{name}, {chunks} chunks"
            setattr(_chunks, setting, chunks)
        try:
            ms, mib = whole(function, weight_dtype)
        except Exception as error:
            print(f"{label:58} failed: {str(error).splitlines()[0][:90]}", flush=True)
            continue
        finally:
            if setting:
                setattr(_chunks, setting, usual)
        if function is compiled:
            base_ms, base_mib = ms, mib
        less = (mib - gradients) / (base_mib - gradients)
        ratios = f"{ms / base_ms:6.3f} x time  {mib / base_mib:6.3f} x memory"
        shown = f"{ms:8.3f} ms {mib:8.1f} MiB {ratios} {less:6.3f} x without gradients"
        print(f"{label:36} {shown}", flush=True)


def main() -> None:
    """Print all tables."""
    exit_without_gpu(__file__)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, T {T} D {D} V {V}, bf16")
    rows, words = _chunks.chunk_rows(T, 2 * PADDED_V, D), _chunks.chunk_words(V, 2 * T)
    for weight_dtype in (BF16, FP32):
        torch._dynamo.reset()
        wholes(weight_dtype)
    if ONLY_CHUNKS:
        return
    print()
    products_by_tokens(rows)
    products_by_tokens(2 * rows)
    products_by_words(words)
    row_kernels(rows, words)


if __name__ == "__main__":
    main()
