"""Phases of a step, by the names of ranges or, where there are none, of Python calls."""

from __future__ import annotations

import re

from steplab.trace.lines import MODULE

PHASES = ("forward", "backward", "clip", "optimizer", "data")

# Spellings in letters only: FORWARD, forward_pass, fwd; those of torch and of Lightning.
_SPELLINGS = {
    **{phase: phase for phase in PHASES},
    **dict.fromkeys(("fwd", "forwardpass"), "forward"),
    **dict.fromkeys(("bwd", "backwardpass"), "backward"),
    **dict.fromkeys(("clipgradnorm", "clipgrad", "gradclip"), "clip"),
    **dict.fromkeys(("optimizerstep", "optim", "zerograd"), "optimizer"),
    **dict.fromkeys(("dataloader", "dataloading", "dataload"), "data"),
}
_BEGINNINGS = {
    "Optimizer.step#": "optimizer",
    "Optimizer.zero_grad#": "optimizer",
    "enumerate(DataLoader)#": "data",
    "DistributedDataParallel.forward": "forward",
    "FullyShardedDataParallel.forward": "forward",
}
# Ranges inside a phase, set by torch and for our modules: not phases themselves.
_INNER = re.compile(r"ProfilerStep#|module:|##? |nccl:|gloo:|c10d::|FSDP::|Torch-Compiled|AOT|Pre")
# Our own ranges around all phases; what a replayed graph does inside comes from the detailed step.
_AROUND = {"step", "replay"}
# The recorder's own wait, which keeps the host at most one step ahead: not a fault of the step.
PACING_RANGE = "wait for the step before"
_CALLS = (
    (re.compile(re.escape(MODULE)), "forward"),
    (re.compile(r"torch/_tensor\.py\(\d+\): backward$"), "backward"),
    (re.compile(r"torch/autograd/__init__\.py\(\d+\): (backward|grad)$"), "backward"),
    (re.compile(r"torch/nn/utils/clip_grad\.py\("), "clip"),
    (re.compile(r"torch/optim/"), "optimizer"),
    (re.compile(r"torch/utils/data/dataloader\.py\("), "data"),
)
_NOT_LETTERS = re.compile(r"[^a-z]+")
AUTOGRAD_NODE = "autograd::engine::evaluate_function"


def phase_of_range(name: str) -> str | None:
    """Return the phase that a range stands for; None if it stands for none."""
    for beginning, phase in _BEGINNINGS.items():
        if name.startswith(beginning):
            return phase
    return _SPELLINGS.get(_letters(name))


def phase_of_call(name: str) -> str | None:
    """Return the phase that a Python call belongs to; None if its name does not say."""
    return next((phase for pattern, phase in _CALLS if pattern.match(name)), None)


def may_be_phase(name: str) -> bool:
    """Whether a range may stand for a phase of the user's own."""
    known = phase_of_range(name) is not None or _letters(name) in _AROUND
    return not known and _INNER.match(name) is None


def _letters(name: str) -> str:
    return _NOT_LETTERS.sub("", name.lower())
