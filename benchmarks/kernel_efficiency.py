"""How fast kernels are: PYTHONPATH=src python benchmarks/kernel_efficiency.py --out FILE

`steplab estimate` knows a kernel's time from calls of the same operator on other sizes. Training
steps of some sizes run once on the card; every distinct call in them is repeated and timed there,
in a queue that is never empty, with the bytes that it needs beside its results. Then some matrix
products, the host's time per call on models so small that the host is the limit, and whole steps to
compare with. None of the sizes is one of estimate_truth.py. About three minutes on an H200.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from steplab.core import RunSpec
from steplab.core.codec import encode
from steplab.estimate.calls import Call, describe
from steplab.estimate.kernels import SHIPPED
from steplab.estimate.ledger import FREE, QUIET, Ledger
from steplab.parallel.silent import join_silent
from steplab.parallel.world import leave
from steplab.probes.environment import capture_environment
from steplab.step.assemble import assemble, micro_batches
from steplab.step.trial import clean_up, trial
from steplab.techniques.recipes import parse_recipe
from steplab.workloads.workload import requested_workload

OWN = str(Path(__file__).parent / "plain_transformer.py") + ":make"
PLAIN, BF16 = "plain", "precision=bf16,optimizer=fused"
WEIGHTS = "precision=bf16-weights,optimizer=one-pass"
GPT = [  # width, inner width, heads, tokens, vocabulary; batch
    ({"width": 896, "ff_width": 3584, "heads": 14, "context": 768, "vocab_size": 12_000}, 12),
    ({"width": 1280, "ff_width": 5120, "heads": 20, "context": 2048, "vocab_size": 8_000}, 8),
    ({"width": 640, "ff_width": 2560, "heads": 10, "context": 512, "vocab_size": 12_000}, 48),
]
TSMOE = [
    ({"hidden_size": 640, "n_head": 10, "d_ff": 2560, "d_expert": 2560, "seq_max_len": 2048}, 16),
    ({"hidden_size": 896, "n_head": 14, "d_ff": 3584, "d_expert": 3584, "seq_max_len": 3072}, 8),
    ({"hidden_size": 512, "n_head": 8, "d_ff": 2048, "d_expert": 512, "seq_max_len": 2048}, 12),
]
MINE = [
    ({"width": 640, "heads": 10, "context": 1536, "vocabulary": 12_000}, 16),
    ({"width": 1152, "heads": 18, "context": 768, "vocabulary": 20_000}, 12),
]
LAYERS = {"gpt": "layers", "tsmoe": "n_decoder_layers", OWN: "layers"}
TINY: dict[str, dict[str, Any]] = {
    "gpt": {"width": 128, "ff_width": 512, "heads": 2, "context": 64, "layers": 6},
    "tsmoe": {"hidden_size": 128, "n_head": 2, "d_ff": 256, "d_expert": 256, "seq_max_len": 256},
    OWN: {"width": 128, "heads": 2, "context": 64, "layers": 6},
}
ROWS = (1536, 6144, 24_576, 98_304)
FACTORS = (
    *((512, 512), (640, 2560), (2560, 640), (1536, 1536), (3584, 896), (1280, 5120)),
    *((5120, 1280), (12_288, 1152), (1152, 12_288), (6144, 6144)),
)
QUEUE_CYCLES = 2_000_000  # about a millisecond, in which the host fills the queue
HOST_STEPS = 12
DEVICE = "cuda"
LONG_US = 20_000.0  # calls that take longer are repeated less


class TimedCalls(TorchDispatchMode):
    """Runs ops, and repeats those that it has not seen in this size."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.points: dict[Call, tuple[float, int]] = {}  # us, scratch bytes
        self.is_inside = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run, describe, and time where it is new."""
        kwargs = dict(kwargs or {})
        is_op = isinstance(func, torch._ops.OpOverload) and func.namespace not in QUIET
        if self.is_inside or not is_op or func._overloadpacket.__name__ in FREE:
            return func(*args, **kwargs)
        with self.inside():
            out = func(*args, **kwargs)
            leaves = torch.utils._pytree.tree_leaves((args, kwargs, out))
            if any(isinstance(t, torch.Tensor) and t.device.type == DEVICE for t in leaves):
                call = describe(func, args, kwargs, out)
                if call not in self.points:
                    self.points[call] = measure(lambda: func(*args, **kwargs))
        return out

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Leave alone what an op does inside."""
        before, self.is_inside = self.is_inside, True
        try:
            yield
        finally:
            self.is_inside = before

    @contextlib.contextmanager
    def triton_too(self) -> Iterator[None]:
        """Time kernels that are launched outside any op."""
        from triton.runtime.jit import JITFunction

        run = JITFunction.run
        ledger = Ledger()

        def timed(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            done = run(kernel, *args, **kwargs)
            if not self.is_inside:
                ledger.launched(kernel.fn.__name__, args)
                call = ledger.entries[-1].call  # type: ignore[union-attr]
                if call not in self.points:
                    self.points[call] = measure(lambda: run(kernel, *args, **kwargs))
            return done

        JITFunction.run = timed
        try:
            yield
        finally:
            JITFunction.run = run


def measure(call: Any) -> tuple[float, int]:
    """Return microseconds on the device and the bytes that are needed beside the results."""
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    out = call()
    scratch = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
    del out
    torch.cuda.synchronize()
    us, repeats = 0.0, 2
    while True:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(QUEUE_CYCLES)
        begin.record()
        for _ in range(repeats):
            call()
        end.record()
        end.synchronize()
        us = begin.elapsed_time(end) * 1e3 / repeats
        if repeats > 2 or us > LONG_US:
            return us, scratch
        repeats = 10


def spec_of(workload: str, config: dict[str, Any], batch: int, recipe: str, **more: Any) -> RunSpec:
    """Return a spec on the card."""
    entry = requested_workload(workload)
    size = "small" if workload in ("gpt", "tsmoe") else ""
    resolved = entry.resolve(size, config)
    return RunSpec(
        entry.name, resolved, size, batch=batch, recipe=parse_recipe(recipe), device="cuda",
        source=entry.source, warmup=3, steps=8, **more,
    )  # fmt: skip


def time_calls() -> dict[Call, tuple[float, int]]:
    """Run two layers of every size once with every recipe, under the timer."""
    timer = TimedCalls()
    cells = itertools.chain(
        itertools.product(["gpt"], GPT), itertools.product(["tsmoe"], TSMOE),
        itertools.product([OWN], MINE),
    )  # fmt: skip
    for (workload, (config, batch)), recipe in itertools.product(cells, (PLAIN, BF16, WEIGHTS)):
        spec = spec_of(workload, {**config, LAYERS[workload]: 2}, batch, recipe)
        print(f"{spec.title} {recipe}", flush=True)
        step = assemble(spec)
        feed = micro_batches(step, spec)
        step(next(feed))
        before = time.perf_counter()
        with timer.triton_too(), timer:
            step(next(feed))
        torch.cuda.synchronize()
        del step, feed
        clean_up()
        print(f"{spec.title} {recipe}: {len(timer.points)} calls, "
              f"{time.perf_counter() - before:.1f} s", flush=True)  # fmt: skip
    with timer:
        for dtype, rows, (n, k) in itertools.product(
            (torch.bfloat16, torch.float32), ROWS, FACTORS
        ):
            if dtype == torch.float32 and rows * n * k > 2e11:
                continue
            x, w = (torch.randn(s, k, device="cuda", dtype=dtype) for s in (rows, n))
            torch.mm(x, w.t())
            torch.mm(torch.randn(n, rows, device="cuda", dtype=dtype), x)  # a weight's gradient
    return timer.points


def time_host() -> list[dict[str, Any]]:
    """Return the host's time in every phase of steps that are too small for the device."""
    eager = (PLAIN, BF16, WEIGHTS, f"{BF16},checkpointing=blocks", f"{BF16},parallel=fsdp")
    cells = [*itertools.product(TINY, eager), ("gpt", f"{BF16},compile=blocks")]
    found = []
    for workload, recipe in cells:
        try:
            found.append(host_time(workload, recipe))
        except Exception as error:  # one that cannot run is left out, the others count
            print(f"{workload} {recipe}: {error}", flush=True)
        finally:
            leave()
            clean_up()
    return found


def host_time(workload: str, recipe: str) -> dict[str, Any]:
    """Return the host's time in every phase of a small step, alone or as rank 0 of 8."""
    ranks = 8 if "parallel" in recipe else 1
    if ranks > 1:
        join_silent(ranks)
    spec = spec_of(workload, TINY[workload], 2, recipe, ranks=ranks)
    step = assemble(spec)
    feed = micro_batches(step, spec)
    phases: dict[str, list[float]] = {}

    @contextlib.contextmanager
    def watch(phase: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        phases.setdefault(phase, []).append(time.perf_counter() - begin)

    for _ in range(6):
        step(next(feed))
    torch.cuda.synchronize()
    step.watch = watch
    begin = time.perf_counter()
    for _ in range(HOST_STEPS):
        step(next(feed))
    torch.cuda.synchronize()
    whole = (time.perf_counter() - begin) / HOST_STEPS
    return {
        "spec": encode(spec),
        "step_ms": whole * 1e3,
        "phases_ms": {name: statistics.median(values) * 1e3 for name, values in phases.items()},
    }


def whole_steps() -> list[dict[str, Any]]:
    """Return steps of six layers, measured as `bench` does, to compare estimates with."""
    found = []
    cells = [("gpt", *GPT[0]), ("tsmoe", *TSMOE[1]), (OWN, *MINE[1])]
    checkpointed, compiled = (f"{BF16},{more}=blocks" for more in ("checkpointing", "compile"))
    recipes = (PLAIN, BF16, WEIGHTS, checkpointed, compiled)
    for (workload, config, batch), recipe in itertools.product(cells, recipes):
        spec = spec_of(workload, {**config, LAYERS[workload]: 6}, batch, recipe)
        run = trial(spec)
        if run.clock is None or run.memory is None:
            print(f"{spec.title} {recipe}: {run.status} {run.reason}", flush=True)
            continue
        found.append({
            "spec": encode(spec), "step_ms": run.clock.step.median,
            "host_ms": run.clock.host.median, "peak": run.memory.peak,
            "phases_ms": {n: s.median for n, s in run.clock.phases.items()},
            "reserved": run.memory.reserved, "before": run.memory.before,
            "busy_ms": run.ran.device_busy_ms if run.ran else None,
            "kernels": len(run.ran.kernels) if run.ran else None,
            "launches": run.ran.kernel_launches if run.ran else None,
        })  # fmt: skip
        print(f"{spec.title} {recipe}: {run.clock.step.median:.1f} ms", flush=True)
    return found


def workspace() -> int:
    """Return the bytes that libraries keep for themselves after products on both threads."""
    before = torch.cuda.memory_allocated()
    x = torch.randn(512, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    held = x.nbytes
    (x @ x).sum().backward()
    torch.cuda.synchronize()
    x.grad = None
    return torch.cuda.memory_allocated() - before - held


# Microseconds of the host, by hand from the part "host" and the calls that `estimate` counts in the
# same steps: what an operator of torch needs, what one of ours needs more, what a phase needs once.
HOST_US = {
    "forward": 15.0,
    "forward own": 560.0,
    "backward": 18.0,
    "backward own": 400.0,
    "clip": 14.0,
    "clip base": 800.0,
    "optimizer": 17.0,
    "optimizer own": 70.0,
    "optimizer base": 500.0,
    "sync": 15.0,
    "compiled": 35.0,
    "graph": 1000.0,
    "checkpointed": 20.0,
    "collective": 700.0,
}


def ship(measured: Path) -> None:
    """Write the file that comes with steplab from one that was measured."""
    data = json.loads(measured.read_text())
    card = data["environment"]["accelerators"][0]
    versions = f"CUDA {data['environment']['cuda']}, torch {data['environment']['torch']}"
    calls = [
        [kind, [round(x, 3) for x in size], flops, moved, round(us, 2), scratch]
        for kind, size, flops, moved, us, scratch in data["calls"]
        if not kind.startswith("randn")
    ]
    shipped = {
        "conditions": f"{card['name']} at {card['power_limit_w']:.0f} W, {versions}",
        "workspace_bytes": data["workspace_bytes"],
        "host_us": HOST_US,
    }
    lines = ",\n".join(json.dumps(call, separators=(",", ":")) for call in calls)
    head = json.dumps(shipped)[:-1]
    SHIPPED.write_text(f'{head}, "calls": [\n{lines}\n]}}\n', encoding="utf-8")


def main() -> None:
    """Measure and write; every part is written as soon as it is there."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="a .json file")
    parser.add_argument("--ship", action="store_true", help="--out is measured: ship it")
    args = parser.parse_args()
    if args.ship:
        ship(args.out)
        return
    if not torch.cuda.is_available():
        sys.exit("kernel_efficiency.py: there is no GPU here.")
    data: dict[str, Any] = {"environment": encode(capture_environment())}
    data["workspace_bytes"] = workspace()
    parts = {"calls": time_calls, "steps": whole_steps, "host": time_host}
    for name, part in parts.items():
        begin = time.perf_counter()
        found = part()
        if isinstance(found, dict):
            found = [
                [c.kind, [round(x, 4) for x in c.size], c.flops, c.bytes, round(us, 3), scratch]
                for c, (us, scratch) in found.items()
            ]
        data[name] = found
        args.out.write_text(json.dumps(data))
        print(f"{name}: {time.perf_counter() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
