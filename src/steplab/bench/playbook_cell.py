"""One cell of the playbook: time the step, trace it, measure its memory. Imports torch."""

from __future__ import annotations

import contextlib
import statistics
import warnings
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch.profiler import profile, record_function, schedule

from steplab.bench.playbook import TORCH_NAMES, Playbook, PlaybookCell
from steplab.core.errors import MeasurementError, SteplabError, UserError
from steplab.core.output_file import write_output
from steplab.kernels import ema as ema_op
from steplab.kernels.dispatch import AUTO, refusal
from steplab.probes.environment import capture_environment
from steplab.probes.ran import RawProfile, profiler_activities
from steplab.profiling.plan import ProfilePlan
from steplab.profiling.trace_file import Averages, export_trace
from steplab.step.assemble import assemble, find_device, micro_batches
from steplab.step.failures import is_out_of_memory
from steplab.step.step import Step, unwatched
from steplab.workloads.megalodon.layers import MovingAverages

LABELS = {"forward": "FORWARD", "backward": "BACKWARD", "optimizer": "OPTIMIZER"}
INFERENCE = "FORWARD_INFER"
SHORT_NAMES = {"sequential": "seq"}  # in the names of files
WARMUP, TIMED = 3, 6  # steps
TABLE_ROWS = 60  # operators in a table
GIB = 2**30


def run_cell(cell: PlaybookCell, book: Playbook) -> dict[str, object]:
    """Return the cell's line of the summary; what goes wrong is its status.

    What was measured before stays in the line: tracing one EMA path alone may need more memory
    than the step.
    """
    line = _about(cell, book)
    try:
        line |= _measured(cell, book)
        if not book.forward_only:
            trace_ema_alone(cell, find_device(book.device))
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


def _about(cell: PlaybookCell, book: Playbook) -> dict[str, object]:
    found = capture_environment()
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


def _measured(cell: PlaybookCell, book: Playbook) -> dict[str, object]:
    step = assemble(cell.spec)
    model: Any = step.model
    model.keeps_states = book.use_cache
    batches = micro_batches(step, cell.spec)
    on_cuda = step.parts.device.type == "cuda"
    if on_cuda:
        torch.cuda.reset_peak_memory_stats()
    times, phases = _timed(step, batches, on_cuda)
    ran = _ema_path(model, book.ema)
    peak = torch.cuda.max_memory_allocated() / GIB if on_cuda else None
    _trace_steps(step, batches, cell, book.schedule, on_cuda)
    _write_figures(cell, book.forward_only, statistics.fmean(times), peak)
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
    for number, batch in enumerate(islice(batches, WARMUP + TIMED)):
        step.watch = phases if number >= WARMUP else unwatched
        if on_cuda:
            torch.cuda.synchronize()
        start = perf_counter()
        step(batch)
        if on_cuda:
            torch.cuda.synchronize()
        if number >= WARMUP:
            times.append((perf_counter() - start) * 1e3)
    step.watch = unwatched
    return times, phases


def _ema_path(model: Any, asked: str) -> str:
    """Return the path that the moving averages took, or raise if it is not the one asked for."""
    seen = {m.ran for m in model.modules() if getattr(m, "op", "") == "ema"}
    if len(seen) != 1 or (asked != AUTO and seen != {asked}):
        names = ", ".join(sorted(seen))
        raise MeasurementError(f"--ema {asked} was asked for, but {names or 'nothing'} ran.")
    return seen.pop()


def _trace_steps(
    step: Step, batches: Any, cell: PlaybookCell, plan: ProfilePlan, on_cuda: bool
) -> None:
    """Run the schedule to its end; write a trace for every cycle and tables over all of them."""
    infers = step.mode == "infer"
    stem = "forward_trace_step" if infers else "speed_step"
    activities = profiler_activities(on_cuda)

    def save(profiler: profile) -> None:
        export_trace(profiler, cell.folder / f"{stem}{profiler.step_num}.json", "--out")

    step.watch = phase_labels(infers)
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
        path = cell.folder / "reports" / name
        write_output(path, averages.text(order, TABLE_ROWS).encode())


def _write_figures(cell: PlaybookCell, infers: bool, mean_ms: float, peak: float | None) -> None:
    """Write the time and the peak memory to files, under the names that the playbook uses."""
    name = "latency_ms.txt" if infers else "ms_per_step.txt"
    reports = cell.folder / "reports"
    write_output(reports / name, f"{mean_ms:.4f}\n".encode())
    shown = "unknown: torch counts no peak on a CPU" if peak is None else f"{peak:.4f}"
    write_output(reports / "peak_mem_gb.txt", f"{shown}\n".encode())


def phase_labels(infers: bool) -> Any:
    """Return a watcher that puts each phase into the trace under its label."""
    names = {"forward": INFERENCE} if infers else LABELS
    return lambda phase: record_function(names.get(phase, phase.upper()))


class PhaseTimes:
    """A watcher that records how long each phase takes."""

    def __init__(self, on_cuda: bool) -> None:
        self.on_cuda = on_cuda
        self.pairs: dict[str, list[tuple[Any, Any]]] = {}

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Time one phase."""
        start = self._now()
        yield
        self.pairs.setdefault(phase, []).append((start, self._now()))

    def mean_ms(self, phase: str) -> float | None:
        """Return the mean of a phase, None if it never ran. The device must be idle by now."""
        pairs = self.pairs.get(phase)
        if not pairs:
            return None
        if self.on_cuda:
            return sum(a.elapsed_time(b) for a, b in pairs) / len(pairs)
        return sum((b - a) * 1e3 for a, b in pairs) / len(pairs)

    def _now(self) -> Any:
        if not self.on_cuda:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def trace_ema_alone(cell: PlaybookCell, device: torch.device) -> list[str]:
    """Write ema_fft.json, ema_seq.json and, where it runs, ema_scan.json; return their names."""
    dtype = torch.bfloat16 if cell.spec.recipe.techniques["precision"]["dtype"] == "bf16" else None
    shape = (cell.spec.batch, cell.length, cell.spec.config["width"])
    with torch.device(device):
        module = MovingAverages(cell.spec.config["width"], cell.spec.config["modes"])
        x_BLD = torch.randn(shape, dtype=dtype, requires_grad=True)
    written = []
    for impl in ("fft", "sequential", "scan"):
        if refusal(ema_op.IMPLS[impl], x_BLD, module.parameters_now()):
            continue
        name = SHORT_NAMES.get(impl, impl)
        module.impl = impl
        _trace_ema(
            module, x_BLD, f"EMA_{name.upper()}_L{cell.length}", cell.folder / f"ema_{name}.json"
        )
        if module.ran != impl:
            raise MeasurementError(f"ema {impl!r} was asked for, but {module.ran!r} ran.")
        written.append(f"ema_{name}.json")
    return written


def _trace_ema(module: MovingAverages, x_BLD: Any, label: str, path: Path) -> None:
    """Run twice and record the second time; labels need the CPU's events too."""
    inputs = (x_BLD, *module.parameters())

    def once() -> None:
        y_BLD, _ = module(x_BLD)
        # Not backward(), which would add to the gradients of the first time.
        torch.autograd.grad(y_BLD, inputs, torch.ones_like(y_BLD))
        if x_BLD.is_cuda:
            torch.cuda.synchronize()

    once()
    with RawProfile(x_BLD.is_cuda) as profiler, record_function(label):
        once()
    export_trace(profiler, path, "--out")
