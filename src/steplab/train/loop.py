"""The training loop: fetch, step, report, validate, save; until the last step or a signal."""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from steplab.core import Run, TrainSettings, TrainSpec
from steplab.core.codec import decode, encode
from steplab.core.errors import MeasurementError, Unsupported, UserError
from steplab.data.loader import Loader
from steplab.data.sampling import Position
from steplab.data.series import fingerprint, notes
from steplab.data.windows import WindowSet
from steplab.meter import Meter
from steplab.modules.optimizer import full_weights
from steplab.parallel.world import current_world, in_order
from steplab.probes.counters import NvmlReader, clock_notes
from steplab.step.assemble import assemble
from steplab.step.failures import is_out_of_memory, memory_sentence
from steplab.step.step import Step
from steplab.train.checkpoint import read_progress, restore_checkpoint, save_checkpoint
from steplab.train.checkpoint_files import (
    MODEL_FILE,
    TrainProgress,
    bytes_of_weights,
    lock_checkpoint_folder,
)
from steplab.train.data import describe_data, training_windows, validation_windows
from steplab.train.log import TRACED_STEP, StepReport, TrainingLog, trace_one_step
from steplab.train.pretrained import find_pretrained, load_pretrained
from steplab.train.record import TrainingRecord
from steplab.train.replay import Replay, run_identity
from steplab.train.slices import own_slice
from steplab.train.stop import Stop, StopVote
from steplab.workloads.workload import find_workload, is_user_model

READ_AHEAD = 4  # batches that the loader's threads fetch ahead, whatever the recipe asks for
WARMUP_SHARE = 0.05  # of all steps, where --warmup-steps is not given


@dataclass(frozen=True)
class TrainResult:
    """How a run ended."""

    step: int
    saved: Path | None  # the newest checkpoint of this run
    stopped: bool  # by a signal, before the last step
    metrics: dict[str, float]  # last losses, validation included
    run: Run | None = None  # its last steps, as `bench` measures them; None on other ranks


def train(spec: TrainSpec, log: TrainingLog, stop: Stop, resume: Path | None = None) -> TrainResult:
    """Train to the last step of the spec, from new weights or from the checkpoint `resume`."""
    trainer = None  # until the model is built
    if resume is not None:
        entry = find_workload(spec.workload, spec.source)
        entry.check_weights(spec.config, bytes_of_weights(resume), resume / MODEL_FILE)
    try:
        trainer = Trainer(spec, log)
        if resume is not None:
            trainer.resume(resume)
        elif spec.settings.from_checkpoint:
            trainer.start_from(Path(spec.settings.from_checkpoint))
        return trainer.run(stop)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise _out_of_memory(error, trainer) from None


def _out_of_memory(error: BaseException, trainer: Trainer | None) -> Unsupported:
    why = memory_sentence(error)
    if trainer is None:
        return Unsupported(f"The model does not fit: {why}.", "Choose a smaller --size.")
    return Unsupported(
        f"Out of memory in step {trainer.step_number + 1}: {why}.",
        "Use a smaller --batch-size with --accumulate, or --recipe precision=bf16.",
    )


