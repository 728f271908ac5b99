"""The nouns that every package shares: what to run, and what was measured. Plain data, no torch."""

from steplab.core.budget import Budget, Category, StepBudget
from steplab.core.environment import Accelerator, Environment
from steplab.core.memory import Allocation, Memory, MemoryTimeline
from steplab.core.run import (
    Clock,
    Compilation,
    Counters,
    Figures,
    Finding,
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
from steplab.core.spec import MODES, PLAIN, Mode, Recipe, RunSpec, fingerprint
from steplab.core.table import Column, Table

__all__ = [
    "Accelerator",
    "Allocation",
    "Budget",
    "Category",
    "Clock",
    "Column",
    "Compilation",
    "Counters",
    "Environment",
    "Figures",
    "Finding",
    "Memory",
    "MemoryTimeline",
    "Profile",
    "Ran",
    "Recompile",
    "Run",
    "Samples",
    "Status",
    "StepBudget",
    "Table",
    "Work",
    "new_run_id",
    "run_from_json",
    "run_to_json",
]


__all__ += ["MODES", "PLAIN", "Mode", "Recipe", "RunSpec", "fingerprint"]
