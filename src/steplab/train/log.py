"""What a training run leaves behind beside checkpoints: lines for people, metrics for JSONL and
TensorBoard, the trace of one step.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch.profiler import ProfilerActivity, profile, schedule

from steplab.meter.sinks import Sink, open_sinks
from steplab.store.atomic import disk_errors


@dataclass(frozen=True)
class StepReport:
    """The steps since the last report: mean losses, and what the Meter and NVML read."""

    step: int
    loss: float
    parts: Mapping[str, float]  # pred, aux, ...: scalar metrics of the workload, means
    lr: float
    meter: Mapping[str, float]  # under the names of `Meter.metrics`
    counters: Mapping[str, float]  # sm_util_pct, hbm_util_pct, mem_ctrl_util_pct, ...

    def line(self, perf: bool) -> str:
        """`step=10 loss=... pred=... aux=... lr=... toks/s=...`, with `perf` the rates too."""
        words = [f"step={self.step}", f"loss={self.loss:.4f}"]
        parts = {name: value for name, value in self.parts.items() if name != "dropped" or value}
        words += [f"{name}={value:.4f}" for name, value in parts.items()]
        words += [f"lr={self.lr:.2e}", f"toks/s={self.meter.get('train/toks_per_sec', 0):,.0f}"]
        return " ".join(words + (self._rates() if perf else []))

    def timing(self) -> str:
        """`timing data=... model=... step=... data%=...`: medians per step, each measured.

        `model` is the sum of the phases: forward, backward, clip, optimizer.
        """
        step = self.meter.get("train/step_time_ms", 0.0)
        share = self.meter.get("train/data_stall_pct", 0.0)
        data = self.meter.get("train/data_wait_ms", 0.0)
        model = sum(ms for name, ms in self.meter.items() if name.startswith("train/phase_ms/"))
        return f"timing data={data:.2f}ms model={model:.2f}ms step={step:.2f}ms data%={share:.1f}"

    def metrics(self) -> dict[str, float]:
        """Everything by its name in the logs."""
        own = {"train/loss": self.loss, "train/lr": self.lr}
        own |= {f"train/{name}": value for name, value in self.parts.items()}
        return own | dict(self.meter) | {f"train/{k}": v for k, v in self.counters.items()}

    def _rates(self) -> list[str]:
        meter, words = self.meter, []
        tflops = meter.get("train/tflops")
        words.append(f"tflops={tflops:.2f}" if tflops is not None else "tflops=unknown")
        mfu = meter.get("train/mfu")
        words.append(f"mfu={mfu:.2%}" if mfu is not None else "mfu=unknown")
        words.append(f"step_ms={meter.get('train/step_time_ms', 0):.2f}")
        for name in ("sm_util", "hbm_util", "mem_ctrl_util"):
            value = self.counters.get(f"{name}_pct")
            words.append(f"{name}={value:.1f}%" if value is not None else f"{name}=unknown")
        launches = meter.get("train/kernel_launches_per_step")
        words.append(f"launches={launches:,.0f}" if launches is not None else "launches=unknown")
        return words


class TrainingLog:
    """Says lines through `say`, and writes metrics.jsonl and TensorBoard files in `folder`.

    `advance` is told the number of every step that is over, for whoever draws progress.
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
        if folder is not None:
            self.sinks = open_sinks(folder / "metrics.jsonl", _tensorboard_folder(folder))

    def report(self, report: StepReport) -> None:
        """Say and write one report."""
        self.say(report.line(self.perf))
        if not self.perf:
            self.say(report.timing())
        self.write(report.step, report.metrics())

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write metrics; a sink that fails is told, and training goes on."""
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        for sink in self.sinks:
            try:
                sink.write(step, finite, {})
            except OSError as error:
                self.say(f"warning: {sink.path} was not written: {error.strerror or error}")


def _tensorboard_folder(folder: Path) -> Path | None:
    """Return the folder for TensorBoard files, or None where tensorboard is not installed."""
    from importlib.util import find_spec

    return folder / "tensorboard" if find_spec("tensorboard") else None


WAIT, WARMUP, ACTIVE = 10, 10, 1
LAST_STEP = WAIT + WARMUP + ACTIVE


class StepTrace:
    """Call `step()` after every training step; `path` exists once the active step is over."""

    def __init__(self, profiler: profile | None, path: Path) -> None:
        self.profiler = profiler
        self.path = path

    def step(self) -> None:
        """Tell the schedule that a step is over."""
        if self.profiler is not None:
            self.profiler.step()


def _export(profiler: profile, path: Path) -> None:
    """Write the trace; a run that ended before the active step has none to write."""
    if profiler.step_num >= LAST_STEP:
        profiler.export_chrome_trace(str(path))


@contextlib.contextmanager
def trace_one_step(wanted: bool, on_cuda: bool, path: Path) -> Iterator[StepTrace]:
    """Record step LAST_STEP with Python stacks into `path`, if it is wanted."""
    if not wanted:
        yield StepTrace(None, path)
        return
    with disk_errors(path.parent, "--checkpoint-dir"):
        path.parent.mkdir(parents=True, exist_ok=True)
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if on_cuda else [])
    with profile(
        activities=activities,
        schedule=schedule(wait=WAIT, warmup=WARMUP, active=ACTIVE, repeat=1),
        on_trace_ready=lambda profiler: _export(profiler, path),
        with_stack=True,
        record_shapes=True,
        acc_events=True,
    ) as profiler:
        yield StepTrace(profiler, path)
