"""Sweeps the tilings of the Triton attention on one GPU and prints a table; about two minutes.

    PYTHONPATH=src python benchmarks/attention_tiles.py [seconds]

First every candidate is compiled by a worker process and checked against fp64 at a small shape;
then one worker times those that are right at B16 H12 T4096, causal, bf16, beside torch's kernels.
A candidate that fails, hangs or comes too late is a row with its reason.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import queue
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from steplab.cli.flags import exit_without_gpu

BATCH, HEADS, LENGTH = 16, 12, 4096
WORKERS = min(13, os.cpu_count() or 1)
PRODUCTS = {"forward": 2, "dq": 3, "dkdv": 4}  # matrix products that each kernel executes
PEERS = ("cudnn", "flash", "efficient", "flex")
# rows,columns,warps,stages; then "ptr" for loads by pointers, "rN" for at most N registers
CANDIDATES = {
    (64, "forward"): """
        128,64,4,2 128,64,4,3 128,64,4,4 128,64,4,3,r168 128,32,4,3 128,32,4,4 64,64,4,2 64,64,4,3
        64,128,4,2 64,128,4,3 128,64,8,2 128,64,8,3 128,128,8,2 128,128,8,3 128,128,4,2 256,64,8,2
        256,64,8,3 256,32,8,3 128,64,4,3,ptr 128,64,8,3,ptr 64,64,4,3,ptr""",
    (64, "dq"): """
        64,32,4,3 64,64,4,2 64,64,4,3 64,64,4,2,r128 64,128,4,2 128,32,4,2 128,32,4,3 128,64,4,2
        128,32,8,2 128,32,8,3 128,64,8,2 128,64,8,3 128,64,8,2,r128 128,128,8,2 256,32,8,2
        64,64,4,2,ptr 128,64,8,2,ptr""",
    (64, "dkdv"): """
        64,32,4,2 64,32,4,3 64,64,4,2 64,64,4,3 64,64,4,2,r168 128,32,4,2 128,32,8,2 128,32,8,3
        128,64,8,2 128,64,8,3 256,32,8,2 64,64,4,2,ptr 128,64,8,2,ptr""",
    (128, "forward"): """
        64,64,4,2 64,64,4,3 64,128,4,2 128,32,4,2 128,32,4,3 128,64,4,2 128,32,8,3 128,64,8,2
        128,64,8,3 128,128,8,2 256,32,8,2 128,64,8,2,ptr 128,128,8,2,ptr""",
    (128, "dq"): """
        64,32,4,2 64,64,4,2 64,64,4,3 128,32,8,2 128,32,8,3 128,64,8,2 128,64,8,3 128,128,8,2
        128,64,8,2,ptr""",
    (128, "dkdv"): """
        64,32,4,2 64,32,4,3 64,64,4,2 128,32,8,2 128,32,8,3 128,64,8,2 128,64,8,3
        128,64,8,2,ptr""",
}
REPLY = "@@"  # marks a worker's answer among whatever else is printed there


def tflops(width: int, products: float, ms: float) -> float:
    """TFLOP/s of `products` matrix products over the visible pairs."""
    pairs = BATCH * HEADS * LENGTH * (LENGTH + 1) / 2
    return products * 2.0 * width * pairs / ms / 1e9


# ---- the worker's side: torch lives here -------------------------------------------------------


def tiling_of(text: str) -> Any:
    """Read one candidate."""
    from steplab.kernels.attention.triton_flash import Tiling

    words = text.split(",")
    rows, columns, warps, stages = map(int, words[:4])
    limit = next((int(word[1:]) for word in words if word.startswith("r")), None)
    return Tiling(rows, columns, warps, stages, "ptr" not in words, limit)


def make(width: int, batch: int, heads: int, length: int) -> list[Any]:
    """Return q, k, v and d_out, (B, H, T, D); in memory (B, T, H, D), as projections give them."""
    import torch

    torch.manual_seed(0)
    shape = (batch, length, heads, width)
    return [
        torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(4)
    ]


def reference(q: Any, k: Any, v: Any, d_out: Any, dtype: Any) -> tuple[Any, ...]:
    """Return out, lse in bits, dq, dk and dv by the definition in `dtype`."""
    import torch

    from steplab.kernels import attention as op

    leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
    out = op.attention("reference", *leaves, True)
    gradients = torch.autograd.grad(out, leaves, d_out.to(dtype))
    scores = leaves[0].detach() @ leaves[1].detach().mT / math.sqrt(q.shape[-1])
    hidden = torch.ones_like(scores[0, 0], dtype=torch.bool).triu(1)
    lse = scores.masked_fill(hidden, -math.inf).logsumexp(-1) * math.log2(math.e)
    return out.detach(), lse, *gradients


def error(actual: Any, truth: Any) -> float:
    """Relative error in the Frobenius norm."""
    return float((actual.double() - truth).norm() / truth.norm())


class Bench:
    """What a worker can do; inputs are made once per head width."""

    def __init__(self) -> None:
        self.small: dict[int, Any] = {}
        self.large: dict[int, Any] = {}

    def call(self, width: int, kernel: str, tiling: str, inputs: tuple[Any, ...]) -> Any:
        """Launch one kernel; `inputs` are q, k, v, d_out, out, lse and delta."""
        from steplab.kernels.attention import triton_flash as launch

        q, k, v, d_out, out, lse, delta = inputs
        mask = (True, None, None)
        chosen = tiling_of(tiling)
        if kernel == "forward":
            return launch.forward_by(chosen, q, k, v, *mask)
        if kernel == "dq":
            return launch.dq_by(chosen, d_out, q, k, v, out, lse, *mask)
        return launch.dkdv_by(chosen, d_out, q, k, v, lse, delta, *mask)

    def check(self, width: int, kernel: str, tiling: str) -> dict[str, Any]:
        """Compile, run at T 384 and compare with fp64; the budget is twice bf16's own error."""
        import torch

        if width not in self.small:
            q, k, v, d_out = make(width, 1, 2, 384)
            truth = reference(q, k, v, d_out, torch.float64)
            peer = reference(q, k, v, d_out, torch.bfloat16)
            out = truth[0].bfloat16().transpose(1, 2).contiguous().transpose(1, 2)
            delta = (out.double() * d_out.double()).sum(-1).float()
            inputs = (q, k, v, d_out, out, truth[1].float().contiguous(), delta)
            self.small[width] = inputs, truth, peer
        inputs, truth, peer = self.small[width]
        slots = {"forward": (0,), "dq": (2,), "dkdv": (3, 4)}[kernel]
        results = self.call(width, kernel, tiling, inputs)
        torch.cuda.synchronize()
        pairs = list(zip(slots, results, strict=False))
        worst = max(error(result, truth[slot]) for slot, result in pairs)
        budget = 2 * max(error(peer[slot], truth[slot]) for slot in slots)
        right = math.isfinite(worst) and worst <= budget
        return {"status": "ok" if right else "WRONG", "error": worst}

    def full(self, width: int) -> tuple[Any, ...]:
        """Return the inputs of the timed shape."""
        from steplab.kernels.attention import triton_flash as launch

        if width not in self.large:
            self.large.clear()
            q, k, v, d_out = make(width, BATCH, HEADS, LENGTH)
            out, lse = launch.launch_forward(q, k, v, True, None, None)
            _, delta = launch.dq_by(
                launch.tilings(q).dq, d_out, q, k, v, out, lse, True, None, None
            )
            self.large[width] = (q, k, v, d_out, out, lse, delta)
        return self.large[width]

    def time(self, width: int, kernel: str, tiling: str) -> dict[str, Any]:
        """Time one kernel at the full shape."""
        inputs = self.full(width)
        return {"status": "ok", "ms": clock(lambda: self.call(width, kernel, tiling, inputs))}

    def peer(self, width: int, name: str) -> dict[str, Any]:
        """Time one attention of torch, or our op as a user calls it, forward and backward."""
        import torch

        q, k, v, d_out = self.full(width)[:4]
        run = attention_by(name)
        with torch.no_grad():
            forward = clock(lambda: run(q, k, v))
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = run(*leaves)
        backward = clock(lambda: torch.autograd.grad(out, leaves, d_out, retain_graph=True))
        return {"status": "ok", "forward": forward, "backward": backward}

    def errors(self, width: int, name: str) -> dict[str, Any]:
        """Compare out, dq, dk and dv with fp64 at T 4096, two heads."""
        import torch

        q, k, v, d_out = make(width, 1, 2, LENGTH)
        truth = reference(q, k, v, d_out, torch.float64)
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = attention_by(name)(*leaves)
        found = [out, *torch.autograd.grad(out, leaves, d_out)]
        expected = [truth[0], *truth[2:]]
        return {
            "status": "ok",
            "errors": [error(a.detach(), b) for a, b in zip(found, expected, strict=True)],
        }


