"""Other people's models in a loop of one's own: by hand, by their peers, by `steplab.optimize`.

    PYTHONPATH=src python benchmarks/own_loop.py [nanogpt llama qwen] [--tiny] [--out FILE ...]

nanogpt  its own model.py (`--nanogpt FILE`), 124 million weights, 16 x 1024 tokens
llama    Hugging Face's Llama in the shape of Llama-3.2-1B, 4 x 4096 tokens (needs transformers)
qwen     Hugging Face's Qwen2-MoE of 538 million weights, 16 x 4096 tokens

Every row is a process of its own, because libraries patch classes and graphs keep their memory. All
rows compile at once; from then on one at a time has the GPU, first for its warm-up, then in turns
with the other rows of its model. Name one model in a call where several do not fit into the GPU. A
row's time is the median over all turns of the time between the ends of two steps; steps that took
far longer are told, with what was seen in them. All rows see the same batches and make as many
steps: their last losses differ by rounding alone, and by that of bf16 weights where a row has them.
A row that fails, or is not ready in time, says why.

One call is meant to fit into ten minutes. What takes longer to compile is compiled by a call with
`--prepare` first: the next one finds the code in Inductor's cache. `--profile` adds each row's
kernels by kind, the time between them and what fills are for (step_kernels.py).
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.callback
from own_loop_models import CASES, RATE, Case, Row, adamw
from step_kernels import lines, recorded, summary
from torch import Tensor, nn

import steplab
from steplab.cli.command import Parser
from steplab.core import Column, Samples, Table
from steplab.core.errors import SteplabError, Unsupported, UserError, did_you_mean
from steplab.probes.disturbances import Disturbance, Disturbances, mark_slow
from steplab.report.export import check_suffixes, write_table
from steplab.report.terminal import print_table

CLIP = 1.0
WARM_STEPS = 6  # compile, allocate, capture a graph, replay it
UNTIMED = 2  # steps of a turn that fill the allocator's cache again
BATCHES = 8  # used again and again
READY = 0.85  # share of the time after which a row must have been compiled
COLUMNS = (
    Column("model"),
    Column("row"),
    Column("step", "ms"),
    Column("tokens/s", digits=6),
    Column("of hand"),
    Column("slowest", "ms"),
    Column("peak", "GiB"),
    Column("last loss", digits=6),
    Column("ready", "s"),
    Column("status"),
)


# One row, in its own process


class Turn:
    """The GPU for one process at a time: a locked file, which a process that dies lets go."""

    def __init__(self, path: str) -> None:
        self.file = os.open(path, os.O_RDWR)
        self.is_ours = False

    def take(self, *_: Any) -> None:
        """Wait for it."""
        if not self.is_ours:
            fcntl.flock(self.file, fcntl.LOCK_EX)
            self.is_ours = True

    def leave(self) -> None:
        """Give it back, with the memory that only a running step needs."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        fcntl.flock(self.file, fcntl.LOCK_UN)
        self.is_ours = False


def token_batches(case: Case, device: torch.device) -> Iterator[Tensor]:
    """Yield a few (B, T) again and again; some tokens are frequent, which is soon learned."""
    generator = torch.Generator().manual_seed(42)
    shape = (BATCHES, case.batch, case.context)
    tokens = (torch.rand(shape, generator=generator) ** 4 * case.vocabulary).long().to(device)
    return itertools.cycle(tokens)


def rate_at(number: int) -> float:
    """Return a learning rate that changes with every step, as a schedule's does."""
    return RATE * min(1.0, (number + 1) / 20)


