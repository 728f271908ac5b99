"""The nouns that every package shares: what to run, and what was measured. Plain data, no torch.

Other packages import nouns from here (`from steplab.core import Run, RunSpec, Table`), and
functions, constants and errors from their module (`from steplab.core.errors import UserError`).
"""

from steplab.core.budget import Budget, Category, StepBudget
from steplab.core.dataflow import Dataflow
from steplab.core.run import (
    Accelerator,
    Allocation,
    Clock,
    Compilation,
    Counters,
    Environment,
    Figures,
    Finding,
    Memory,
    MemoryTimeline,
    OptimizerShape,
    Profile,
    Ran,
    Recompile,
    Run,
    Status,
    Work,
    new_run_id,
    run_from_json,
    run_to_json,
)
from steplab.core.samples import Samples
from steplab.core.spec import (
    MODES,
    PLAIN,
    Mode,
    Recipe,
    RunSpec,
    Setting,
    Settings,
    TrainSettings,
    TrainSpec,
    fingerprint,
)
from steplab.core.table import Cell, Column, Table

__all__ = [
    "MODES",
    "PLAIN",
    "Accelerator",
    "Allocation",
    "Budget",
    "Category",
    "Cell",
    "Clock",
    "Column",
    "Compilation",
    "Counters",
    "Dataflow",
    "Environment",
    "Figures",
    "Finding",
    "Memory",
    "MemoryTimeline",
    "Mode",
    "OptimizerShape",
    "Profile",
    "Ran",
    "Recipe",
    "Recompile",
    "Run",
    "RunSpec",
    "Samples",
    "Setting",
    "Settings",
    "Status",
    "StepBudget",
    "Table",
    "TrainSettings",
    "TrainSpec",
    "Work",
    "fingerprint",
    "new_run_id",
    "run_from_json",
    "run_to_json",
]
