"""A Reading: what the Meter says of a window of steps, as a line, as metrics and in log files."""

from __future__ import annotations

import errno
import io
import json
import os
import platform
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import time
from typing import Any, Protocol

import torch

from steplab.core import Clock, Figures, Memory, Samples, Work, units
from steplab.core.atomic import append_row
from steplab.core.errors import Unsupported, UserError
from steplab.core.output_file import output_file
from steplab.hardware.mfu import utilization
from steplab.meter.step_timer import StepSamples

STATUS = Path("/proc/self/status")
NO_DTYPE = Figures(None, None, None, None, "the dtype of the matrix products is not known")


@dataclass(frozen=True)
class MfuBasis:
    """What turns a rate of tokens into MFU: FLOPs per token, a device and a dtype."""

    flops_per_token: float | None
    device_name: str
    dtype: str | None  # None: unknown, and then there is no peak
    peak_tflops: float | None  # the user's own dense peak; None: the catalog's

    def figures(self, tokens_per_s: float | None) -> Figures:
        """Return the utilization at `tokens_per_s`, from the work of one second."""
        if self.dtype is None:
            return NO_DTYPE
        flops = self.flops_per_s(tokens_per_s)
        work = Work(round(tokens_per_s or 0), model=flops, palm=None, hardware=None)
        return utilization(work, 1e3, self.device_name, self.dtype, self.peak_tflops)

    def flops_per_s(self, tokens_per_s: float | None) -> float | None:
        """Model FLOPs per second at `tokens_per_s`; None where either is unknown."""
        if tokens_per_s is None or self.flops_per_token is None:
            return None
        return tokens_per_s * self.flops_per_token


@dataclass(frozen=True)
class Reading:
    """The typical step of a window, the one with the median time; None means unknown.

    Its times add up: wait, phases and what lies between them. `data_stall` is a share of the whole
    window's time, as the typical step would not show a loader that makes every fourth step wait;
    `phase_ms` are medians, as it need not enter every phase.
    """

    step: int  # steps completed so far
    step_ms: float | None
    host_ms: float | None
    tokens_per_s: float | None
    data_stall: float | None
    wait_ms: float | None
    flops_per_s: float | None
    figures: Figures
    phases_ms: float | None  # all phases of the typical step
    phase_ms: Mapping[str, float]  # over the steps that entered the phase
    memory: Memory | None
    launches: int | None
    notes: tuple[str, ...] = ()

    @property
    def is_impossible(self) -> bool:
        """Whether more than the peak was reached: peak, dtype or FLOP count is wrong."""
        return self.figures.mfu is not None and self.figures.mfu > 1

    def line(self) -> str:
        """One line to read, with notes as warnings at its end."""
        mark = " (not possible)" if self.is_impossible else ""
        words = [
            f"step {self.step:,}",
            units.milliseconds(self.step_ms),
            f"{units.count(self.tokens_per_s)} tok/s",
            f"MFU {units.percent(self.figures.mfu)}{mark}",
            f"data {units.percent(self.data_stall)}",
            f"peak {units.bytes_(self.memory.peak if self.memory else None)}",
            f"launches {units.count(self.launches)}",
            *(f"warning: {note}" for note in self.notes),
        ]
        return "  ".join(words)

    def metrics(self) -> dict[str, float]:
        """Numbers by the names that loggers use, MFU as a fraction; unknown ones are left out."""
        stall, flops = self.data_stall, self.flops_per_s
        found = {
            "train/toks_per_sec": self.tokens_per_s,
            "train/step_time_ms": self.step_ms,
            "train/host_time_ms": self.host_ms,
            "train/data_stall_pct": None if stall is None else stall * 100,
            "train/data_wait_ms": self.wait_ms,
            "train/phases_ms": self.phases_ms,
            "train/tflops": None if flops is None else flops / 1e12,
            "train/mfu": self.figures.mfu,
            "train/mfu_palm": self.figures.mfu_palm,
            "train/peak_mem_bytes": self.memory.peak if self.memory else None,
            "train/kernel_launches_per_step": self.launches,
            **{f"train/phase_ms/{name}": ms for name, ms in self.phase_ms.items()},
        }
        return {name: value for name, value in found.items() if value is not None}


@dataclass(frozen=True)
class MeterSummary(Clock):
    """The Clock of a whole training run, and what else the Meter saw.

    `data_wait` is the time between two steps. `window_ms` is the sum of the periods on the host's
    clock, without a synchronization at either end.
    """

    tokens: Samples
    tokens_per_second: float | None  # median over the steps
    memory: Memory | None
    figures: Figures
    formula: str  # what `figures.mfu` counts
    dtype: str | None  # whose peak MFU refers to: as given, or as inspected
    kernel_launches: int | None  # of the inspected step
    inspected_step: int | None  # ran under the profiler, so it is not among the samples
    notes: tuple[str, ...] = ()


