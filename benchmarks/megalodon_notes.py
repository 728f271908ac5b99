"""What Megalodon costs on one GPU: training steps, EMA paths, memory over length, streaming.

    PYTHONPATH=src python benchmarks/megalodon_notes.py [seconds]

Within 120 seconds; every row is printed as soon as it is there, and one that fails has its reason.
First mega200m at B4 L4096: in plain torch as ports of the original do it, then with the kernels of
this package, eagerly, compiled, and as one CUDA graph, each as a ratio to the first; and what the
kernels of the best step take. Then one token at a time, eagerly and replayed from a CUDA graph,
with the memory after 100,000 tokens; sums of split bf16 products on and off; peak memory over the
length with its exponent.
"""

from __future__ import annotations

import gc
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from steplab.cli.flags import exit_without_gpu

STREAMED = 100_000
PLAIN = "precision=bf16,impl.ema=fft_table,impl.timestep_norm=reference,impl.attention=reference"
BEST = "precision=bf16-weights,optimizer=one-pass,compile=blocks,cuda_graph=step"
STEPS = {
    "plain torch, eager": PLAIN,
    "eager": "precision=bf16",
    "best": BEST,
    "compiled": "precision=bf16,compile=blocks,optimizer=fused",
    "eager, fft": "precision=bf16,impl.ema=fft",
}
GIB = 2**30


def step_of(size: str, recipe: str, batch: int, length: int) -> tuple[Any, Any]:
    """Return a training step and its batches."""
    from steplab.core import RunSpec
    from steplab.step.assemble import assemble, micro_batches
    from steplab.techniques.recipes import parse_recipe
    from steplab.workloads.workload import find_workload

    config = find_workload("megalodon").resolve(size, {"context": length})
    spec = RunSpec(
        "megalodon", config, size, batch=batch, recipe=parse_recipe(recipe), device="cuda"
    )
    step = assemble(spec)
    return step, micro_batches(step, spec)


def step_ms(step: Any, batches: Any, warm: int = 3, timed: int = 8) -> float:
    """Return the median ms of a step, by device events."""
    import torch

    for _ in range(warm + step.parts.settle_steps):
        step(next(batches))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(timed + 1)]
    events[0].record()
    for event in events[1:]:
        step(next(batches))
        event.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events))


def trained(
    size: str, recipe: str, batch: int, length: int, profiled: bool = False
) -> tuple[float, float, str]:
    """Return ms per step, peak GiB, and the paths that ran; `profiled`: and the kernels."""
    import torch

    gc.collect()
    torch.cuda.empty_cache()
    start = time.monotonic()
    step, batches = step_of(size, recipe, batch, length)
    torch.cuda.reset_peak_memory_stats()
    ms = step_ms(step, batches)
    peak = torch.cuda.max_memory_allocated() / GIB
    ran = {getattr(m, "op", ""): m.ran for m in step.model.modules() if getattr(m, "ran", "")}
    paths = " ".join(f"{op}={impl}" for op, impl in sorted(ran.items()))
    paths += f"  ({time.monotonic() - start:.0f} s)"
    if profiled:
        paths += longest_kernels(step, batches)
    return ms, peak, paths


def longest_kernels(step: Any, batches: Any, shown: int = 14) -> str:
    """Return the kernels of one step that take longest, by name, and all others together."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    try:
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            step(next(batches))
            torch.cuda.synchronize()
    except Exception as problem:
        return f"\n  not profiled: {' '.join(str(problem).split())[:120]}"
    rows = sorted(found.key_averages(), key=lambda r: -r.device_time_total)
    lines = [
        f"{r.device_time_total / 1e3:8.3f} ms {r.count:5} x  {r.key[:90]}" for r in rows[:shown]
    ]
    rest = sum(r.device_time_total for r in rows[shown:]) / 1e3
    lines.append(f"{rest:8.3f} ms {sum(r.count for r in rows[shown:]):5} x  all others")
    return "".join(f"\n  {line}" for line in lines)


def row(name: str, run: Callable[[], str], deadline: float) -> None:
    """Print one row, whatever happens."""
    import torch

    if time.monotonic() > deadline:
        print(f"{name:44} no time left", flush=True)
        return
    try:
        print(f"{name:44} {run()}", flush=True)
    except Exception as problem:
        words = " ".join(str(problem).split())[:160]
        print(f"{name:44} {type(problem).__name__}: {words}", flush=True)
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()


def training_row(name: str, found: dict[str, float]) -> str:
    """Return the figures of one training step, MFU by the workload's own formula."""
    from steplab.workloads.workload import find_workload

    size, batch, length = "mega200m", 4, 4096
    ms, peak, paths = trained(size, STEPS[name], batch, length, profiled=name == "best")
    found[name] = ms
    entry = find_workload("megalodon")
    work = entry.open(entry.resolve(size, {"context": length})).work(batch, "full", {})
    assert work is not None and work.model is not None
    mfu = work.model / ms / 1e9 / 989.5  # the H200's dense bf16 peak, TFLOP/s
    speed = f"{ms:8.2f} ms {batch * length / ms * 1e3:10,.0f} tokens/s  MFU {mfu:.1%}"
    ratio = found.get(next(iter(STEPS)), math.nan) / ms
    return f"{speed}  peak {peak:6.2f} GiB  {ratio:.2f} times the first  {paths}"