class Trainer:
    """One run: the step, its data, its Meter, and how far it is."""

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
        self.since_report: list[dict[str, Tensor]] = []  # scalars of every step, on the device
        self.world = current_world()
        self.vote = StopVote() if self.world.size > 1 else None
        self.data = fingerprint(self.windows.series)
        self.run_id = run_identity(spec, self.data, self.device)
        self.replay = Replay(None)  # until it is known where the run begins
        workload, batch = self.step.workload, self.settings.batch_size
        self.tokens = workload.tokens(batch) * spec.micro_batches
        work = workload.work(batch, "full", {})
        # Tokens are those of all ranks, so each device does its share of a token's FLOPs.
        flops = work.model / work.tokens / spec.ranks if work and work.model else None
        self.meter = Meter(
            self.step.model,
            flops_per_token=flops,
            flops_formula=work.formula if work else "",
            peak_tflops=self.settings.mfu_peak_tflops,
            dtype=self.step.parts.matmul_dtype,  # type: ignore[arg-type]
        )
        self.step.watch = self.meter.phase
        self.record = TrainingRecord(self.step, spec, self.meter) if self.world.is_first else None
        wanted = self.settings.log_perf_metrics and self.device.type == "cuda"
        self.counters = NvmlReader.open() if wanted else None

    def start_from(self, path: Path) -> None:
        """Load the weights at `path` and nothing else: this is step 0 of a new run."""
        workload = find_workload(self.spec.workload, self.spec.source)
        found = find_pretrained(path, workload if is_user_model(workload.name) else None)
        with full_weights(self.step.optimizer):
            load_pretrained(found, self.step.model, self.spec.config)
        self.log.say(f"weights of {path}")

    def resume(self, path: Path) -> None:
        """Return to a checkpoint: weights, optimizer, scaler, random generators, data position."""
        assert self.step.optimizer is not None
        progress = restore_checkpoint(
            path, self.step.model, self.step.optimizer, self.step.parts.scaler
        )
        saved = dict(progress.position)
        if saved.pop("data", self.data) != self.data:
            raise UserError(
                f"{self.windows.series.name} holds other series than those {path} was trained on.",
                "Resume with the same data, or start a new run in another --checkpoint-dir.",
            )
        self.step_number = progress.step
        if self.step.parts.scheme is not None:
            self.step.parts.scheme.steps_done = progress.step
        self.position = decode(Position, saved, "data position")
        self.metrics = dict(progress.metrics)
        self.saved = path
        self.log.say(f"resumed {path} at step {self.step_number}")

    def run(self, stop: Stop) -> TrainResult:
        """Train until the last step, or until a signal asks to stop.

        What is refused has been refused before: only from here on files are written.
        """
        folder = Path(self.settings.checkpoint_dir)
        saves = self.settings.checkpoint_every and self.world.is_first
        with lock_checkpoint_folder(folder) if saves else contextlib.nullcontext():
            self.log.open()
            return self._run(stop)

    def _run(self, stop: Stop) -> TrainResult:
        if self.saved is not None:
            # Rows of later steps that stand above this one belong to the interrupted run.
            self.log.write(self.step_number, {"train/resumed_at": float(self.step_number)})
        self._announce()
        trace_path = Path(self.settings.checkpoint_dir) / "profiler" / "chrome_trace.json"
        on_cuda = self.device.type == "cuda"
        self.replay = Replay(self.log.file, self.run_id, self.step_number, on_cuda)
        self.log.advance(self.step_number)  # a resumed run does not begin at 0
        traced = self.settings.profile and self.world.is_first
        with (
            Loader(
                self.windows,
                self.settings.batch_size,
                self.settings.seed,
                self.device,
                position=self.position,
                prefetch=max(READ_AHEAD, self.step.parts.batches_ahead),
                workers=self.settings.workers,
                rank=self.world.rank,
                ranks=self.world.size,
            ) as loader,
            trace_one_step(traced, on_cuda, trace_path, self._say_of_step) as step_done,
        ):
            first = self.step_number
            while self.step_number < self.settings.total_steps and not self._is_to_stop(stop):
                self._one_step(loader)
                step_done()
        return self._finish(stop, self.step_number - first)

    def _is_to_stop(self, stop: Stop) -> bool:
        """Whether to end before the next step; all ranks find the same."""
        return stop.requested if self.vote is None else self.vote.take(stop)

    def _say_of_step(self, line: str) -> None:
        self.log.say(f"step {self.step_number}: {line}")

    def _announce(self) -> None:
        """Say what will be trained on, and what will not be done."""
        total = self.settings.total_steps
        if self.step_number >= total:
            self.log.say(f"nothing to do: already at step {self.step_number} of {total}")
        self.log.say(describe_data(self.windows, self.spec))
        if not self.settings.checkpoint_every:
            self.log.say("no checkpoints and no metrics.jsonl: --checkpoint-every 0")
        if not self.held_out or not self.settings.validation_batches:
            self.log.say("no validation: give --val-path")
        for note in notes(self.windows.series):
            self.log.say(f"note: {note}")
        if self.settings.log_perf_metrics:
            self.log.say(f"flops {self.meter.formula}")
            unread = clock_notes(None, self.device.type == "cuda") if not self.counters else []
            for note in unread:
                self.log.say(f"note: {note}")

    def _one_step(self, loader: Loader) -> None:
        batches = [next(loader) for _ in range(self.settings.accumulate)]
        number = self.step_number + 1
        assert self.step.optimizer is not None
        set_learning_rate(self.step.optimizer, learning_rate(self.settings, number))
        with self.meter.step(tokens=self.tokens):
            output = self.step(batches)
        scalars = {name: value for name, value in output.metrics.items() if value.ndim == 0}
        self.since_report.append({"loss": output.loss, **scalars})
        self.step_number, self.position = number, loader.position
        self._between_steps(last=number == self.settings.total_steps)

    def _between_steps(self, last: bool) -> None:
        """Report, validate and save when due; none of it counts as waiting for data."""

        def due(every: int) -> bool:
            return last or (every > 0 and self.step_number % every == 0)

        self.log.advance(self.step_number)
        check = due(self.settings.validate_every)
        save = self.settings.checkpoint_every > 0 and due(self.settings.checkpoint_every)
        # Also before a save, so that a run that begins there reports over the same steps again.
        report = save or due(self.settings.log_every)
        if report:
            self._report()
        if check:
            self._validate()
        if save:
            self._save_or_warn(last)
        if report or check or save:
            self.meter.pause()

    def _report(self) -> None:
        """Read the losses since the last report: the only wait for the device in the loop."""
        if not self.since_report:
            return
        means = {
            name: float(torch.stack([scalars[name] for scalars in self.since_report]).mean())
            for name in self.since_report[0]
        }
        steps = len(self.since_report)
        self.since_report = []
        self._refuse_non_finite(means["loss"], "loss")
        self.replay.check(self.step_number, steps, means["loss"])
        self.metrics |= means
        counters = self.counters.read() if self.counters else {}
        rate = learning_rate(self.settings, self.step_number)
        meter, loss = self.meter.metrics(), means.pop("loss")
        for note in self.meter.notes():
            self.log.say(f"warning: {note}")
        about = {"run": self.run_id, "steps": steps, **encode(self.position)}
        self.log.report(StepReport(self.step_number, loss, means, rate, meter, counters, about))
        for line in self.record.settle() if self.record else []:
            self.log.say(line)

    def _validate(self) -> None:
        if not self.settings.validation_batches:
            return
        found = {
            name: validate(self.step, windows, self.settings)
            for name, windows in self.held_out.items()
        }
        for name, value in found.items():
            self._refuse_non_finite(value, f"{name} loss")
        if found:
            self.metrics |= found
            words = " ".join(f"{name}={value:.4f}" for name, value in found.items())
            self.log.say(f"validation step={self.step_number} {words}")
            named = {f"{name}/pred": value for name, value in found.items()}
            self.log.write(self.step_number, named)

    def _save_or_warn(self, last: bool) -> None:
        """Save; a full disk in mid-run is a warning, and the next save tries again."""
        try:
            self.save()
        except UserError as error:
            if last:
                raise
            self.log.say(f"warning: no checkpoint of step {self.step_number}: {error}")

    def save(self) -> Path:
        """Write a checkpoint, unless a weight is not finite: the newest one must be good."""
        weights = [own_slice(parameter.detach())[1] for parameter in self.step.model.parameters()]
        norm = torch.stack(torch._foreach_norm(weights)).sum()
        norms = in_order(norm.reshape(1).cpu())  # of all ranks, so that all save or none
        self._refuse_non_finite(float(norms.sum()), "norm of the weights")
        optimizer = self.step.optimizer
        assert optimizer is not None
        progress = TrainProgress(
            step=self.step_number,
            position={**encode(self.position), "data": self.data},
            spec=encode(self.spec),
            metrics=self.metrics,
        )
        self.saved = save_checkpoint(
            Path(self.settings.checkpoint_dir),
            self.step.model,
            optimizer,
            self.step.parts.scaler,
            progress,
            self.settings.keep_last,
        )
        return self.saved

    def _refuse_non_finite(self, value: float, what: str) -> None:
        if math.isfinite(value):
            return
        kept = f"{self.saved} is intact." if self.saved else "No checkpoint was written yet."
        raise MeasurementError(
            f"The {what} is {value} at step {self.step_number}; training has diverged. {kept}",
            "Lower --lr, or look at the data.",
        )

    def _finish(self, stop: Stop, steps: int) -> TrainResult:
        if self.settings.profile and steps < TRACED_STEP:
            self.log.say(f"no trace: step {TRACED_STEP} would have been recorded")
        for reason, count in self.windows.skipped.items():
            if count:
                self.log.say(f"{count:,} series were left out: {reason}")
        unfinished = self.step_number < self.settings.total_steps
        if unfinished:
            self._report()
        if unfinished and self.settings.checkpoint_every and not self._is_saved():
            self.save()
        run = self.record.finish(self.tokens, self.metrics) if self.record else None
        return TrainResult(
            self.step_number, self.saved, stop.requested and unfinished, self.metrics, run
        )

    def _is_saved(self) -> bool:
        return self.saved is not None and read_progress(self.saved).step == self.step_number


