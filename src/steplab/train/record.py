"""The Run of a training: what `bench` says of a step, said of the steps that a training took."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace

from steplab.core import Clock, Ran, Run, Samples, TrainSpec, Work
from steplab.core.run import new_run
from steplab.meter import Meter
from steplab.meter.reading import MeterSummary
from steplab.probes.clock import Contention
from steplab.probes.compilation import CompilationProbe
from steplab.probes.environment import capture_environment
from steplab.probes.probe import Subject
from steplab.probes.ran import dispatched_impls
from steplab.probes.work import repeated
from steplab.step.step import Step
from steplab.workloads.workload import find_workload

KEPT_STEPS = 1000  # the last ones; a million would be a record of 100 MB


class TrainingRecord:
    """Follows a training from before its first step to its end."""

    def __init__(self, step: Step, spec: TrainSpec, meter: Meter) -> None:
        self.step, self.spec, self.meter = step, spec, meter
        overrides = find_workload(spec.workload, spec.source).overrides(spec.size, spec.config)
        run_spec = replace(spec.run_spec(), warmup=0, overrides=overrides)
        self.subject = Subject(step, iter(()), run_spec, capture_environment())
        self.compilation = CompilationProbe()
        self.compilation.begin(self.subject)
        self.contention = Contention()
        self.is_settled = False

    def settle(self) -> list[str]:
        """Say which kernels run, and what was compiled; once, when the first steps are over."""
        if self.is_settled:
            return []
        self.is_settled = True
        self.compilation.open_window(self.subject)
        ran = Ran(dispatched_impls(self.step.model)).impls_text
        return [*([f"ran {ran}"] if ran else []), *self.compiled_lines()]

    def compiled_lines(self) -> list[str]:
        """`compiled graphs=4 breaks=0 recompiles=0 first_step=12.3s`; nothing for eager steps."""
        self.compilation.close_window(self.subject)
        first = self.meter.summary().step.values[:1]
        self.compilation.first_seconds = first[0] / 1e3 if first else None
        found = self.compilation.result()
        if found is None:
            return []
        seconds = f"{found.first_seconds:.1f}s" if first else "unknown"
        counts = f"graphs={found.graphs} breaks={sum(found.breaks.values())}"
        return [f"compiled {counts} recompiles={len(found.recompiles)} first_step={seconds}"]

    def finish(self, tokens: int, metrics: Mapping[str, float]) -> Run | None:
        """Return the Run of the last steps; None where none was timed."""
        summary = self.meter.summary()
        if not summary.step.values:
            return None
        clock = self._clock(summary)
        self.compilation.close_window(self.subject)
        impls = dispatched_impls(self.step.model)
        spec = replace(self.subject.spec, steps=len(clock.step))
        counted = len(clock.step), len(summary.step)
        return replace(
            new_run(spec, self.subject.environment),
            command=tuple(sys.argv),
            clock=clock,
            memory=summary.memory,
            work=self._work(tokens, impls),
            figures=summary.figures,
            compilation=self.compilation.result(),
            ran=Ran(impls, kernel_launches=summary.kernel_launches),
            parameters=sum(p.numel() for p in self.step.model.parameters()),
            metrics=metrics,
            notes=(
                f"training: the last {counted[0]:,} of {counted[1]:,} timed steps",
                *summary.notes,
                *clock.cautions(),
            ),
        )

    def _clock(self, summary: MeterSummary) -> Clock:
        def tail(samples: Samples) -> Samples:
            return Samples(samples.values[-KEPT_STEPS:], samples.unit)

        step = self.meter.last_steps(KEPT_STEPS)
        return Clock(
            step=step,
            host=tail(summary.host),
            data_wait=tail(summary.data_wait),
            phases={name: tail(samples) for name, samples in summary.phases.items()},
            host_phases={name: tail(samples) for name, samples in summary.host_phases.items()},
            window_ms=sum(step.values),
            source=summary.source,
            contended=self.contention.share(),
        )

    def _work(self, tokens: int, impls: Mapping[str, tuple[str, ...]]) -> Work:
        ran = {op: names[-1] for op, names in impls.items()}
        spec = self.spec
        formula = self.step.workload.work(spec.settings.batch_size, "full", ran)
        if formula is None:
            return Work(tokens, None, None, None)
        return repeated(formula, spec.micro_batches)