def reductions_row(length: int) -> str:
    """Return the playbook model's step with sums of split bf16 products on and off, in turns."""
    from steplab.modules.precision import configure_precision

    step, batches = step_of("playbook", "precision=bf16", 2, length)
    found: dict[bool, list[float]] = {True: [], False: []}
    for on in (True, False) * 3:
        with configure_precision(allow_bf16_reduced_precision_reduction=on):
            found[on].append(step_ms(step, batches, timed=6))
    on_ms, off_ms = (statistics.median(found[on]) for on in (True, False))
    return f"on {on_ms:.3f} ms, off {off_ms:.3f} ms, off / on {off_ms / on_ms:.3f}"


def memory_row(ema: str, lengths: tuple[int, ...]) -> str:
    """Return peak memory over the length beyond the weights, and the exponent between the ends."""
    peaks = [trained("playbook", f"precision=bf16,impl.ema={ema}", 2, n)[1] for n in lengths]
    exponent = math.log(peaks[-1] / peaks[0]) / math.log(lengths[-1] / lengths[0])
    told = ", ".join(f"{n}: {peak:.3f}" for n, peak in zip(lengths, peaks, strict=True))
    return f"{told} GiB; exponent {exponent:.2f}"


def token_ms(stream: Any, token: Any, count: int) -> float:
    """Return the mean ms of a token."""
    import torch

    for _ in range(4):
        stream(token)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        stream(token)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / count * 1e3


def streaming(deadline: float) -> None:
    """Print one token at a time: eager, replayed, and the memory after many."""
    import torch

    from steplab.step.decode_step import DecodeStep, graphs_on
    from steplab.workloads.megalodon.config import PRESETS
    from steplab.workloads.megalodon.model import Megalodon
    from steplab.workloads.megalodon.streaming import Stream

    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Megalodon(PRESETS["mega200m"]).to(torch.bfloat16).eval()
        token = torch.zeros(1, 1, dtype=torch.int64)
    found: dict[str, float] = {}

    def measured(name: str, graphs: bool, count: int) -> str:
        step = DecodeStep(Stream(model, 1).step, graphs_on(token.device) if graphs else None)
        found[name] = token_ms(step, token, count)
        ratio = found["eager"] / found[name]
        return f"{found[name]:.3f} ms a token, {ratio:.2f} times eager"

    def many() -> str:
        """Pieces of 2048 tokens that end within a chunk, each followed by 35 single tokens."""
        stream, piece = Stream(model, 1), token.expand(1, 2048)
        step = DecodeStep(stream.step, graphs_on(token.device))

        def go_on() -> None:
            stream(piece)
            for _ in range(35):
                step(token)

        go_on()
        torch.cuda.synchronize()
        before, start = torch.cuda.memory_allocated(), time.perf_counter()
        while stream.tokens < STREAMED and time.monotonic() < deadline:
            go_on()
        torch.cuda.synchronize()
        grown = torch.cuda.memory_allocated() - before
        seconds, size = time.perf_counter() - start, stream.cache.nbytes / 2**20
        seen = f"{stream.tokens:,} tokens in {seconds:.1f} s"
        return f"{seen}, cache {size:.1f} MiB, grew {grown} bytes"

    with torch.inference_mode():
        row("stream mega200m bf16 batch 1, eager", lambda: measured("eager", False, 40), deadline)
        row("the same, CUDA graph", lambda: measured("graph", True, 400), deadline)
        row("the same, for long", many, deadline)


def main() -> None:
    """Print all rows."""
    import torch

    exit_without_gpu(__file__)
    begin = time.monotonic()
    deadline = begin + (float(sys.argv[1]) if len(sys.argv) > 1 else 115.0)
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    found: dict[str, float] = {}
    names = list(STEPS)
    for name in names[:3]:
        row(f"mega200m B4 L4096 {name}", lambda n=name: training_row(n, found), deadline)
    streaming(min(deadline, time.monotonic() + 25))
    for name in names[3:]:
        row(f"mega200m B4 L4096 {name}", lambda n=name: training_row(n, found), deadline)
    for ema in ("scan", "fft"):
        row(f"playbook memory, {ema}", lambda e=ema: memory_row(e, (512, 2048, 8192)), deadline)
    for length in (512, 2048):
        row(f"playbook L{length} bf16 sums", lambda n=length: reductions_row(n), deadline)
    for name, recipe in STEPS.items():
        print(f"{name}: {recipe}")
    print(f"{time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