def learning_rate(settings: TrainSettings, step: int) -> float:
    """Return the rate of optimizer step `step`, counted from 1: linear warm-up, then a cosine."""
    total = max(settings.total_steps, 1)
    asked = settings.warmup_steps
    warmup = max(1, round(WARMUP_SHARE * total)) if asked < 0 else asked
    if step <= warmup:
        return settings.lr * step / warmup
    progress = min(1.0, (step - warmup) / max(total - warmup, 1))
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return settings.min_lr + (settings.lr - settings.min_lr) * cosine


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the rate of all groups; a tensor is filled in place, so that compiled code sees it."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], torch.Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


@torch.no_grad()
def validate(step: Step, windows: WindowSet, settings: TrainSettings) -> float:
    """Return the mean prediction loss over some batches, always the same ones.

    A fixed seed draws them from all series; the first windows would all be of one series.
    Runs eagerly: a compiled model would need a second set of graphs, without gradients. A model
    whose training compares a token with later ones decides here by the token alone.
    Ranks share the batches out; where they do not come out even, the surplus is not counted.
    """
    world = current_world()
    batch = min(settings.batch_size, len(windows))
    count = min(settings.validation_batches, len(windows) // batch)
    model, device = step.model, step.parts.device
    causal_routing = getattr(model, "causal_routing", contextlib.nullcontext)
    model.eval()
    losses = []
    try:
        with (
            causal_routing(),
            Loader(windows, batch, 0, device, rank=world.rank, ranks=world.size) as loader,
            torch.compiler.set_stance("force_eager"),
            step.parts.forward_context(),
        ):
            for _ in range(math.ceil(count / world.size)):
                loss, metrics = step.workload.loss(model, next(loader))
                losses.append(metrics.get("pred", loss).float())
    finally:
        model.train()
        if step.parts.scheme is not None:
            step.parts.scheme.release()
    return float(in_order(torch.stack(losses))[:count].mean())
