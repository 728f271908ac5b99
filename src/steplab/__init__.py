"""steplab makes a PyTorch training step as fast as the hardware allows, and proves it.

Public names are imported on first use, so that `import steplab` stays quick and leaves torch out.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "Adopted": "steplab.workloads.adopt",
    "Environment": "steplab.record",
    "Finding": "steplab.record",
    "Meter": "steplab.engine.meter",
    "Recipe": "steplab.spec",
    "Run": "steplab.record",
    "RunSpec": "steplab.spec",
    "Samples": "steplab.record",
    "Step": "steplab.engine.step",
    "StepOutput": "steplab.workloads.workload",
    "Store": "steplab.store",
    "assemble": "steplab.engine.assemble",
    "trial": "steplab.engine.trial",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'steplab' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
