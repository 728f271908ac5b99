"""steplab makes a PyTorch training step as fast as the hardware allows, and proves it.

Public names are imported on first use, so that `import steplab` stays quick and leaves torch out.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "UserModel": "steplab.workloads.user_model",
    "Environment": "steplab.core",
    "Finding": "steplab.core",
    "Forecaster": "steplab.forecasting.forecaster",
    "Meter": "steplab.meter",
    "Recipe": "steplab.core",
    "Run": "steplab.core",
    "RunSpec": "steplab.core",
    "Samples": "steplab.core",
    "Step": "steplab.step.step",
    "StepOutput": "steplab.workloads.workload",
    "Store": "steplab.store",
    "assemble": "steplab.step.assemble",
    "explain": "steplab.findings",
    "graph": "steplab.step.graph",
    "load_user_model": "steplab.workloads.user_model",
    "optimize": "steplab.step.optimize",
    "profile": "steplab.profiling.user_loop",
    "trial": "steplab.step.trial",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'steplab' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
