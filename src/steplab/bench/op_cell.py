"""One cell of an op benchmark: build the op, time it, measure its memory, compare it with fp64.

Imports torch.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch._dynamo.utils import counters

from steplab.bench.op_accuracy import Accuracy, accuracy_table
from steplab.bench.op_bench import COMPILED, OpBench
from steplab.bench.op_measure import BoundOp, TimingOptions, measure_memory, time_forward, time_op
from steplab.bench.op_results import ERRORS, WRONG
from steplab.core import Run, RunSpec, Status, registry
from steplab.core.errors import Unsupported, UserError
from steplab.core.run import new_run
from steplab.probes.environment import capture_environment
from steplab.step.assemble import find_device
from steplab.step.failures import first_sentence, is_out_of_memory, memory_sentence

Progress = Callable[[str], None]
FUSED = "fuse_attention"  # Inductor's counter of patterns that it replaced by a fused attention
HOST_BOUND = 0.9  # the host took this share of the time, or more


class OpInstance(Protocol):
    """An op at one shape, by one implementation: what `OpBench.build` returns."""

    call: BoundOp

    def check(self) -> tuple[list[Accuracy], str]:
        """Return how far each result is from fp64, and in words what was checked."""
        ...

    def notes(self) -> list[str]:
        """Return what a reader must know about what ran; called after the op has run."""
        ...


def compiled_if_asked(impl: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function`, under torch.compile where the name of the implementation says so."""
    if not impl.startswith(COMPILED):
        return function
    counters["inductor"].pop(FUSED, None)
    return torch.compile(function, fullgraph=True, dynamic=False)


def compiler_notes(impl: str) -> list[str]:
    """Say what torch.compile replaced: a fused attention is no longer the definition."""
    if impl.startswith(COMPILED) and counters["inductor"][FUSED]:
        return ["torch.compile put a fused attention in place of the definition"]
    return []


def measure_cell(spec: RunSpec, progress: Progress = lambda text: None) -> Run:
    """Return the Run of one cell. UserErrors propagate; every other failure is a status."""
    run = new_run(spec, capture_environment())
    try:
        return _measured(run, progress)
    except UserError:
        raise
    except Exception as error:
        return _failed(run, error)
    finally:
        _free_memory()


def _measured(run: Run, progress: Progress) -> Run:
    spec = run.spec
    progress("building")
    bench: OpBench = registry.load("steplab.bench.ops", spec.workload, "BENCH")
    torch.manual_seed(spec.seed)
    op = bench.build(spec.config, spec.seed, find_device(spec.device))
    options = TimingOptions(spec.steps, spec.warmup, spec.config["seconds"])
    progress("first forward")
    out = op.call.forward()
    try:
        progress("first backward")
        op.call.backward(out)
    except Exception as error:
        del out
        clock = time_forward(op.call, options)
        return replace(_failed(run, error, "backward: "), clock=clock, notes=tuple(op.notes()))
    del out
    progress("timing")
    run = replace(run, clock=time_op(op.call, options))
    run = replace(run, memory=measure_memory(op.call))
    progress("comparing with fp64")
    results, checked = op.check()
    notes = (*op.notes(), *_host_note(run))
    run = replace(run, tables={ERRORS: accuracy_table(results, checked)}, notes=notes)
    return _judged(run, results)


def _judged(run: Run, results: list[Accuracy]) -> Run:
    worst = max(results, key=lambda result: result.of_budget)
    if worst.of_budget <= 1:
        return run
    why = f"{WRONG}: {worst.name} is {worst.error:.1e} from fp64 and may be {worst.budget:.1e}"
    if worst.error <= worst.budget:
        why += f", but one tile of 16 rows is off by {worst.worst_tile:.1f} times what it may be"
    return replace(run, status="failed", reason=why)


def _host_note(run: Run) -> list[str]:
    clock = run.clock
    if clock is None or clock.source == "perf_counter":
        return []
    host, device = clock.host.median, clock.step.median
    if host < HOST_BOUND * device:
        return []
    return [f"the host needs {host:.3g} ms to issue what takes {device:.3g} ms on the device"]


def _free_memory() -> None:
    """Free what the cell held. After a fault of the device nothing can be freed, nor need it be."""
    gc.collect()
    torch._dynamo.reset()
    if torch.cuda.is_available():
        with contextlib.suppress(RuntimeError):
            torch.cuda.empty_cache()


def _failed(run: Run, error: Exception, where: str = "") -> Run:
    status: Status = "failed"
    if is_out_of_memory(error):
        status, text = "oom", memory_sentence(error)
    elif isinstance(error, Unsupported) or _is_too_large(error):
        status, text = "unsupported", first_sentence(error)
    else:
        text = f"{type(error).__name__}: {first_sentence(error)}"
    return replace(run, status=status, reason=f"{where}{text}")


def _is_too_large(error: Exception) -> bool:
    """Whether Triton found a tile that no multiprocessor of this device can hold."""
    return type(error).__name__ == "OutOfResources"