def step_by_hand(case: Case, row: Row, model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return the step as it is written by hand: autocast, torch.compile, fused AdamW.

    With bf16 weights there is no autocast, and updates are rounded to bf16.
    """
    device = next(model.parameters()).device
    if row.bf16_weights:
        model.bfloat16()
    torch.set_float32_matmul_precision("high")
    loss: Callable[..., Any] = case.loss
    called: Any = model
    if row.compiled == "model":
        called = torch.compile(model)
    elif row.compiled == "loss":
        loss = torch.compile(case.loss)
    optimizer = (case.optimizer or adamw)(model, fused=True)
    numbers = itertools.count()

    def step(tokens: Tensor) -> Tensor:
        rate = rate_at(next(numbers))
        for group in optimizer.param_groups:
            group["lr"] = rate
        with torch.autocast(device.type, torch.bfloat16, enabled=not row.bf16_weights):
            found = loss(called, tokens)
        found.backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        result: Tensor = found.detach()
        return result

    return step


def step_by_recipe(case: Case, row: Row, model: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return the same step by `steplab.optimize`."""
    tuned = steplab.optimize(model, case.loss, row.recipe, case.optimizer or adamw, clip=CLIP)
    numbers = itertools.count()

    def step(tokens: Tensor) -> Tensor:
        rate = rate_at(next(numbers))
        for group in tuned.optimizer.param_groups:  # type: ignore[union-attr]
            group["lr"] = rate
        return tuned([tokens]).loss

    step.tuned = tuned  # type: ignore[attr-defined]
    return step


def prepare(row: Row) -> None:
    """Switch on what a peer needs before its model is made, or say that it is not here."""
    if row.auto_chunker:
        config = getattr(torch._inductor.config, "auto_chunker", None)
        if config is None:
            raise Unsupported(f"torch {torch.__version__} has no auto_chunker.")
        config.enable = True
    if row.liger:
        if not torch.cuda.is_available():
            raise Unsupported("Liger's kernels need a GPU.")
        from liger_kernel.transformers import (  # type: ignore[import-not-found]
            apply_liger_kernel_to_llama,
        )

        apply_liger_kernel_to_llama()


def remarks(row: Row, step: Any) -> str:
    """Return what a reader should know of a row that ran: what was really replaced."""
    if row.auto_chunker:
        from torch._inductor import metrics

        return f"{getattr(metrics, 'num_auto_chunking', 'unknown how many')} chunked"
    substituting = getattr(getattr(step, "tuned", None), "parts", None)
    found = substituting.substituting.found if substituting and substituting.substituting else ()
    replaced = [f"{one.count} x {one.what}" for one in found if one.what]
    left = sorted({f"{one.rewrite} left: {one.reason}" for one in found if one.reason})
    return "; ".join([*replaced, *left])


def serve(end: Connection, case: Case, row: Row, options: Mapping[str, Any], lock: str) -> None:
    """Build a row, warm up, and then measure a turn whenever asked; "stop" ends it."""
    try:
        with Path(os.devnull).open("w") as quiet, contextlib.redirect_stdout(quiet):
            _serve(end, case, row, options, Turn(lock))
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        end.send({"failed": text})


def _serve(end: Connection, case: Case, row: Row, options: Mapping[str, Any], turn: Turn) -> None:
    began = time.perf_counter()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    prepare(row)
    torch.manual_seed(0)
    with torch.device(device):
        model = case.build(options["tiny"], **options["build"], **row.model)
    stream = token_batches(case, device)
    step = (step_by_recipe if row.recipe else step_by_hand)(case, row, model)
    if row.recipe or row.compiled:  # the GPU is asked for once the first graph is compiled
        torch._dynamo.callback.callback_handler.register_end_callback(turn.take)
    else:
        turn.take()
    for _ in range(WARM_STEPS):
        step(next(stream))
        turn.take()
    turn.leave()
    end.send({"ready": time.perf_counter() - began, "remarks": remarks(row, step)})
    times: list[float] = []
    disturbed: dict[int, Disturbance] = {}
    while (word := end.recv()) != "stop":
        turn.take()
        if word == "profile":
            end.send(summary(recorded(lambda: step(next(stream)))))
        else:
            new, seen, losses = timed(step, stream, case.steps, device)
            disturbed |= {len(times) + number: one for number, one in enumerate(seen)}
            times += new
            peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else None
            figures = {"losses": losses, "peak": peak, "slow": slow_steps(times, disturbed)}
            end.send({"times": new, **figures})
        turn.leave()


def slow_steps(times: list[float], disturbed: Mapping[int, Disturbance]) -> str:
    """Return which steps took far longer than the others and why, or ""."""
    periods = Samples(tuple(times), "ms")
    marked = mark_slow(periods, Samples((), "ms"), disturbed)
    return Samples(periods.values, "ms", marked).outliers


def timed(
    step: Callable[[Tensor], Tensor], stream: Iterator[Tensor], steps: int, device: torch.device
) -> tuple[list[float], list[Disturbance], list[float]]:
    """Return milliseconds between the ends of steps, what happened in each, and the losses."""
    for _ in range(UNTIMED):
        step(next(stream))
    watch = Disturbances(device.type == "cuda")
    watch.open()
    seen: list[Disturbance] = []
    marks: list[Any] = []
    losses: list[Tensor] = []

    def mark() -> None:
        if device.type == "cuda":
            marks.append(torch.cuda.Event(enable_timing=True))
            marks[-1].record()
        else:
            marks.append(time.perf_counter())

    mark()
    for _ in range(steps):
        losses.append(step(next(stream)).clone())  # a graph writes into the same number again
        mark()
        seen.append(watch.next_step())
    watch.close()
    told = [loss.item() for loss in losses]
    if device.type != "cuda":
        return [1e3 * (b - a) for a, b in itertools.pairwise(marks)], seen, told
    return [a.elapsed_time(b) for a, b in itertools.pairwise(marks)], seen, told


# All rows, in turns


class Worker:
    """A row's process, as its parent sees it."""

    def __init__(self, case: Case, row: Row, options: Mapping[str, Any], lock: str) -> None:
        self.row = row
        context = multiprocessing.get_context("spawn")
        self.end, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, case, row, options, lock))
        self.process.start()
        theirs.close()
        self.is_ready = False
        self.status = ""
        self.figures: dict[str, Any] = {"times": []}

    def answer(self, deadline: float) -> dict[str, Any]:
        """Return the next answer; {} where the row has failed, with the reason as its status."""
        try:
            if not self.end.poll(max(0.0, deadline - time.perf_counter())):
                return self._fail("not ready in time")
            found: dict[str, Any] = self.end.recv()
        except EOFError:
            self.process.join()
            return self._fail(f"its process ended with {self.process.exitcode}")
        if "failed" in found:
            return self._fail(found["failed"])
        return found

    def _fail(self, reason: str) -> dict[str, Any]:
        self.is_ready, self.status = False, reason
        self.process.kill()
        return {}

    def ask(self, word: str, deadline: float) -> dict[str, Any]:
        """Let it do something and return what it saw."""
        self.end.send(word)
        return self.answer(deadline)

    def stop(self) -> None:
        """End the process."""
        if self.is_ready:
            self.is_ready = False
            self.end.send("stop")
            self.process.join(5)
        self.process.kill()


