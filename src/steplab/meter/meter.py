"""Meter: tokens per second, MFU, phases, data stall and memory of a loop that is not ours."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, get_args

from torch import nn

from steplab.core import Samples
from steplab.core.errors import UserError, did_you_mean
from steplab.core.run import now
from steplab.meter.reading import Reading, Yardstick, read_memory, read_window
from steplab.meter.sinks import open_sinks
from steplab.meter.step_timer import MeterSummary, PhaseScope, StepScope, StepTimer, device_name

TABLES = (nn.Embedding, nn.EmbeddingBag)  # looked up, not multiplied


def count_flops_per_token(model: nn.Module) -> tuple[float | None, str]:
    """Return (FLOPs of one token's forward and backward or None, the formula in words).

    Counts the 2-D parameters of all modules but embeddings, a shared one once; a head that is
    tied to the embedding is multiplied and so counts. What the formula leaves out or cannot know
    is said in its words.
    """
    owned = [
        parameter
        for module in model.modules()
        if not isinstance(module, TABLES)
        for parameter in module.parameters(recurse=False)
    ]
    distinct = list({id(parameter): parameter for parameter in owned}.values())
    matrices = [parameter for parameter in distinct if parameter.ndim == 2]
    weights = sum(parameter.numel() for parameter in matrices)
    frozen = sum(parameter.numel() for parameter in matrices if not parameter.requires_grad)
    higher = sum(parameter.numel() for parameter in distinct if parameter.ndim > 2)
    words = [f"6 x {weights:,} matmul parameters per token", "attention not counted"]
    if higher:
        words.append(f"{higher:,} weights of more than 2 dimensions not counted")
    if frozen:
        words.append(f"{frozen:,} frozen ones counted as trained")
    return (6.0 * weights or None), "; ".join(words)


Dtype = Literal["fp32", "tf32", "bf16", "fp16"]


class Meter:
    """Watches a training loop from inside, without making the device wait.

    ```python
    meter = steplab.Meter(model)
    for batch in loader:
        with meter.step(tokens=batch.numel()):
            with meter.phase("forward"): ...
            with meter.phase("backward"): ...
            with meter.phase("optimizer"): ...
        if meter.due(10):
            print(meter.line())
    ```

    A step's time is the period from the end of the step before to its own end. The time between
    that end and the entry of the step is the data stall, whatever the loop did meanwhile. Phases
    are device times on CUDA; they may be left out, or entered several times in a step. One step
    (`inspect_step`, None for no step) runs under the profiler, which counts its kernel launches
    and sees its dtypes, and is left out of every statistic. A step that raises is not counted.

    MFU needs three things: FLOPs per token (six per matmul weight unless given, see `formula`),
    the `dtype` that the matrix products run in (that of the inspected step unless given), and a
    dense peak (the catalog's unless given). Kernels that are no ATen calls are not seen: where
    most products are such kernels, give the dtype.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        flops_per_token: float | None = None,
        peak_tflops: float | None = None,
        dtype: Dtype | None = None,
        inspect_step: int | None = 3,
        jsonl: Path | str | None = None,
        tensorboard: Path | str | None = None,
    ) -> None:
        if dtype is not None and dtype not in get_args(Dtype):
            raise UserError(f"dtype is {dtype!r}.", did_you_mean(str(dtype), get_args(Dtype)))
        _refuse_negative(
            flops_per_token=flops_per_token, peak_tflops=peak_tflops, inspect_step=inspect_step
        )
        # Kineto reads it when the first profiler of the process starts; without it the inspected
        # step prints two USDT lines to stderr (torch 2.13).
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
        self._model = model
        self._flops_per_token = flops_per_token
        self._peak_tflops = peak_tflops
        self._asked_dtype = dtype
        self._sinks = open_sinks(jsonl, tensorboard)
        self._watch = StepTimer(model, inspect_step)
        self._reading: Reading | None = None  # what was told last
        self._told_rows = 0  # samples that a Reading has covered already
        self._notes: dict[str, str] = {}  # subject -> what was said about it, once

    def step(self, tokens: int) -> StepScope:
        """Wrap one training step over `tokens` tokens, all its micro-batches together."""
        if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens <= 0:
            raise UserError(
                f"tokens must be a whole number above 0, not {tokens!r}.",
                "Pass the tokens of this step, as in batch.numel().",
            )
        return StepScope(self._watch, tokens)

    def phase(self, name: str) -> PhaseScope:
        """Wrap a part of the step; entered again in the same step, the times add up."""
        return self._watch.phase(name)

    def due(self, every: int) -> bool:
        """Whether the number of steps so far is a multiple of `every`."""
        if every < 1:
            raise UserError(f"due needs a number of steps above 0, not {every}.")
        return self._watch.count > 0 and self._watch.count % every == 0

    def pause(self) -> None:
        """Say that the loop does something else now (validates, saves): no data stall of the next.

        The step that follows is counted from its own entry.
        """
        self._watch.pause()

    def notes(self) -> tuple[str, ...]:
        """Return what must be said of the steps since the last line, each thing once in a life."""
        return self._read().notes

    def line(self) -> str:
        """Return one line about the steps since the last line."""
        return self._read().line()

    def metrics(self) -> dict[str, float]:
        """Return the numbers of the line and the phases by name; unknown ones are left out."""
        return self._read().metrics()

    def log(self) -> str:
        """Write the metrics to the JSONL file and to TensorBoard, and return the line."""
        began_s = perf_counter()
        reading, failures = self._read(), []
        for sink in self._sinks:
            try:
                sink.write(reading.step, reading.metrics(), self._conditions(reading))
            except OSError as error:
                # A full disk must not end a training run, but every line says so.
                reason = error.strerror or str(error)
                failures.append(f"warning: {sink.path} was not written: {reason}")
        self._watch.left_s += perf_counter() - began_s  # our own time is no data stall
        return "  ".join([reading.line(), *failures])

    def summary(self) -> MeterSummary:
        """Wait for the device and return every sample. For the end of the loop."""
        self._watch.marker.synchronise()
        self._watch.collect()
        samples, reading = self._watch.samples, self._read_from(row=0)
        return MeterSummary(
            step=samples.step(),
            host=Samples(tuple(samples.host_ms), "ms"),
            data_wait=samples.data_wait(),
            phases=samples.phases(samples.phase_ms),
            host_phases=samples.phases(samples.host_phase_ms),
            window_ms=sum(samples.wall_ms),
            source="cuda events" if self._watch.marker.on_cuda else "perf_counter",
            tokens=Samples(tuple(map(float, samples.tokens)), "tokens"),
            tokens_per_second=reading.tokens_per_s,
            memory=reading.memory,
            figures=reading.figures,
            formula=self.formula,
            dtype=self.dtype,
            kernel_launches=self._watch.inspected.launches,
            inspected_step=self._watch.inspected.step,
            notes=tuple(self._notes.values()),
        )

    @property
    def formula(self) -> str:
        """What MFU counts as the work of one token."""
        return self._work[1]

    @property
    def dtype(self) -> str | None:
        """What the matrix products run in, as given or as inspected; None while not known."""
        return self._asked_dtype or self._watch.inspected.dtype

    @cached_property
    def _work(self) -> tuple[float | None, str]:
        """FLOPs per token and their formula in words."""
        if self._flops_per_token is None:
            return count_flops_per_token(self._model)
        flops = self._flops_per_token
        return flops, f"{flops:g} FLOPs per token, given by the user"

    @cached_property
    def _device_name(self) -> str:
        return device_name(self._watch.marker.device)

    def _read(self) -> Reading:
        """Return the Reading of the steps since the last one; the same until a step has ended.

        Steps that the device has not finished fall to the next Reading: this one does not wait.
        """
        if self._reading is None or self._reading.step != self._watch.count:
            self._watch.collect()
            self._reading = self._read_from(self._told_rows)
            self._told_rows = len(self._watch.samples)
        return self._reading

    def _read_from(self, row: int) -> Reading:
        watch = self._watch
        memory = read_memory(watch.marker.device)
        yardstick = Yardstick(self._work[0], self._device_name, self.dtype, self._peak_tflops)
        reading = read_window(
            watch.samples, row, yardstick, watch.count, memory, watch.inspected.launches
        )
        return replace(reading, notes=self._new_notes(reading))

    def _new_notes(self, reading: Reading) -> tuple[str, ...]:
        """Return what has to be said and has not been; one note per subject in a Meter's life."""
        peak = "impossible" if reading.is_impossible else "peak"
        unseen, no_dtype = self._watch.uninspected, self._watch.inspected.why_no_dtype
        found = {
            "profiler": unseen and f"launches unknown: {unseen}.",
            peak: reading.figures.warning,
        }
        if self._asked_dtype is None and no_dtype:
            found["dtype"] = f"MFU unknown: {no_dtype}; pass dtype= ({', '.join(get_args(Dtype))})."
        new = {key: text for key, text in found.items() if text and key not in self._notes}
        self._notes |= new
        return tuple(new.values())

    def _conditions(self, reading: Reading) -> dict[str, Any]:
        found = {
            "time": now(),
            "device": self._device_name,
            "dtype": self.dtype,
            "formula": self.formula,
            "peak_source": reading.figures.peak_source,
            "inspected_step": self._watch.inspected.step,
            "notes": list(reading.notes),
        }
        return {name: value for name, value in found.items() if value}


def _refuse_negative(**settings: float | None) -> None:
    for name, value in settings.items():
        if value is not None and not value > 0:
            raise UserError(f"{name} must be more than 0, not {value}.")