def attention_by(name: str) -> Callable[..., Any]:
    """Return causal attention over q, k and v by the implementation named, or FlexAttention."""
    if name != "flex":
        from steplab.kernels import attention as op

        return lambda q, k, v: op.attention(name, q, k, v, True)
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled = torch.compile(flex_attention)
    block_masks: dict[int, Any] = {}

    def run(q: Any, k: Any, v: Any) -> Any:
        T = q.shape[2]
        if T not in block_masks:
            block_masks[T] = create_block_mask(lambda b, h, i, j: i >= j, None, None, T, T)
        return compiled(q, k, v, block_mask=block_masks[T])

    return run


def clock(run: Callable[[], Any]) -> float:
    """Return the median of 11 calls in ms, by device events."""
    import torch

    for _ in range(3):
        run()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(12)]
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(events))


def serve() -> None:
    """Answer tasks, one JSON line each, until the input ends or the device is beyond repair."""
    bench = Bench()
    for line in sys.stdin:
        task = json.loads(line)
        try:
            reply = getattr(bench, task.pop("do"))(**task)
        except Exception as problem:
            words = " ".join(str(problem).split())
            reply = {"status": f"{type(problem).__name__}: {words[-100:]}"}
        print(REPLY + json.dumps(reply), flush=True)
        if "CUDA error" in reply["status"] or "illegal" in reply["status"]:
            return


