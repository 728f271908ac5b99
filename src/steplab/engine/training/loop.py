"""The training loop: fetch, step, report, validate, save; until the end or a signal."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import steplab
from steplab.codec import decode, encode
from steplab.data.loader import Loader
from steplab.data.order import Position
from steplab.engine import checkpoint
from steplab.engine.assemble import assemble
from steplab.engine.meter import Meter
from steplab.engine.signals import Stop
from steplab.engine.training.data import training_windows, validation_windows
from steplab.engine.training.log import StepReport, TrainingLog
from steplab.engine.training.schedule import learning_rate, set_learning_rate
from steplab.engine.training.trace import LAST_STEP, StepTrace, traced
from steplab.engine.training.validate import validate
from steplab.errors import MeasurementError, Unsupported
from steplab.probes.counters import NvmlReader
from steplab.record.run import now
from steplab.spec.training import TrainSpec
from steplab.workloads.workload import StepOutput


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    step: int
    saved: Path | None  # the newest checkpoint of this run
    stopped: bool  # by a signal, before the last step
    metrics: dict[str, float]  # last losses, validation included


def train(spec: TrainSpec, log: TrainingLog, stop: Stop, resume: Path | None = None) -> Outcome:
    """Train to the end of the spec, from scratch or from the checkpoint `resume`."""
    session = Session(spec, log)
    if resume is not None:
        session.resume(resume)
    try:
        return session.run(stop)
    except torch.OutOfMemoryError as error:
        raise Unsupported(
            f"Out of memory in step {session.step_number + 1}: {str(error).split('. ')[0]}.",
            "Use a smaller --batch-size with --accumulate, or --recipe precision=bf16.",
        ) from None


class Session:
    """One run: the step, its data, its Meter and where it stands."""

    def __init__(self, spec: TrainSpec, log: TrainingLog) -> None:
        self.spec, self.settings, self.log = spec, spec.settings, log
        self.step = assemble(spec.run_spec())
        self.device = self.step.parts.device
        self.windows = training_windows(spec)
        self.held_out = validation_windows(spec)
        self.position = Position(0, 0)
        self.step_number = 0
        self.saved: Path | None = None
        self.metrics: dict[str, float] = {}
        self.since_report: list[StepOutput] = []
        workload, batch = self.step.workload, self.settings.batch_size
        self.tokens = workload.tokens(batch) * self.settings.accumulate
        work = workload.work(batch, "full", {})
        flops = work.model / work.tokens if work and work.model else None
        self.meter = Meter(
            self.step.model,
            flops_per_token=flops,
            peak_tflops=self.settings.mfu_peak_tflops,
            dtype=self.step.parts.matmul_dtype,  # type: ignore[arg-type]
        )
        self.step.watch = self.meter.phase
        wanted = self.settings.log_perf_metrics and self.device.type == "cuda"
        self.counters = NvmlReader.open() if wanted else None

    def resume(self, path: Path) -> None:
        """Go back to a checkpoint: weights, optimizer, scaler, random numbers, data position."""
        assert self.step.optimizer is not None
        progress = checkpoint.restore(
            path, self.step.model, self.step.optimizer, self.step.parts.scaler
        )
        self.step_number = progress.step
        self.position = decode(Position, dict(progress.position), "data position")
        self.metrics = dict(progress.metrics)
        self.saved = path
        self.log.say(f"resumed {path} at step {self.step_number}")

    def run(self, stop: Stop) -> Outcome:
        """Step until the end, or until a signal asks to stop."""
        trace_path = Path(self.settings.checkpoint_dir) / "profiler" / "chrome_trace.json"
        on_cuda = self.device.type == "cuda"
        with (
            Loader(
                self.windows,
                self.settings.batch_size,
                self.settings.seed,
                self.device,
                position=self.position,
                workers=self.settings.workers,
            ) as loader,
            traced(self.settings.profile, on_cuda, trace_path) as trace,
        ):
            first = self.step_number
            while self.step_number < self.settings.total_steps and not stop.requested:
                self._one_step(loader)
                trace.step()
                if self.settings.profile and self.step_number - first == LAST_STEP:
                    self.log.say(f"trace of step {self.step_number} in {trace_path}")
        return self._finish(stop, trace, self.step_number - first)

    def _one_step(self, loader: Loader) -> None:
        batches = [next(loader) for _ in range(self.settings.accumulate)]
        number = self.step_number + 1
        rate = learning_rate(self.settings, number)
        assert self.step.optimizer is not None
        set_learning_rate(self.step.optimizer, rate)
        with self.meter.step(tokens=self.tokens):
            self.since_report.append(self.step(batches))
        self.step_number, self.position = number, loader.position
        self.log.advance(number)
        if number % self.settings.log_every == 0:
            self._report(rate)
        every = self.settings.validate_every
        last = number == self.settings.total_steps
        if last or (every and number % every == 0):
            self._validate()
        every = self.settings.checkpoint_every
        if every and (last or number % every == 0):
            self.save()

    def _report(self, rate: float) -> None:
        """Read the losses since the last report: the only wait for the device in the loop."""
        names = [n for n, v in self.since_report[0].metrics.items() if v.ndim == 0]
        loss = float(torch.stack([out.loss for out in self.since_report]).mean())
        parts = {
            name: float(torch.stack([out.metrics[name] for out in self.since_report]).mean())
            for name in names
        }
        self.since_report = []
        self._refuse_non_finite(loss)
        counters = self.counters.read() if self.counters else {}
        meter = self.meter.metrics()
        self.metrics |= {"loss": loss, **parts}
        self.log.report(StepReport(self.step_number, loss, parts, rate, meter, counters))

    def _validate(self) -> None:
        found = {
            name: validate(self.step, windows, self.settings)
            for name, windows in self.held_out.items()
        }
        if found:
            self.metrics |= found
            words = " ".join(f"{name}={value:.4f}" for name, value in found.items())
            self.log.say(f"validation step={self.step_number} {words}")
            named = {f"{name}/pred": value for name, value in found.items()}
            self.log.write(self.step_number, named)

    def save(self) -> Path:
        """Write a checkpoint, unless the losses since the last report are not finite."""
        if self.since_report:
            self._refuse_non_finite(float(self.since_report[-1].loss))
        assert self.step.optimizer is not None
        progress = checkpoint.Progress(
            step=self.step_number,
            position=encode(self.position),
            spec=encode(self.spec),
            metrics=self.metrics,
            steplab=steplab.__version__,
            torch=torch.__version__,
            created=now(),
        )
        self.saved = checkpoint.save(
            Path(self.settings.checkpoint_dir),
            self.step.model,
            self.step.optimizer,
            self.step.parts.scaler,
            progress,
            self.settings.keep_last,
        )
        return self.saved

    def _refuse_non_finite(self, loss: float) -> None:
        if math.isfinite(loss):
            return
        kept = f"{self.saved} is intact." if self.saved else "No checkpoint was written yet."
        raise MeasurementError(
            f"The loss is {loss} at step {self.step_number}; training has diverged. {kept}",
            "Lower --lr, or look at the data.",
        )

    def _finish(self, stop: Stop, trace: StepTrace, steps: int) -> Outcome:
        if self.settings.profile and steps < LAST_STEP:
            self.log.say(f"no trace: step {LAST_STEP} would have been recorded")
        unfinished = self.step_number < self.settings.total_steps
        if unfinished and self.settings.checkpoint_every:
            self.save()
        return Outcome(self.step_number, self.saved, stop.requested and unfinished, self.metrics)


def describe_parameters(total: int, active: int) -> str:
    """`params total=538.13M (538,130,793) active=198.39M (198,392,169)`."""
    return f"params total={total / 1e6:.2f}M ({total:,}) active={active / 1e6:.2f}M ({active:,})"


def peak_memory_line(session_device: torch.device, precision: str) -> str:
    """`run model=NVIDIA H200 precision=bf16 peak_vram_gb=53.80`; on a CPU the device alone."""
    if session_device.type != "cuda":
        return f"run model=cpu precision={precision}"
    name = torch.cuda.get_device_name(session_device)
    peak: Any = torch.cuda.max_memory_allocated(session_device) / 2**30
    return f"run model={name} precision={precision} peak_vram_gb={peak:.2f}"
