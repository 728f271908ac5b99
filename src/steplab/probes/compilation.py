"""What torch.compile did: graphs, breaks, recompiles with their reasons, cold and warm seconds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from time import perf_counter
from typing import Any

import torch
import torch._dynamo
from torch._dynamo.utils import (
    clear_compilation_metrics,
    counters,
    get_compilation_metrics,
    graph_break_reasons,
    set_compilation_metrics_limit,
)

from steplab.core import Compilation, Recompile
from steplab.probes.probe import Probe, Subject
from steplab.trace.lines import user_line

# Breaks that dynamo handles itself have words of its own for a reason.
BREAK_REASONS = {
    "generic_jump": "Data-dependent branching",
    "step_unsupported": "Unsupported code that no graph can be cut around",
    "comprehension_graph_break": "Break inside a comprehension",
}
GIVEN_UP = "Unsupported"  # the exception that leaves a function uncompiled


def graph_breaks() -> dict[str, int]:
    """Return reason and line -> count since dynamo was last reset."""
    found: Counter[str] = Counter()
    for cut in graph_break_reasons:
        found[_with_place(_reason(cut.reason), _lines(reversed(cut.user_stack)))] += 1
    for compiled in get_compilation_metrics():
        if compiled.fail_type == GIVEN_UP:
            found[f"{compiled.co_name} left uncompiled: {_given_up(compiled)}"] += 1
    return dict(found)


def first_line(text: str) -> str:
    """Return the first line of what may be a page."""
    return text.strip().splitlines()[0] if text.strip() else ""


def _reason(text: str) -> str:
    first = first_line(text)
    return BREAK_REASONS.get(first.split(" ", 1)[0], first)


def _given_up(compiled: Any) -> str:
    path, line = compiled.fail_user_frame_filename, compiled.fail_user_frame_lineno
    place = user_line(f"{path}({line}): {compiled.co_name}") if path else None
    return _with_place(_reason(compiled.fail_reason or ""), [place])


def _lines(frames: Iterable[Any]) -> Iterable[str | None]:
    return (user_line(f"{frame.filename}({frame.lineno}): {frame.name}") for frame in frames)


def _with_place(reason: str, lines: Iterable[str | None]) -> str:
    """Add the first line that is the user's."""
    place = next(filter(None, lines), None)
    return f"{reason}, {place}" if place else reason


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