# ---- the caller's side -------------------------------------------------------------------------


class Worker:
    """A child process that answers tasks; one that hangs or dies is replaced at the next task."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None
        self.replies: queue.Queue[str] = queue.Queue()

    def start(self) -> subprocess.Popen[str]:
        """Start the child and a thread that reads from it."""
        self.replies = queue.Queue()
        process = subprocess.Popen(
            [sys.executable, __file__, "--worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        replies = self.replies

        def read() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith(REPLY):
                    replies.put(line[len(REPLY) :])
            replies.put(json.dumps({"status": "the worker died"}))

        threading.Thread(target=read, daemon=True).start()
        return process

    def ask(self, task: dict[str, Any], timeout: float) -> dict[str, Any]:
        """Return the answer to one task, whatever happens."""
        if timeout <= 0:
            return {"status": "no time left"}
        if self.process is None or self.process.poll() is not None:
            self.process = self.start()
        try:
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps(task) + "\n")
            self.process.stdin.flush()
            reply: dict[str, Any] = json.loads(self.replies.get(timeout=timeout))
            return reply
        except queue.Empty:
            self.close()
            return {"status": f"no answer in {timeout:.0f} s"}
        except OSError as problem:
            self.close()
            return {"status": str(problem)}

    def close(self) -> None:
        """End the child."""
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


def in_parallel(tasks: list[dict[str, Any]], deadline: float) -> list[dict[str, Any]]:
    """Ask many workers; return the answers in the order of the tasks."""
    answers: list[dict[str, Any]] = [{"status": "no time left"} for _ in tasks]
    waiting: queue.Queue[int] = queue.Queue()
    for number in range(len(tasks)):
        waiting.put(number)

    def drain() -> None:
        worker = Worker()
        while time.monotonic() < deadline:
            try:
                number = waiting.get_nowait()
            except queue.Empty:
                break
            answers[number] = worker.ask(tasks[number], min(45, deadline - time.monotonic()))
        worker.close()

    threads = [threading.Thread(target=drain) for _ in range(min(WORKERS, len(tasks)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def print_kernels(rows: list[dict[str, Any]]) -> None:
    """Print one line per candidate, the fastest of each kernel first."""
    print(f"\n{'D':>4} {'kernel':8} {'tiling':20} {'ms':>7} {'TFLOP/s':>8} {'error':>8}  status")
    for width, kernel in CANDIDATES:
        group = [r for r in rows if (r["width"], r["kernel"]) == (width, kernel)]
        for r in sorted(group, key=lambda r: r.get("ms", math.inf)):
            ms, wrong = r.get("ms"), r.get("error")
            speed = f"{ms:7.3f} {tflops(width, PRODUCTS[kernel], ms):8.0f}" if ms else " " * 16
            seen = f"{wrong:8.1e}" if wrong is not None else " " * 8
            print(f"{width:4} {kernel:8} {r['tiling']:20} {speed} {seen}  {r['status']}")


def print_whole(width: int, worker: Worker, rows: list[dict[str, Any]], end: float) -> None:
    """Print our op by its table, the best tilings together, and torch's kernels beside them."""
    best = {}
    for kernel in PRODUCTS:
        timed = [r for r in rows if (r["width"], r["kernel"]) == (width, kernel) and "ms" in r]
        if timed:
            best[kernel] = min(timed, key=lambda r: r["ms"])
    print(f"\nD {width}: forward ms, backward ms, TFLOP/s (2 and 5 products), errors out dq dk dv")
    if len(best) == len(PRODUCTS):
        forward, backward = best["forward"]["ms"], best["dq"]["ms"] + best["dkdv"]["ms"]
        names = " | ".join(f"{kernel} {row['tiling']}" for kernel, row in best.items())
        print(f"  {'best tilings':14} {forward:7.3f} {backward:7.3f}   {names}")
    for name in ("triton_flash", *PEERS):
        task = {"width": width, "name": name}
        clocked = worker.ask({"do": "peer", **task}, min(40, end - time.monotonic()))
        if clocked["status"] != "ok":
            print(f"  {name:14} {clocked['status']}")
            continue
        a, b = clocked["forward"], clocked["backward"]
        seen = worker.ask({"do": "errors", **task}, min(40, end - time.monotonic()))
        errors = " ".join(f"{e:.1e}" for e in seen.get("errors", ())) or seen["status"]
        speeds = f"{tflops(width, 2, a):4.0f} {tflops(width, 5, b):4.0f}"
        print(f"  {name:14} {a:7.3f} {b:7.3f}   {speeds}   {errors}", flush=True)


def main() -> None:
    """Check all, time those that are right, print."""
    begin = time.monotonic()
    exit_without_gpu(__file__)
    total = float(sys.argv[1]) if len(sys.argv) > 1 else 115.0
    rows: list[dict[str, Any]] = [
        {"width": width, "kernel": kernel, "tiling": text}
        for (width, kernel), texts in CANDIDATES.items()
        for text in texts.split()
    ]
    # FlexAttention first: its compilation takes longest. What it says here is not used.
    flex = [{"do": "peer", "width": width, "name": "flex"} for width in (64, 128)]
    checks = [{"do": "check", **row} for row in rows]
    answers = in_parallel(flex + checks, begin + 0.55 * total)[len(flex) :]
    print(f"{len(rows)} candidates compiled and checked in {time.monotonic() - begin:.0f} s")
    timer = Worker()
    for row, answer in zip(rows, answers, strict=True):
        task = {"do": "time", **row}
        row.update(answer)
        if row["status"] == "ok":
            row.update(timer.ask(task, min(30, begin + 0.85 * total - time.monotonic())))
    print_kernels(rows)
    for width in (64, 128):
        print_whole(width, timer, rows, begin + total)
    timer.close()
    print(f"\n{time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    serve() if "--worker" in sys.argv else main()
