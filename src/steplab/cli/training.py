"""The torch side of `steplab train`: runs a spec and shows how it goes."""

from __future__ import annotations

import contextlib
import shlex
import signal
from pathlib import Path

import torch

from steplab.cli.progress import StepProgress
from steplab.core.errors import UserError
from steplab.core.spec import TrainSpec
from steplab.step.assemble import find_device
from steplab.train.checkpoint import read_progress
from steplab.train.checkpoint_folder import lock_checkpoint_folder, newest_checkpoint
from steplab.train.log import TrainingLog, describe_parameters, peak_memory_line
from steplab.train.loop import (
    TrainResult,
    stop_on_signal,
    train,
)
from steplab.workloads.workload import find_workload


def run_training(spec: TrainSpec, resume: Path | None) -> int:
    """Train, and return the exit code."""
    device = find_device(spec.device)
    precision = str(spec.recipe.techniques.get("precision", {}).get("dtype", "fp32"))
    say(describe_parameters(*_parameters(spec)))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    say(f"device model={name} precision={precision}")
    if not spec.settings.total_steps:
        return 0
    folder = Path(spec.settings.checkpoint_dir) if spec.settings.checkpoint_every else None
    held = newest_checkpoint(folder) if folder and resume is None else None
    if held is not None:
        workload = read_progress(held).spec["workload"]
        elsewhere = "choose another --checkpoint-dir."
        same = workload == spec.workload
        raise UserError(
            f"{folder} holds the checkpoints of another run, of {workload}.",
            f"Go on with it by --resume, or {elsewhere}" if same else elsewhere.capitalize(),
        )
    with contextlib.ExitStack() as stack:
        if folder:
            stack.enter_context(lock_checkpoint_folder(folder))
        stop = stack.enter_context(stop_on_signal())
        progress = stack.enter_context(StepProgress(spec.settings.total_steps))
        log = TrainingLog(progress.say, folder, spec.settings.log_perf_metrics, progress.advance)
        outcome = train(spec, log, stop, resume)
    say(peak_memory_line(device, precision))
    for line in closing_lines(spec, outcome):
        say(line)
    # As shells report it: 128 and the number of the signal.
    return 128 + signal.Signals[stop.signal] if outcome.stopped else 0


def closing_lines(spec: TrainSpec, outcome: TrainResult) -> list[str]:
    """Say where the run stands and how to go on."""
    total, folder = spec.settings.total_steps, spec.settings.checkpoint_dir
    where = f" --checkpoint-dir {shlex.quote(folder)}" if folder != "checkpoints" else ""
    lines = []
    if outcome.stopped:
        lines.append(f"stopped by a signal at step {outcome.step} of {total}")
    if outcome.saved is None:
        return [*lines, "no checkpoint was written (--checkpoint-every 0)"]
    lines.append(f"checkpoint {outcome.saved}")
    more = "" if outcome.stopped else f" --epochs {spec.settings.epochs + 1}"
    return [*lines, f"next: steplab train --resume{where}{more}"]


def say(line: str) -> None:
    """Print one line at once, also into a file."""
    print(line, flush=True)


def _parameters(spec: TrainSpec) -> tuple[int, int]:
    """Return (all, active) parameters; a model without a formula of its own has all active."""
    workload = find_workload(spec.workload).open(spec.config)
    with torch.device("meta"):
        model = workload.model()
    total = sum(p.numel() for p in model.parameters())
    active = getattr(workload, "active_parameters", None)
    return total, active() if active else total
