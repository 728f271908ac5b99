"""One cell: time the step, trace it, weigh it, and check which path it took. Imports torch."""

from __future__ import annotations

import statistics
import warnings
from datetime import UTC, datetime
from itertools import islice
from time import perf_counter
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from steplab.engine.assemble import assemble, find_device, micro_batches
from steplab.engine.profiling.averages import Averages
from steplab.engine.profiling.plan import Plan
from steplab.engine.step import Step, unwatched
from steplab.engine.trial import is_out_of_memory
from steplab.errors import MeasurementError, SteplabError, UserError
from steplab.kernels.impl import AUTO
from steplab.probes.environment import capture
from steplab.store.atomic import disk_errors
from steplab.studies.playbook.micro import micro_traces
from steplab.studies.playbook.phases import PhaseTimes, labels
from steplab.studies.playbook.plan import TORCH_NAMES, Cell, Playbook
from steplab.workloads.megalodon.precision import configure_precision

WARM, TIMED = 3, 6  # steps before the clock, and under it
ROWS = 60  # of a table of operators
GIB = 2**30


def run_cell(cell: Cell, book: Playbook) -> dict[str, object]:
    """Return the cell's line of the summary; what goes wrong is its status.

    What was measured by then stays in the line: a path of the micro traces may need more memory
    than the step.
    """
    line = _about(cell, book)
    asked = {"on": True, "off": False, "auto": None}[cell.reduction]
    try:
        with configure_precision(allow_bf16_reduced_precision_reduction=asked):
            line |= _measured(cell, book)
            if not book.forward_only:
                micro_traces(cell, find_device(book.device))
        return {**line, "status": "ok"}
    except UserError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            return {**line, "status": "oom"}
        kind = "" if isinstance(error, SteplabError) else f"{type(error).__name__}: "
        return {**line, "status": f"{kind}{' '.join(str(error).split())[:200]}"}
    finally:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _about(cell: Cell, book: Playbook) -> dict[str, object]:
    found = capture()
    return {
        "dtype": TORCH_NAMES[book.dtype],
        "bf16_reduction": cell.reduction,
        "seq_len": cell.length,
        "batch_size": book.batch,
        "use_cache": book.use_cache,
        "mode": "forward" if book.forward_only else "train",
        "preset": book.preset,
        "device": found.device_name if book.device == "cuda" else found.cpu,
        "torch": torch.__version__,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _measured(cell: Cell, book: Playbook) -> dict[str, object]:
    step = assemble(cell.spec)
    model: Any = step.model
    model.keeps_states = book.use_cache
    batches = micro_batches(step, cell.spec)
    on_cuda = step.parts.device.type == "cuda"
    with disk_errors(cell.folder, "--out"):
        (cell.folder / "reports").mkdir(parents=True, exist_ok=True)
    if on_cuda:
        torch.cuda.reset_peak_memory_stats()
    times, phases = _timed(step, batches, on_cuda)
    ran = _path(model, book.ema)
    peak = torch.cuda.max_memory_allocated() / GIB if on_cuda else None
    _trace(step, batches, cell, book.schedule, on_cuda)
    _reports(cell, book.forward_only, statistics.fmean(times), peak)
    tokens = step.workload.tokens(cell.spec.batch)
    return {
        "ms_per_step": statistics.fmean(times),
        "median_ms": statistics.median(times),
        "peak_mem_gb": peak,
        **{f"{name}_ms": phases.mean_ms(name) for name in ("forward", "backward", "optimizer")},
        "tokens_per_s": tokens / statistics.median(times) * 1e3,
        "ema": ran,
        "parameters": sum(p.numel() for p in model.parameters()),
    }


def _timed(step: Step, batches: Any, on_cuda: bool) -> tuple[list[float], PhaseTimes]:
    """Return the milliseconds of every timed step, and its phases."""
    phases = PhaseTimes(on_cuda)
    times = []
    for number, batch in enumerate(islice(batches, WARM + TIMED)):
        step.watch = phases if number >= WARM else unwatched
        if on_cuda:
            torch.cuda.synchronize()
        start = perf_counter()
        step(batch)
        if on_cuda:
            torch.cuda.synchronize()
        if number >= WARM:
            times.append((perf_counter() - start) * 1e3)
    step.watch = unwatched
    return times, phases


def _path(model: Any, asked: str) -> str:
    """Return the path that the moving averages took, or raise if it is not the one asked for."""
    seen = {m.ran for m in model.modules() if getattr(m, "op", "") == "ema"}
    if len(seen) != 1 or (asked != AUTO and seen != {asked}):
        names = ", ".join(sorted(seen))
        raise MeasurementError(f"--ema {asked} was asked for, but {names or 'nothing'} ran.")
    return seen.pop()


def _trace(step: Step, batches: Any, cell: Cell, plan: Plan, on_cuda: bool) -> None:
    """Run the schedule to its end; write a trace for every cycle and tables over all of them."""
    infers = step.mode == "infer"
    stem = "forward_trace_step" if infers else "speed_step"
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if on_cuda else [])

    def save(profiler: profile) -> None:
        profiler.export_chrome_trace(str(cell.folder / f"{stem}{profiler.step_num}.json"))

    step.watch = labels(infers)
    with warnings.catch_warnings():
        # Whoever asks for no warm-up knows what it costs.
        warnings.filterwarnings("ignore", "Profiler won't be using warmup")
        cycle = schedule(wait=plan.wait, warmup=plan.warmup, active=plan.active, repeat=plan.repeat)
    options: dict[str, Any] = {"record_shapes": True, "profile_memory": True, "acc_events": True}
    with profile(activities=activities, schedule=cycle, on_trace_ready=save, **options) as profiler:
        for batch in islice(batches, plan.steps):
            step(batch)
            if on_cuda:
                torch.cuda.synchronize()
            profiler.step()
    step.watch = unwatched
    averages = Averages(profiler.events())
    kind = "device" if on_cuda else "cpu"
    tables = {
        "key_averages_cuda_time.txt": f"self_{kind}_time_total",
        "key_averages_mem.txt": f"self_{kind}_memory_usage",
    }
    if infers:
        tables = {"key_averages.txt": f"self_{kind}_time_total"}
    for name, order in tables.items():
        (cell.folder / "reports" / name).write_text(averages.text(order, ROWS), encoding="utf-8")


def _reports(cell: Cell, infers: bool, mean_ms: float, peak: float | None) -> None:
    """Write the two single figures as the playbook names them."""
    name = "latency_ms.txt" if infers else "ms_per_step.txt"
    reports = cell.folder / "reports"
    (reports / name).write_text(f"{mean_ms:.4f}\n", encoding="utf-8")
    told = "unknown: torch counts no peak on a CPU" if peak is None else f"{peak:.4f}"
    (reports / "peak_mem_gb.txt").write_text(f"{told}\n", encoding="utf-8")