def read_window(
    samples: StepSamples,
    first: int,
    basis: MfuBasis,
    step: int,
    memory: Memory | None,
    launches: int | None,
) -> Reading:
    """Return the Reading of all rows from `first` on, without notes."""
    tokens_per_s, wall_ms = samples.tokens_per_s(first), sum(samples.wall_ms[first:])
    one = samples.typical(first)
    entered = {
        name: [ms for ms in column[first:] if ms > 0] for name, column in samples.phase_ms.items()
    }
    return Reading(
        step=step,
        step_ms=None if one is None else samples.step_ms[one],
        host_ms=None if one is None else samples.host_ms[one],
        tokens_per_s=tokens_per_s,
        data_stall=sum(samples.wait_ms[first:]) / wall_ms if wall_ms > 0 else None,
        wait_ms=None if one is None else samples.wait_ms[one],
        flops_per_s=basis.flops_per_s(tokens_per_s),
        figures=basis.figures(tokens_per_s),
        phases_ms=None if one is None else samples.all_phases_ms(one),
        phase_ms={name: median(values) for name, values in entered.items() if values},
        memory=memory,
        launches=launches,
    )


def read_memory(device: torch.device) -> Memory | None:
    """Return bytes held now and at most so far; None where the system does not say.

    Called between steps. It resets no counter: those belong to the user.
    """
    if device.type == "cuda":
        return Memory(
            before=torch.cuda.memory_allocated(device),
            peak=torch.cuda.max_memory_allocated(device),
            reserved=torch.cuda.max_memory_reserved(device),
            total=torch.cuda.get_device_properties(device).total_memory,
            source="cuda allocator",
        )
    now, peak = status_bytes("VmRSS"), status_bytes("VmHWM")
    if now is None or peak is None:
        return None
    return Memory(now, peak, reserved=None, total=None, source="process resident set")


def status_bytes(key: str) -> int | None:
    """Return a size from this process's status: VmRSS now, VmHWM at most; None outside Linux."""
    try:
        lines = STATUS.read_text().splitlines()
    except OSError:
        return None
    line = next((text for text in lines if text.startswith(f"{key}:")), None)
    return int(line.split()[1]) * 1024 if line else None


class Sink(Protocol):
    """Takes one reading at a time; may raise an OSError while writing."""

    path: Path

    def write(self, step: int, metrics: Mapping[str, float], about: Mapping[str, Any]) -> None:
        """Write the metrics of `step`; `about` says under which conditions they hold."""
        ...


class JsonlSink:
    """One JSON object per reading, appended to the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        output_file(path, "")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("a").close()
        except OSError as error:
            raise _not_writable(path, error) from None

    def write(self, step: int, metrics: Mapping[str, float], about: Mapping[str, Any]) -> None:
        """Append one line; the system has it before this returns."""
        line = json.dumps({"step": step, **metrics, **about}, allow_nan=False)
        append_row(self.path, line)


class TensorBoardSink:
    """Scalars in an event file of its own; older event files in the folder stay.

    Not by torch's SummaryWriter: its thread prints a traceback when the disk is full, and writes
    nothing from then on.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            from tensorboard.compat.proto.event_pb2 import Event
            from tensorboard.summary.writer.record_writer import RecordWriter
        except ImportError:
            raise Unsupported(
                "Writing TensorBoard files needs tensorboard, which is not installed.",
                "pip install tensorboard",
            ) from None
        self._event, self._records = Event, RecordWriter
        writer = f"{platform.node()}.{os.getpid()}.{secrets.token_hex(2)}"
        self._file = path / f"events.out.tfevents.{time():.0f}.{writer}"
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._append(Event(wall_time=time(), file_version="brain.Event:2"))
        except OSError as error:
            raise _not_writable(path, error) from None

    def write(self, step: int, metrics: Mapping[str, float], about: Mapping[str, Any]) -> None:
        """Add one scalar per metric; the system has them before this returns."""
        event = self._event(wall_time=time(), step=step)
        for name, value in metrics.items():
            event.summary.value.add(tag=name, simple_value=value)
        self._append(event)

    def _append(self, event: Any) -> None:
        record = io.BytesIO()
        self._records(record).write(event.SerializeToString())
        with self._file.open("ab", buffering=0) as file:
            end = file.tell()
            try:
                if file.write(record.getbuffer()) < len(record.getbuffer()):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            except OSError:
                file.truncate(end)  # TensorBoard would read nothing behind half a record
                raise


def open_sinks(jsonl: Path | str | None, tensorboard: Path | str | None) -> list[Sink]:
    """Return the sinks asked for; one that cannot be written fails here, not at step 1000."""
    sinks: list[Sink] = []
    if jsonl is not None:
        sinks.append(JsonlSink(Path(jsonl)))
    if tensorboard is not None:
        sinks.append(TensorBoardSink(Path(tensorboard)))
    return sinks


def write_to_sinks(
    sinks: Sequence[Sink], step: int, metrics: Mapping[str, float], about: Mapping[str, Any]
) -> list[str]:
    """Write to all sinks; return a warning for each that failed.

    A full disk must not end a training run.
    """
    warnings = []
    for sink in sinks:
        try:
            sink.write(step, metrics, about)
        except OSError as error:
            reason = error.strerror or str(error)
            warnings.append(f"warning: {sink.path} was not written: {reason}")
    return warnings


def _not_writable(path: Path, error: OSError) -> UserError:
    reason = error.strerror or str(error)
    return UserError(f"Cannot write {path}: {reason}.", "Choose another path.")
