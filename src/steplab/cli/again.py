"""The command that measures a step once more, with another recipe. No torch."""

from __future__ import annotations

import shlex
from pathlib import Path

from steplab.spec import RunSpec
from steplab.workloads.workload import find_workload


def bench_command(spec: RunSpec, recipe: Path) -> str:
    """Return `steplab bench step ...` for the step of `spec` with the recipe of a file."""
    usual = find_workload(spec.workload).resolve(spec.size, {})
    words = ["steplab", "bench", "step", spec.workload]
    words += ["--size", spec.size] if spec.size else []
    words += ["--batch", str(spec.batch)]
    words += ["--accumulate", str(spec.accumulate)] if spec.accumulate > 1 else []
    for name, value in spec.config.items():
        if value != usual[name]:
            shown = str(value).lower() if isinstance(value, bool) else str(value)
            words += [f"--{name.replace('_', '-')}", shown]
    return shlex.join([*words, "--mode", spec.mode, "--recipe", str(recipe)])
