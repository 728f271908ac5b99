"""steplab makes a PyTorch training step as fast as the hardware allows, and proves it.

Public names are imported on first use, so that `import steplab` stays quick and leaves torch out.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "Adopted": "steplab.workloads.adopt",
    "Environment": "steplab.record",
    "Finding": "steplab.record",
    "Forecaster": "steplab.engine.forecasting",
    "Meter": "steplab.engine.meter",
    "Recipe": "steplab.spec",
    "Run": "steplab.record",
    "RunSpec": "steplab.spec",
    "Samples": "steplab.record",
    "Step": "steplab.engine.step",
    "StepOutput": "steplab.workloads.workload",
    "Store": "steplab.store",
    "apply": "steplab.engine.apply",
    "assemble": "steplab.engine.assemble",
    "explain": "steplab.explain",
    "graph": "steplab.engine.graphing.inference",
    "profile": "steplab.engine.profiling.own_loop",
    "trial": "steplab.engine.trial",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'steplab' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])


class _Package(ModuleType):
    """Importing the folder `explain` would put it in the place of the function of that name."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _HOMES and isinstance(value, ModuleType):
            value.__class__ = _CallableFolder
        super().__setattr__(name, value)


class _CallableFolder(ModuleType):
    """A folder that can be called like its function: `steplab.explain(run)`."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        function = getattr(self, self.__name__.rpartition(".")[2])
        return function(*args, **options)


sys.modules[__name__].__class__ = _Package
