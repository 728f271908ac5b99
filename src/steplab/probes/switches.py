"""Switches of torch and of its variables that slow a step down, and how optimizers are divided."""

from __future__ import annotations

import os
import sys
import tracemalloc
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch._functorch.config
from torch._dynamo import OptimizedModule, eval_frame
from torch.utils._python_dispatch import TorchDispatchMode

from steplab.core import OptimizerShape
from steplab.core.run import FORCE_EAGER, MEMORY_BUDGET, MODE, PYTHON_PROFILER, TRACEMALLOC
from steplab.probes.compilation import graph_count
from steplab.probes.known_tensors import live_modules, live_optimizers
from steplab.probes.source_lines import is_written, written_lines

# Variables that torch or the driver reads, by what they switch on.
VARIABLES = {
    "CUDA_LAUNCH_BLOCKING": ("1",),
    "PYTORCH_NO_CUDA_MEMORY_CACHING": ("1",),
    "TORCHDYNAMO_DISABLE": ("1",),
    "TORCH_COMPILE_DISABLE": ("1",),
    "AMD_SERIALIZE_KERNEL": ("1", "2", "3"),
    "HIP_LAUNCH_BLOCKING": ("1",),
}

# What is written where a switch is turned on; variables are written by their names.
WRITTEN_AS = {
    "anomaly mode": ("set_detect_anomaly", "detect_anomaly"),
    "deterministic algorithms": ("use_deterministic_algorithms",),
    "cudnn.deterministic": ("deterministic=",),
    "float64 by default": ("set_default_dtype", "set_default_tensor_type"),
    "flash attention off": ("enable_flash_sdp", "sdpa_kernel"),
    "memory-efficient attention off": ("enable_mem_efficient_sdp", "sdpa_kernel"),
    "cudnn attention off": ("enable_cudnn_sdp", "sdpa_kernel"),
    TRACEMALLOC: ("tracemalloc.start",),
    PYTHON_PROFILER: ("cProfile.Profile", "Profile", "setprofile"),
    FORCE_EAGER: ("set_stance",),
    MEMORY_BUDGET: (f"{MEMORY_BUDGET}=", MEMORY_BUDGET),
}

DEBUGGING_BACKENDS = ("eager", "aot_eager", "aot_eager_decomp_partition", "eager_noexcept")
DISPATCH = "__torch_dispatch__"
MEANT = ("torch.utils.checkpoint",)
NOT_CALLED = "something that is not called"


def switches_on(variables: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return the names of the switches that are on and slow a step down."""
    states = {
        "anomaly mode": torch.is_anomaly_enabled(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "cudnn.deterministic": torch.backends.cudnn.deterministic,
        "cudnn disabled": not torch.backends.cudnn.enabled,
        "float64 by default": torch.get_default_dtype() == torch.float64,
        "flash attention off": not torch.backends.cuda.flash_sdp_enabled(),
        "memory-efficient attention off": not torch.backends.cuda.mem_efficient_sdp_enabled(),
        "cudnn attention off": not torch.backends.cuda.cudnn_sdp_enabled(),
        TRACEMALLOC: tracemalloc.is_tracing(),
        PYTHON_PROFILER: _python_is_profiled(),
        # Where there are graphs, a watched step has this stance by ours (compiled_calls.py).
        FORCE_EAGER: eval_frame._stance.stance == "force_eager" and not graph_count(),
    }
    named = [name for name, on in states.items() if on]
    budget = torch._functorch.config.activation_memory_budget
    named += [f"{MEMORY_BUDGET}={budget:g}"] if graph_count() and budget < 1 else []
    set_ = [
        f"{name}={variables[name]}" for name, on in VARIABLES.items() if variables.get(name) in on
    ]
    return (*named, *set_)


def _python_is_profiled() -> bool:
    """Whether cProfile is on; torch's own profiler is told from it by its type.

    From Python 3.12 on it is a tool of `sys.monitoring`.
    """
    monitoring: Any = getattr(sys, "monitoring", None)
    if monitoring is not None:
        return monitoring.get_tool(monitoring.PROFILER_ID) == "cProfile"
    return type(sys.getprofile()).__module__ in ("cProfile", "_lsprof")


def modes_around(own: TorchDispatchMode) -> set[str]:
    """Return the dispatch modes that called `own` with an operator, by their classes.

    A mode that runs has been taken from torch's stack of modes; it is still on Python's. Those of
    checkpointing decide what is kept, and are meant.
    """
    found, frame = set(), sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        mode = frame.f_locals.get("self") if frame.f_code.co_name == DISPATCH else None
        kind = type(mode)
        if isinstance(mode, TorchDispatchMode) and mode is not own and kind.__module__ not in MEANT:
            found.add(f"{MODE}{kind.__name__.lstrip('_')}")
    return found


def setup_lines(switches: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return where switches are turned on, and what else is written before a step runs."""
    names = [switch.partition("=")[0] for switch in switches]
    sought = {name: WRITTEN_AS.get(name, (name.removeprefix(MODE),)) for name in names}
    sought |= {name: (name,) for name in {type(one).__name__ for one in live_optimizers()}}
    sought |= {name: (name,) for name in ("params", "retain_graph", "create_graph")}
    sought |= {"requires_grad": ("requires_grad_", "requires_grad")}
    sought |= {"register_buffer": ("register_buffer",), "deepcopy": ("deepcopy",)}
    sought |= {"float64": ("double", "torch.float64", "torch.double", "np.float64")}
    sought |= {"DataLoader": ("DataLoader",), "collate_fn": ("collate_fn",)}
    limits = ("recompile_limit", "cache_size_limit")  # the newer name, and the older
    sought |= {"recompile_limit": (*limits, *(f"{name}=" for name in limits))}
    sought |= {"float32": ("torch.float32", "torch.float")}
    sought |= {"Embedding": ("Embedding", "EmbeddingBag"), "backend": DEBUGGING_BACKENDS}
    by_method = any(one._compiled_call_impl is not None for one in live_modules())
    sought |= {"torch.compile": ("compile",) if by_method else ("torch.compile",)}
    return written_lines(sought)


def given_to_compile() -> tuple[str, ...]:
    """Return what torch.compile was given in this process: classes of modules, as far as known."""
    modules = live_modules()
    wrapped = [one._orig_mod for one in modules if isinstance(one, OptimizedModule)]
    wrapped += [one for one in modules if one._compiled_call_impl is not None]
    known = tuple(sorted({type(module).__name__ for module in wrapped}))
    # What is kept from being compiled has no backend here.
    if known or not any(map(callable, eval_frame.cached_backends.values())):
        return known
    # A function, or a result that was thrown away. Libraries compile theirs where they are
    # imported: the user's own files must say it.
    return (NOT_CALLED,) if is_written("torch.compile") else ()


def optimizer_shapes() -> tuple[OptimizerShape, ...]:
    """Return how the optimizers of this process divide their weights."""
    return tuple(
        OptimizerShape(
            type(one).__name__,
            len(one.param_groups),
            sum(len(group["params"]) for group in one.param_groups),
        )
        for one in live_optimizers()
    )
