"""One spec, watched by all probes, becomes one Run. A failure is a Run too."""

from __future__ import annotations

import gc
import math
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from steplab.core import Run, RunSpec, new_run_id, registry, units
from steplab.core.errors import SteplabError, Unsupported, UserError
from steplab.core.run import now
from steplab.hardware.kernel_names import main_matmul_dtype
from steplab.hardware.mfu import utilization
from steplab.probes.clock import ClockProbe
from steplab.probes.compilation import CompilationProbe
from steplab.probes.environment import capture_environment
from steplab.probes.probe import Probe, Subject
from steplab.step.assemble import assemble, micro_batches
from steplab.step.loop import measure, settle, settle_scaler, warm_up
from steplab.step.user_frames import error_line
from steplab.techniques.recipes import technique

# The two clocks (device events and wall time) may differ by this much before a note is made.
CLOCK_TOLERANCE = 0.03
NOISY_SPREAD = 0.10
# Of the wall time. On two cores 0.2 to 2 % when nobody else works and 50 to 99 % beside a busy one,
# which makes a step of 23 ms take 930: OpenMP's threads wait for each other, and every step alike.
MAX_CONTENTION = 0.15

Afterwards = Callable[[Subject, Run], Run]
Beforehand = Callable[[Subject], float | None]


def trial(
    spec: RunSpec,
    progress: Callable[[str], None] = lambda text: None,
    afterwards: Afterwards = lambda subject, run: run,
) -> Run:
    """Measure `spec` in this process. UserErrors propagate; every other failure is a status.

    `afterwards` may look further at the measured step and add to its Run; not called when the
    step did not run as asked.
    """
    blank = Run(new_run_id(spec), spec, capture_environment(), created=now())
    try:
        return run_probes(blank, progress, afterwards)
    except UserError:
        raise
    except Exception as error:
        return failed_run(blank, error)
    finally:
        clean_up()


def run_probes(
    blank: Run,
    progress: Callable[[str], None],
    afterwards: Afterwards,
    beforehand: Beforehand = lambda subject: None,
) -> Run:
    """Assemble the spec of `blank`, watch it with all probes and fill in what they saw.

    `beforehand` may run steps of the fresh assembly; it then returns the seconds of the first.
    Whatever goes wrong is raised.
    """
    spec = blank.spec
    progress("building")
    probes: dict[str, Probe] = {
        name: registry.load("steplab.probes", name, "PROBE")()
        for name in registry.names("steplab.probes", "PROBE")
    }
    clock, compilation = probes.pop("clock"), probes["compilation"]
    assert isinstance(clock, ClockProbe) and isinstance(compilation, CompilationProbe)
    torch._dynamo.reset()  # before the model is made, which may compile something by itself
    step = assemble(spec)
    subject = Subject(step, micro_batches(step, spec), spec, blank.environment)
    for probe in probes.values():
        probe.begin(subject)
    first = beforehand(subject)
    settled = settle(subject, step.parts.settle_steps, progress)
    compilation.first_seconds = settled if first is None else first
    settle_scaler(subject)
    warm_up(subject, spec.warmup, progress)
    scale = step.parts.scaler.get_scale()
    losses = measure(subject, spec.steps, clock, list(probes.values()), progress)
    skipped = step.parts.scaler.get_scale() < scale
    progress("inspecting")
    for probe in probes.values():
        probe.inspect(subject)
    seen: dict[str, Any] = {name: probe.result() for name, probe in probes.items()}
    run = replace(
        blank,
        clock=clock.result(),
        parameters=sum(p.numel() for p in step.model.parameters()),
        notes=("updates skipped: fp16 gradients overflowed in the timed steps",) if skipped else (),
        losses=() if spec.mode == "infer" else tuple(float(loss) for loss in losses),
        **seen,
    )
    run = _check_techniques(_with_figures(run, main_matmul_dtype(run.ran, step.parts.matmul_dtype)))
    return afterwards(subject, run) if run.status == "ok" else run


def _with_figures(run: Run, dtype: str) -> Run:
    """Add utilisation and the notes that a reader of the numbers must see."""
    assert run.clock is not None and run.work is not None
    device = run.environment.device_name if run.spec.device == "cuda" else run.environment.cpu
    figures = utilization(run.work, run.clock.step.median, device, dtype, run.spec.peak_tflops)
    notes = [*run.notes, figures.warning] if figures.warning else [*run.notes]
    if run.counters and run.counters.note:
        notes.append(f"counters: {run.counters.note}")
    if abs(run.clock.agreement - 1) > CLOCK_TOLERANCE:
        notes.append(f"clocks differ: steps sum to {run.clock.agreement:.3f} of the wall time")
    if run.clock.step.spread > NOISY_SPREAD:
        notes.append(f"noisy: the middle half of the samples spans {run.clock.step.spread:.0%}")
    if (run.clock.contended or 0.0) > MAX_CONTENTION:
        waited = f"threads waited {run.clock.contended:.0%} of the time for a core"
        notes.append(f"contended: {waited}; others use this machine")
    if run.compilation and run.compilation.graphs_in_window:
        graphs = run.compilation.graphs_in_window
        notes.append(f"still compiling: {graphs} new graphs while the clock ran")
    if not all(math.isfinite(loss) for loss in run.losses):
        notes.append("loss not finite: the step runs, but it does not train")
    return replace(run, figures=figures, notes=tuple(notes))


def _check_techniques(run: Run) -> Run:
    """Compare what ran with what was asked: a difference fails the Run, a doubt is noted."""
    notes = list(run.notes)
    for name, settings in run.spec.recipe.techniques.items():
        difference = technique(name).mismatch(settings, run)
        if difference:
            reason = f"{difference[0].upper()}{difference[1:]}."
            return replace(run, status="failed", reason=reason)
        doubt = technique(name).unverified(settings, run)
        notes += [doubt] if doubt else []
    return replace(run, notes=tuple(notes))


def failed_run(blank: Run, error: Exception) -> Run:
    """Turn an exception into a status with one sentence."""
    if isinstance(error, Unsupported):
        return replace(blank, status="unsupported", reason=str(error))
    if isinstance(error, SteplabError):
        return replace(blank, status="failed", reason=str(error))
    if is_out_of_memory(error):
        return replace(blank, status="oom", reason=memory_sentence(error))
    return replace(blank, status="failed", reason=error_sentence(error))


def error_sentence(error: BaseException) -> str:
    """Say what an error is, in its first sentence, and the user's line that it comes from."""
    return f"{type(error).__name__}: {_first_sentence(error)} ({error_line(error)})"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device or the host had no memory left."""
    no_host_memory = "can't allocate memory" in str(error) or isinstance(error, MemoryError)
    return isinstance(error, torch.OutOfMemoryError) or no_host_memory


def memory_sentence(error: BaseException) -> str:
    """Say how much was asked for in vain; torch begins with a line of its own source on a CPU."""
    asked = re.search(r"tried to allocate (\d+) bytes", str(error))
    if asked:
        return f"no host memory for another {units.bytes_(int(asked[1]))}"
    return _first_sentence(error)


def _first_sentence(error: BaseException) -> str:
    text = " ".join(str(error).split()).split(" Explanation: ")[0]  # dynamo's second part
    return text.split(". ")[0][:300] or type(error).__name__


def clean_up() -> None:
    """Free what the trial held, so that the next one in this process starts clean."""
    gc.collect()
    torch._dynamo.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
