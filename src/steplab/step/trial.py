"""One spec, watched by all probes, becomes one Run. A failure is a Run too."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from steplab.core import Run, RunSpec, registry
from steplab.core.errors import UserError
from steplab.core.run import new_run
from steplab.hardware.kernel_names import main_matmul_dtype
from steplab.hardware.mfu import utilization
from steplab.probes.clock import ClockProbe
from steplab.probes.compilation import CompilationProbe
from steplab.probes.counters import clock_notes
from steplab.probes.environment import capture_environment
from steplab.probes.probe import Probe, Subject
from steplab.step.assemble import assemble, micro_batches
from steplab.step.failures import failed_run
from steplab.step.loop import measure, settle, settle_scaler, warm_up
from steplab.techniques.recipes import technique

# The two clocks (device events and wall time) may differ by this much before a note is made.
CLOCK_TOLERANCE = 0.03

Progress = Callable[[str], None]
Afterwards = Callable[[Subject, Run], Run]
Beforehand = Callable[[Subject], None]


def trial(
    spec: RunSpec,
    progress: Progress = lambda text: None,
    afterwards: Afterwards = lambda subject, run: run,
    beforehand: Beforehand = lambda subject: None,
) -> Run:
    """Measure `spec` in this process. UserErrors propagate; every other failure is a status.

    `beforehand` may refuse the step once it is built. `afterwards` may look further at the measured
    step and add to its Run; not called when the step did not run as asked.
    """
    empty = new_run(spec, capture_environment())
    try:
        return _measured(empty, progress, afterwards, beforehand)
    except UserError:
        raise
    except Exception as error:
        return failed_run(empty, error)
    finally:
        clean_up()


def _measured(
    empty: Run, progress: Progress, afterwards: Afterwards, beforehand: Beforehand
) -> Run:
    # In a function of its own: with its frame the last reference to the step is gone, so that the
    # clean-up after it can free the model.
    probed = ProbedStep(empty, progress)
    beforehand(probed.subject)
    run = probed.run_probes(progress)
    return afterwards(probed.subject, run) if run.status == "ok" else run


class ProbedStep:
    """A freshly assembled step with every probe attached, for one measurement."""

    def __init__(self, run: Run, progress: Progress) -> None:
        progress("building")
        self.run = run
        self.probes: dict[str, Probe] = {
            name: registry.load("steplab.probes", name, "PROBE")()
            for name in registry.names("steplab.probes", "PROBE")
        }
        self.clock = self.probes.pop("clock")  # opened last and closed first
        torch._dynamo.reset()  # before the model is made, which may compile something by itself
        step = assemble(run.spec)
        feed = micro_batches(step, run.spec, step.parts.loader_workers)
        self.subject = Subject(step, feed, run.spec, run.environment)
        for probe in self.probes.values():
            probe.begin(self.subject)

    def run_probes(self, progress: Progress, first_seconds: float | None = None) -> Run:
        """Settle, warm up, measure, inspect; return the Run with what the probes saw.

        `first_seconds` is what the first step took, where the caller has run it. Whatever goes
        wrong is raised; a step that did not run as asked is a failed Run.
        """
        subject, spec, probes = self.subject, self.run.spec, self.probes
        parts, clock, compilation = subject.step.parts, self.clock, probes["compilation"]
        assert isinstance(clock, ClockProbe) and isinstance(compilation, CompilationProbe)
        settled = settle(subject, parts.settle_steps, progress)
        compilation.first_seconds = settled if first_seconds is None else first_seconds
        settle_scaler(subject)
        warm_up(subject, spec.warmup, progress)
        scale = parts.scaler.get_scale()
        losses = measure(subject, spec.steps, clock, list(probes.values()), progress)
        skipped = parts.scaler.get_scale() < scale
        progress("inspecting")
        for probe in probes.values():
            probe.inspect(subject)
        seen: dict[str, Any] = {name: probe.result() for name, probe in probes.items()}
        notes = ("updates skipped: fp16 gradients overflowed in the timed steps",)
        run = replace(
            self.run,
            clock=clock.result(),
            parameters=sum(p.numel() for p in subject.step.model.parameters()),
            notes=notes if skipped else (),
            losses=() if spec.mode == "infer" else tuple(float(loss) for loss in losses),
            **seen,
        )
        run = _with_figures(run, main_matmul_dtype(run.ran, parts.matmul_dtype))
        return _check_techniques(run)


def _with_figures(run: Run, dtype: str) -> Run:
    """Add the utilization and the notes that a reader of the numbers must see."""
    assert run.clock is not None and run.work is not None
    device = run.environment.device_name if run.spec.device == "cuda" else run.environment.cpu
    figures = utilization(run.work, run.clock.step.median, device, dtype, run.spec.peak_tflops)
    notes = [*run.notes, figures.warning] if figures.warning else [*run.notes]
    notes += clock_notes(run.counters, run.spec.device == "cuda")
    if abs(run.clock.agreement - 1) > CLOCK_TOLERANCE:
        notes.append(f"clocks differ: steps sum to {run.clock.agreement:.3f} of the wall time")
    notes += run.clock.cautions()
    if run.substituted:
        notes.append(run.substituted)
    if run.ran and run.ran.fp8_text:
        notes.append(run.ran.fp8_text)
    if run.compilation and run.compilation.graphs_in_window:
        graphs = run.compilation.graphs_in_window
        notes.append(f"still compiling: {graphs} new graphs while the clock ran")
    if not all(math.isfinite(loss) for loss in run.losses):
        notes.append("loss not finite: the step runs, but it does not train")
    return replace(run, figures=figures, notes=tuple(notes))


def _check_techniques(run: Run) -> Run:
    """Compare what ran with what was asked: fail on a mismatch, note what is unverified."""
    mismatch = find_mismatch(run)
    if mismatch:
        return replace(run, status="failed", reason=f"{mismatch[0].upper()}{mismatch[1:]}.")
    asked = run.spec.recipe.techniques.items()
    doubts = [technique(name).unverified(settings, run) for name, settings in asked]
    return replace(run, notes=(*run.notes, *filter(None, doubts)))


def find_mismatch(run: Run) -> str:
    """Return how what ran differs from what the recipe asks for; "" when it does not."""
    asked = run.spec.recipe.techniques.items()
    found = (technique(name).mismatch(settings, run) for name, settings in asked)
    return next(filter(None, found), "")


def clean_up() -> None:
    """Free what a failed or finished trial held, so that the next one starts clean."""
    gc.collect()
    torch._dynamo.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