class Contest:
    """A model and the processes of its rows; all of them compile from the start."""

    def __init__(self, name: str, case: Case, options: Mapping[str, Any], lock: str) -> None:
        self.name, self.case = name, case
        self.workers = [Worker(case, row, options, lock) for row in case.rows]

    @property
    def ready(self) -> list[Worker]:
        """The rows that can be measured."""
        return [worker for worker in self.workers if worker.is_ready]

    def wait(self, deadline: float) -> None:
        """Let the rows get ready; those that do not have failed."""
        for worker in self.workers:
            found = worker.answer(deadline)
            worker.is_ready = bool(found)
            worker.figures |= found

    def measure(self, deadline: float) -> list[tuple[Any, ...]]:
        """Let the rows take turns; return the rows of the table."""
        for number in range(self.case.turns):
            for worker in self.ready:
                found = worker.ask("turn", deadline)
                worker.figures["times"] += found.pop("times", [])
                worker.figures |= found
            told = ", ".join(
                f"{w.row.name} {statistics.median(w.figures['times']):.2f} ms, "
                f"losses up to {max(w.figures['losses']):.3f}, last {w.figures['losses'][-1]:.4f}"
                for w in self.ready
            )
            print(f"{self.name} turn {number + 1}: {told}", file=sys.stderr, flush=True)
            if time.perf_counter() > deadline:
                break
        return [cells(self.name, self.case, worker, self.workers[0]) for worker in self.workers]

    def profile(self, deadline: float) -> dict[str, Any]:
        """Return the kernels of every row for which there is time."""
        found = {}
        for worker in self.ready:
            if time.perf_counter() < deadline:
                found[worker.row.name] = worker.ask("profile", deadline + 10)
        return found

    def stop(self) -> None:
        """End the processes."""
        for worker in self.workers:
            worker.stop()


