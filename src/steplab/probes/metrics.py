"""What a workload reports of its step beside the loss: routing, balance, parts of the loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from steplab.core.run import Metric
from steplab.probes.probe import Probe, Subject

MAX_NUMBERS = 4096  # 64 layers of 64 experts; what is larger is data, and stays on the device
MAX_AXES = 2


class MetricsProbe(Probe):
    """Reads the metrics of one step after the timed ones, so that no timed step waits for them."""

    def inspect(self, subject: Subject) -> None:
        """Run one more step and read what it returns."""
        infers = subject.spec.mode == "infer"
        self.found = {} if infers else read_metrics(subject.run_step().metrics)

    def result(self) -> Mapping[str, Metric]:
        """Return them by name."""
        return self.found


def read_metrics(metrics: Mapping[str, Any]) -> dict[str, Metric]:
    """Return the tensors that are small enough to keep, as plain numbers."""
    return {
        str(name): _numbers(tensor.tolist())
        for name, tensor in metrics.items()
        if _is_small(tensor)
    }


def _is_small(tensor: Any) -> bool:
    return tensor.ndim <= MAX_AXES and tensor.numel() <= MAX_NUMBERS and not tensor.is_complex()


def _numbers(listed: Any) -> Any:
    return tuple(map(_numbers, listed)) if isinstance(listed, list) else float(listed)


PROBE = MetricsProbe
