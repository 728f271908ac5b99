"""What a run leaves behind beside its checkpoints: printed lines, metrics files, one trace."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.profiler import profile, schedule

from steplab.core.errors import UserError
from steplab.core.output_file import output_file, own_file
from steplab.meter.reading import Sink, open_sinks, write_to_sinks
from steplab.probes.ran import RawProfile
from steplab.profiling.trace_file import export_trace

# `--profile`: steps that run without the profiler, then steps that it sees and discards.
TRACE_WAIT, TRACE_WARMUP = 10, 10
TRACED_STEP = TRACE_WAIT + TRACE_WARMUP + 1


@dataclass(frozen=True)
class StepReport:
    """The steps since the last report: mean losses, and readings of the Meter and NVML."""

    step: int
    loss: float
    parts: Mapping[str, float]  # means of the workload's scalar metrics: pred, aux, ...
    lr: float
    meter: Mapping[str, float]  # under the names of `Meter.metrics`
    counters: Mapping[str, float]  # sm_util_pct, hbm_util_pct, mem_ctrl_util_pct, ...
    about: Mapping[str, Any] = field(default_factory=dict)  # of the row in metrics.jsonl

    def line(self, perf: bool) -> str:
        """`step=10 loss=... pred=... aux=... lr=... toks/s=...`, and with `perf` the rates."""
        words = [f"step={self.step}", f"loss={self.loss:.4f}"]
        parts = {name: value for name, value in self.parts.items() if name != "dropped" or value}
        words += [f"{name}={value:.4f}" for name, value in parts.items()]
        words += [f"lr={self.lr:.2e}", f"toks/s={self.meter.get('train/toks_per_sec', 0):,.0f}"]
        return " ".join(words + (self._rates() if perf else []))

    def timing(self) -> str:
        """`timing data=... model=... other=... step=... data_of_all_steps=...` of the typical step.

        `model` is the sum of the phases: forward, backward, clip, optimizer; with `data`, which a
        device may hide, and `other` it makes the step. The last is no part of that step.
        """
        step = self.meter.get("train/step_time_ms", 0.0)
        share = self.meter.get("train/data_stall_pct", 0.0)
        data = self.meter.get("train/data_wait_ms", 0.0)
        model = self.meter.get("train/phases_ms", 0.0)
        other = max(0.0, step - data - model)
        times = f"data={data:.2f}ms model={model:.2f}ms other={other:.2f}ms step={step:.2f}ms"
        return f"timing {times} data_of_all_steps={share:.1f}%"

    def metrics(self) -> dict[str, float]:
        """Everything by its name in the logs."""
        own = {"train/loss": self.loss, "train/lr": self.lr}
        own |= {f"train/{name}": value for name, value in self.parts.items()}
        return own | dict(self.meter) | {f"train/{k}": v for k, v in self.counters.items()}

    def _rates(self) -> list[str]:
        meter, words = self.meter, []
        tflops = meter.get("train/tflops")
        words.append("tflops=unknown" if tflops is None else f"tflops={_rate(tflops)}")
        mfu = meter.get("train/mfu")
        words.append(f"mfu={mfu:.2%}" if mfu is not None else "mfu=unknown")
        words.append(f"step_ms={meter.get('train/step_time_ms', 0):.2f}")
        for name in ("sm_util", "hbm_util", "mem_ctrl_util"):
            value = self.counters.get(f"{name}_pct")
            words.append(f"{name}={value:.1f}%" if value is not None else f"{name}=unknown")
        launches = meter.get("train/kernel_launches_per_step")
        words.append(f"launches={launches:,.0f}" if launches is not None else "launches=unknown")
        return words


def _rate(tflops: float) -> str:
    """Return two decimals, or two digits where those would be 0.00, as on a CPU."""
    return f"{tflops:.2f}" if tflops >= 1 else f"{tflops:.2g}"


class TrainingLog:
    """Prints lines through `say`, and writes metrics.jsonl and TensorBoard files in `folder`.

    Nothing is in the folder until `open` is called: a training may be refused before. `advance` is
    called with the number of every finished step, to draw progress.
    """

    def __init__(
        self,
        say: Callable[[str], None],
        folder: Path | None,
        perf: bool,
        advance: Callable[[int], None] = lambda step: None,
    ) -> None:
        self.say = say
        self.perf = perf
        self.advance = advance
        self.sinks: list[Sink] = []
        self.file = own_file(folder / "metrics.jsonl", "--checkpoint-dir") if folder else None

    def open(self) -> None:
        """Begin the files; one that cannot be written is refused here."""
        if self.file is not None:
            self.sinks += open_sinks(self.file, _tensorboard_folder(self.file.parent))

    def report(self, report: StepReport) -> None:
        """Print and write one report."""
        self.say(report.line(self.perf))
        if not self.perf:
            self.say(report.timing())
        self.write(report.step, report.metrics(), report.about)

    def write(
        self, step: int, metrics: Mapping[str, float], about: Mapping[str, Any] | None = None
    ) -> None:
        """Write metrics; a sink that fails is a warning, and training goes on."""
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        for warning in write_to_sinks(self.sinks, step, finite, about or {}):
            self.say(warning)


def _tensorboard_folder(folder: Path) -> Path | None:
    """Return the folder for TensorBoard files, or None where tensorboard is not installed."""
    from importlib.util import find_spec

    return folder / "tensorboard" if find_spec("tensorboard") else None


@contextlib.contextmanager
def trace_one_step(
    wanted: bool, on_cuda: bool, path: Path, say: Callable[[str], None]
) -> Iterator[Callable[[], object]]:
    """Record step TRACED_STEP with Python stacks as a Chrome trace in `path`, if `wanted`.

    Yields a function to call after every training step. The file exists once the traced step is
    over; a run that ends earlier leaves none. A full disk costs the trace, not the training.
    """
    if not wanted:
        yield lambda: None
        return
    output_file(path, "--checkpoint-dir")

    def export(profiler: profile) -> None:
        if profiler.step_num >= TRACED_STEP:
            try:
                export_trace(profiler, path, "--checkpoint-dir")
                say(f"trace in {path}")
            except UserError as error:
                say(f"warning: no trace: {error}")

    with RawProfile(
        on_cuda,
        schedule=schedule(wait=TRACE_WAIT, warmup=TRACE_WARMUP, active=1, repeat=1),
        on_trace_ready=export,
        with_stack=True,
        record_shapes=True,
    ) as profiler:
        yield profiler.step


def describe_parameters(total: int, active: int) -> str:
    """`params total=538.13M (538,130,793) active=198.39M (198,392,169)`."""
    return f"params total={total / 1e6:.2f}M ({total:,}) active={active / 1e6:.2f}M ({active:,})"


def peak_memory_line(device: torch.device, precision: str) -> str:
    """`run model=NVIDIA H200 precision=bf16 peak_vram_gb=53.80`; on a CPU the device alone."""
    if device.type != "cuda":
        return f"run model=cpu precision={precision}"
    name = torch.cuda.get_device_name(device)
    peak = torch.cuda.max_memory_allocated(device) / 2**30
    return f"run model={name} precision={precision} peak_vram_gb={peak:.2f}"