def cells(name: str, case: Case, worker: Worker, hand: Worker) -> tuple[Any, ...]:
    """Return one row of the table."""
    seen, times = worker.figures, worker.figures["times"]
    title = worker.row.name if not worker.row.recipe else f"steplab: {worker.row.name}"
    if not times:
        return (name, title, *[None] * 7, worker.status)
    ms = statistics.median(times)
    of_hand = statistics.median(hand.figures["times"]) / ms if hand.figures["times"] else None
    rate = case.batch * case.context / ms * 1e3
    told = "; ".join(filter(None, (worker.status, seen.get("remarks"), seen["slow"]))) or "ok"
    figures = (ms, rate, of_hand, max(times), seen["peak"], seen["losses"][-1], seen["ready"])
    return (name, title, *figures, told)


def main() -> int:
    """Measure, show every turn at once, print one table; return the exit code."""
    parser = Parser("own_loop.py", "Other people's models in a loop of one's own.")
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"of {', '.join(CASES)}")
    parser.add_argument("--nanogpt", default=".carry/nanogpt_model.py", help="nanoGPT's model.py")
    parser.add_argument("--tiny", action="store_true", help="tiny models, to try the rows out")
    parser.add_argument("--rows", nargs="*", default=[], help="only rows with these words")
    parser.add_argument("--profile", type=Path, help="write every row's kernels to this JSON file")
    parser.add_argument("--seconds", type=float, default=540.0, help="for all of it")
    parser.add_argument("--turns", type=int, help="turns of each row")
    parser.add_argument("--prepare", action="store_true", help="compile every row, measure none")
    parser.add_argument("--out", type=Path, nargs="*", default=[], help="write the table")
    try:
        args = parser.parse(sys.argv[1:])
        check_suffixes(args.out)
        for model in args.models:
            if model not in CASES:
                raise UserError(f"There is no model {model!r}.", did_you_mean(model, CASES))
        measured(args)
    except SteplabError as error:
        print(f"own_loop.py: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def chosen(name: str, args: Any) -> tuple[Case, dict[str, Any]]:
    """Return the case with the rows that were asked for, and what its processes must know."""
    case = CASES[name]
    if args.tiny:
        case = replace(case, batch=2, context=64, vocabulary=256, turns=2, steps=2)
    if args.turns:
        case = replace(case, turns=args.turns)
    if args.rows:
        hand, *others = case.rows
        kept = [row for row in others if any(word in row.name for word in args.rows)]
        case = replace(case, rows=(hand, *kept))
    build = {"file": args.nanogpt} if name == "nanogpt" else {}
    return case, {"tiny": args.tiny, "build": build}


def measured(args: Any) -> None:
    """Compare the models, print their tables; the files are written after every model."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    note = (
        f"torch {torch.__version__}, bf16; every row a process, in turns; median of all steps. "
        "By hand: autocast, fused AdamW, clipping, torch.compile of the model where it says so; "
        "with bf16 weights no autocast and no fp32 weights, so that small updates are lost"
    )
    table = Table(f"In one's own loop, {device}", COLUMNS, (), note)
    profiles: dict[str, Any] = {}
    deadline = time.perf_counter() + args.seconds
    cases = {name: chosen(name, args) for name in args.models or list(CASES)}
    threads = (os.cpu_count() or 2) // sum(len(case.rows) for case, _ in cases.values())
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = str(max(2, threads))
    with tempfile.NamedTemporaryFile(suffix=".lock") as lock:
        contests = [Contest(name, *cases[name], lock.name) for name in cases]
        try:
            for contest in contests:
                contest.wait(deadline - (0 if args.prepare else 1 - READY) * args.seconds)
                print_ready(contest)
            for contest in contests if not args.prepare else ():
                rows = contest.measure(deadline)
                table = replace(table, rows=(*table.rows, *rows))
                print_table(replace(table, rows=tuple(rows)))
                for path in args.out:
                    write_table(table, path)
                if args.profile:
                    profiles[contest.name] = contest.profile(deadline)
                    args.profile.write_text(json.dumps(profiles, indent=1))
                    for row, kernels in profiles[contest.name].items():
                        print(f"{contest.name}, {row}:", *lines(kernels), sep="\n  ", flush=True)
                contest.stop()
        finally:
            for contest in contests:
                contest.stop()


def print_ready(contest: Contest) -> None:
    """Print which rows can be measured, and after how long."""
    for worker in contest.workers:
        ready = worker.figures.get("ready")
        told = worker.status if ready is None else f"ready after {ready:.0f} s"
        print(f"{contest.name}, {worker.row.name}: {told}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
