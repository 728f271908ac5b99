"""What torch.compile did: graphs, breaks, recompiles with their reasons, cold and warm seconds."""

from __future__ import annotations

from time import perf_counter

import torch
import torch._dynamo
from torch._dynamo.utils import (
    clear_compilation_metrics,
    counters,
    get_compilation_metrics,
    set_compilation_metrics_limit,
)

from steplab.probes.graph_breaks import first_line, graph_breaks
from steplab.probes.probe import Probe, Subject
from steplab.record import Compilation, Recompile

# Dynamo keeps the last 64, fewer than a model of many layers that recompile; 1 kB each.
KEPT_COMPILATIONS = 4096


def graph_count() -> int:
    """Return how many graphs dynamo has compiled in this process since the last reset."""
    return int(counters["stats"]["unique_graphs"])


class CompilationProbe(Probe):
    """Silent when nothing was given to torch.compile, whoever would have called it."""

    first_seconds: float | None = None
    warm_seconds: float | None = None

    def begin(self, subject: Subject) -> None:
        """Count from zero. What the model compiled while it was made stays as it is."""
        counters.clear()
        clear_compilation_metrics()
        set_compilation_metrics_limit(KEPT_COMPILATIONS)

    def open_window(self, subject: Subject) -> None:
        """Note what was compiled before the clock started."""
        self.graphs_before = graph_count()

    def close_window(self, subject: Subject) -> None:
        """Read everything before other probes run further steps."""
        self.graphs = graph_count()
        self.breaks = graph_breaks()
        self.hits = int(counters["inductor"]["fxgraph_cache_hit"])
        self.misses = int(counters["inductor"]["fxgraph_cache_miss"])
        self.cudagraph_skips = int(counters["inductor"]["cudagraph_skips"])
        self.recompiles = tuple(
            Recompile(str(m.co_name), first_line(str(m.recompile_reason)))
            for m in get_compilation_metrics()
            if m.recompile_reason
        )

    def inspect(self, subject: Subject) -> None:
        """Time the first step again after a reset in the same process, disk cache filled.

        A new process pays more: it also imports the compiler and loads the kernels. What a model
        has compiled by itself is left alone: compiled once more it may be something else.
        """
        if not self.graphs or "compile" not in subject.spec.recipe.techniques:
            return
        torch._dynamo.reset()
        start = perf_counter()
        with subject.op_by_op():
            subject.run_step()
        if subject.on_cuda:
            torch.cuda.synchronize()
        self.warm_seconds = perf_counter() - start
        subject.settle_again()

    def result(self) -> Compilation | None:
        """Return the record, or None for an eager step."""
        if not self.graphs and not self.breaks:
            return None
        return Compilation(
            graphs=self.graphs,
            graphs_in_window=self.graphs - self.graphs_before,
            breaks=self.breaks,
            recompiles=self.recompiles,
            first_seconds=self.first_seconds,
            cache_hits=self.hits,
            cache_misses=self.misses,
            warm_seconds=self.warm_seconds,
            cudagraph_skips=self.cudagraph_skips,
        )


PROBE = CompilationProbe
