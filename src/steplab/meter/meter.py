"""Meter: tokens per second, MFU, phases, data stall and memory of a user's own loop."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, get_args

import torch
from torch import nn

from steplab.core import Samples
from steplab.core.errors import UserError, did_you_mean
from steplab.core.run import now
from steplab.meter.reading import (
    MeterSummary,
    MfuBasis,
    Reading,
    open_sinks,
    read_memory,
    read_window,
    write_to_sinks,
)
from steplab.meter.step_timer import PhaseScope, StepScope, StepTimer
from steplab.probes.ran import quiet_profiler
from steplab.workloads.misuse import check_model, describe

AGAIN = 2  # times as long as the slowest step that was told of
LOOKUP_TABLES = (nn.Embedding, nn.EmbeddingBag)  # not multiplied

Dtype = Literal["fp32", "tf32", "bf16", "fp16", "fp8"]


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

    A step's time is the period from the end of the previous step to its own end. The time from
    that end until the step is entered is the data stall, whatever the loop did meanwhile. Phases
    are device times on CUDA; they may be left out, or entered several times in a step. One step
    (`inspect_step`; None for none) runs under the profiler, which counts its kernel launches and
    sees its dtypes; it is left out of every statistic. A step that raises is not counted.

    MFU needs three things: FLOPs per token (six per matmul weight unless given, see `formula`;
    `flops_formula` says in words how you counted them),
    the `dtype` of the matrix products (that of the inspected step unless given), and a dense peak
    (from the catalog unless given). Only ATen calls are seen: if most matrix products run in
    kernels of your own, give the dtype.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        flops_per_token: float | None = None,
        flops_formula: str = "",
        peak_tflops: float | None = None,
        dtype: Dtype | None = None,
        inspect_step: int | None = 3,
        jsonl: Path | str | None = None,
        tensorboard: Path | str | None = None,
    ) -> None:
        check_model("steplab.Meter", model)
        if dtype is not None and dtype not in get_args(Dtype):
            raise UserError(f"dtype is {dtype!r}.", did_you_mean(str(dtype), get_args(Dtype)))
        _refuse_negative(
            flops_per_token=flops_per_token, peak_tflops=peak_tflops, inspect_step=inspect_step
        )
        quiet_profiler()
        self._model = model
        self._flops_per_token = flops_per_token
        self._flops_formula = flops_formula
        self._peak_tflops = peak_tflops
        self._asked_dtype = dtype
        self._sinks = open_sinks(jsonl, tensorboard)
        self._timer = StepTimer(model, inspect_step)
        self._reading: Reading | None = None  # of the steps up to the last line
        self._read_rows = 0  # samples that a Reading has covered already
        self._notes: dict[str, str] = {}  # every note so far, one per topic
        self._slowest_told: dict[str, float] = {}  # ms, by topic

    def step(self, tokens: int) -> StepScope:
        """Wrap one training step over `tokens` tokens, all its micro-batches together."""
        if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens <= 0:
            found = tokens if isinstance(tokens, (int, float)) else describe(tokens)
            raise UserError(
                f"tokens must be a whole number above 0, not {found}.",
                "Pass the tokens of this step, as in batch.numel().",
            )
        return StepScope(self._timer, tokens)

    def phase(self, name: str) -> PhaseScope:
        """Wrap a part of the step; entered again in the same step, the times add up."""
        return self._timer.phase(name)

    def due(self, every: int) -> bool:
        """Whether the number of steps so far is a multiple of `every`."""
        if every < 1:
            raise UserError(f"due needs a number of steps above 0, not {every}.")
        return self._timer.count > 0 and self._timer.count % every == 0

    def pause(self) -> None:
        """Call it when the loop does something else, such as validating or saving.

        That time is then no data stall: the next period begins when its step is entered.
        """
        self._timer.pause()

    def notes(self) -> tuple[str, ...]:
        """Return warnings about the steps since the last line, each of them only once."""
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
        reading = self._read()
        metrics, conditions = reading.metrics(), self._conditions(reading)
        warnings = write_to_sinks(self._sinks, reading.step, metrics, conditions)
        self._timer.left_s += perf_counter() - began_s  # the Meter's own time is no data stall
        return "  ".join([reading.line(), *warnings])

    def last_steps(self, count: int) -> Samples:
        """Return the periods of the last `count` steps; slow ones with what was seen in them."""
        samples = self._timer.samples
        return samples.slow_steps(max(0, len(samples) - count))

    def summary(self) -> MeterSummary:
        """Wait for the device and return every sample; for the end of the loop."""
        self._timer.marker.synchronize()
        self._timer.collect()
        samples, reading = self._timer.samples, self._read_from(row=0)
        return MeterSummary(
            step=samples.step(),
            host=Samples(tuple(samples.host_ms), "ms"),
            data_wait=samples.data_wait(),
            phases=samples.phases(samples.phase_ms),
            host_phases=samples.phases(samples.host_phase_ms),
            window_ms=sum(samples.wall_ms),
            source="cuda events" if self._timer.marker.on_cuda else "perf_counter",
            tokens=Samples(tuple(map(float, samples.tokens)), "tokens"),
            tokens_per_second=reading.tokens_per_s,
            memory=reading.memory,
            figures=reading.figures,
            formula=self.formula,
            dtype=self.dtype,
            kernel_launches=self._timer.inspected.launches,
            inspected_step=self._timer.inspected.step,
            notes=tuple(self._notes.values()),
        )

    @property
    def formula(self) -> str:
        """What MFU counts as the work of one token."""
        return self._work[1]

    @property
    def dtype(self) -> str | None:
        """Of the matrix products, as given or as inspected; None while unknown."""
        return self._asked_dtype or self._timer.inspected.dtype

    @cached_property
    def _work(self) -> tuple[float | None, str]:
        """FLOPs per token and their formula in words."""
        if self._flops_per_token is None:
            return count_flops_per_token(self._model)
        flops = self._flops_per_token
        return flops, self._flops_formula or f"{flops:g} FLOPs per token, given by the user"

    @cached_property
    def _device_name(self) -> str:
        return device_name(self._timer.marker.device)

    def _read(self) -> Reading:
        """Return the Reading of the steps since the last one; the same until another step ends.

        It does not wait: steps that the device has not finished are left to the next Reading.
        """
        if self._reading is None or self._reading.step != self._timer.count:
            self._timer.collect()
            self._reading = self._read_from(self._read_rows)
            self._read_rows = len(self._timer.samples)
        return self._reading

    def _read_from(self, row: int) -> Reading:
        timer = self._timer
        memory = read_memory(timer.marker.device)
        basis = MfuBasis(self._work[0], self._device_name, self.dtype, self._peak_tflops)
        reading = read_window(
            timer.samples, row, basis, timer.count, memory, timer.inspected.launches
        )
        return replace(reading, notes=self._new_notes(reading, timer.samples.slow_steps(row)))

    def _new_notes(self, reading: Reading, steps: Samples) -> tuple[str, ...]:
        """Return the notes on topics that had none so far; outliers are one topic for each cause.

        So a loop whose every tenth step waits for data says so once, and again only when a step
        takes more than AGAIN times as long as the slowest that was told for this cause.
        """
        peak = "impossible" if reading.is_impossible else "peak"
        unseen, no_dtype = self._timer.uninspected, self._timer.inspected.why_no_dtype
        found = {
            "profiler": unseen and f"launches unknown: {unseen}.",
            peak: reading.figures.warning,
        }
        if self._asked_dtype is None and no_dtype:
            found["dtype"] = f"MFU unknown: {no_dtype}; pass dtype= ({', '.join(get_args(Dtype))})."
        causes = re.sub(
            r"[0-9.,]+ ?(us|ms|s|min)?", "", " ".join(sorted(set(steps.marks.values())))
        )
        topic = causes or "outliers"
        slowest = max((steps.values[int(row)] for row in steps.marks), default=0.0)
        if slowest > AGAIN * self._slowest_told.get(topic, slowest):
            self._notes.pop(topic, None)
        found[topic] = steps.outliers
        new = {key: text for key, text in found.items() if text and key not in self._notes}
        if topic in new:
            self._slowest_told[topic] = slowest
        self._notes |= new
        return tuple(new.values())

    def _conditions(self, reading: Reading) -> dict[str, Any]:
        found = {
            "time": now(),
            "device": self._device_name,
            "dtype": self.dtype,
            "formula": self.formula,
            "peak_source": reading.figures.peak_source,
            "inspected_step": self._timer.inspected.step,
            "notes": list(reading.notes),
        }
        return {name: value for name, value in found.items() if value}


def _refuse_negative(**settings: float | None) -> None:
    for name, value in settings.items():
        if value is not None and not value > 0:
            raise UserError(f"{name} must be more than 0, not {value}.")


def count_flops_per_token(model: nn.Module) -> tuple[float | None, str]:
    """Return the FLOPs of one token's forward and backward (None: unknown), and their formula.

    Six FLOPs for each weight of a matrix product: the 2-D parameters of all modules except
    embeddings, a shared one once. A head that is tied to the embedding is multiplied, so it
    counts. The formula says what it leaves out, and what it cannot know: whether a parameter of
    somebody's own module is multiplied, or added like a table of positions.
    """
    owned = {
        id(parameter): (parameter, type(module).__module__.startswith("torch."))
        for module in model.modules()
        if not isinstance(module, LOOKUP_TABLES)
        for parameter in module.parameters(recurse=False)
    }
    distinct = [parameter for parameter, _ in owned.values()]
    bare = sum(p.numel() for p, is_of_torch in owned.values() if p.ndim == 2 and not is_of_torch)
    matrices = [parameter for parameter in distinct if parameter.ndim == 2]
    weights = sum(parameter.numel() for parameter in matrices)
    frozen = sum(parameter.numel() for parameter in matrices if not parameter.requires_grad)
    higher = sum(parameter.numel() for parameter in distinct if parameter.ndim > 2)
    words = [f"6 x {weights:,} matmul parameters per token", "attention not counted"]
    if bare:
        words.append(f"{bare:,} of them parameters of own modules: right if these multiply them")
    if higher:
        words.append(f"{higher:,} weights of more than 2 dimensions not counted")
    if frozen:
        words.append(f"{frozen:,} frozen ones counted as trained")
    return (6.0 * weights or None), "; ".join(words)


def device_name(device: torch.device) -> str:
    """Return the GPU's name as its driver gives it; a CPU has no peak in the catalog."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "this CPU"
