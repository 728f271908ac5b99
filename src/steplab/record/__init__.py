"""What was seen: every noun that crosses a folder line. Frozen, JSON both ways, no torch."""

from steplab.record.budget import Budget, Category, StepBudget
from steplab.record.clock import Clock
from steplab.record.compilation import Compilation, Recompile
from steplab.record.counters import Counters
from steplab.record.environment import Accelerator, Environment
from steplab.record.finding import Finding
from steplab.record.memory import Memory
from steplab.record.memory_timeline import Allocation, MemoryTimeline
from steplab.record.profile import Profile
from steplab.record.ran import Ran
from steplab.record.run import RECORD_VERSION, Run, Status, new_run_id, run_from_json, run_to_json
from steplab.record.samples import Samples
from steplab.record.table import Column, Table
from steplab.record.work import Figures, Work

__all__ = [
    "RECORD_VERSION",
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
