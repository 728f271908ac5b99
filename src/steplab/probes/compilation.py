"""What torch.compile did: graphs, breaks, recompiles with their reasons, cold and warm seconds."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator
from time import perf_counter
from typing import NamedTuple

import torch
import torch._dynamo
from torch._dynamo.utils import (
    CompilationMetrics,
    clear_compilation_metrics,
    counters,
    get_compilation_metrics,
    graph_break_reasons,
    set_compilation_metrics_limit,
)

from steplab.core import Compilation, Recompile
from steplab.probes.probe import Probe, Subject
from steplab.trace.lines import Frame, innermost_line

# Dynamo keeps the last 64 compilations, fewer than a model with many layers that recompile has.
KEPT_COMPILATIONS = 4096  # of 1 kB each
# Plain words for breaks that dynamo names by the function that handles them.
BREAK_REASONS = {
    "generic_jump": "Data-dependent branching",
    "step_unsupported": "Unsupported code that no graph can be cut around",
    "comprehension_graph_break": "Break inside a comprehension",
}
GIVEN_UP = "Unsupported"  # the exception that makes dynamo leave a function uncompiled
LIMIT = "recompile limit"  # in its reason, where a function was compiled too often
# Behind a guard dynamo writes the source line and where that is, then the stack.
GUARD_SOURCE = re.compile(r"\s+# ")
STACK_LINE = re.compile(r'File "(?P<path>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)')


class CompilationProbe(Probe):
    """Has no result where nothing was compiled, by the recipe or by the model itself."""

    first_seconds: float | None = None
    warm_seconds: float | None = None

    def begin(self, subject: Subject | None = None) -> None:
        """Count from here on; what was given up before runs uncompiled now, too.

        A loop of one's own may have run before. Dynamo keeps the last 64 compilations of a process.
        """
        earlier = tuple(recorded_recompiles())
        gone = {one.begins for one in earlier if one.given_up}
        self.given_up = tuple(one for one in earlier if one.begins in gone and subject is None)
        self.left_uncompiled: Counter[str] = Counter()
        self.earlier_breaks: tuple[str, ...] = ()
        if subject is not None:  # what another trial compiled in this process is not its own
            counters.clear()
        else:
            earlier_cuts = [_describe(one) for one in recorded_graph_breaks() if not one.given_up]
            self.earlier_breaks = tuple(dict.fromkeys(earlier_cuts))
            broken = (one for one in recorded_graph_breaks() if one.given_up)
            self.left_uncompiled.update(map(_describe, broken))
        self.counted_before, self.cuts_before = _counted(), len(graph_break_reasons)
        clear_compilation_metrics()
        set_compilation_metrics_limit(KEPT_COMPILATIONS)

    def open_window(self, subject: Subject) -> None:
        """Note what was compiled before the clock started."""
        self.graphs_before = graph_count()

    def close_window(self, subject: Subject) -> None:
        """Read everything before other probes run further steps."""
        self.counted = _counted()
        self.counted.subtract(self.counted_before)
        self.graphs_in_window = graph_count() - self.graphs_before
        self.breaks = dict(self.left_uncompiled + Counter(count_graph_breaks(self.cuts_before)))
        self.recompiles = (*self.given_up, *recorded_recompiles())

    def inspect(self, subject: Subject) -> None:
        """Reset and time the first step again in the same process, with the disk cache filled.

        A new process takes longer: it also imports the compiler and loads the kernels. What a
        model compiles by itself is left alone: compiled again it may become something else.
        """
        if not self.counted["graphs"] or "compile" not in subject.spec.recipe.techniques:
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
        nothing_new = not self.counted["graphs"] and not self.breaks and not self.recompiles
        if nothing_new and not self.earlier_breaks:
            return None
        return Compilation(
            **self.counted,
            graphs_in_window=self.graphs_in_window,
            breaks=self.breaks,
            recompiles=self.recompiles,
            earlier_breaks=self.earlier_breaks,
            first_seconds=self.first_seconds,
            warm_seconds=self.warm_seconds,
        )


def _counted() -> Counter[str]:
    """Return what this process has counted so far, by the names of the record."""
    inductor = counters["inductor"]
    return Counter(
        graphs=graph_count(),
        cache_hits=int(inductor["fxgraph_cache_hit"]),
        cache_misses=int(inductor["fxgraph_cache_miss"]),
        cudagraph_skips=int(inductor["cudagraph_skips"]),
        chunked=chunked_graphs(),
    )


def graph_count() -> int:
    """Return how many graphs dynamo has compiled in this process."""
    return int(counters["stats"]["unique_graphs"])


def chunked_graphs() -> int:
    """Return how many graphs Inductor's auto_chunker has changed in this process."""
    metrics = sys.modules.get("torch._inductor.metrics")  # imported by what compiles, if anything
    return int(getattr(metrics, "num_auto_chunking", 0))


class GraphBreak(NamedTuple):
    """A place where dynamo ended a graph, or gave a function up."""

    reason: str  # in dynamo's words, often several lines
    frames: list[Frame]  # innermost first
    given_up: str = ""  # the function that stays uncompiled; "" where a graph was cut


def recorded_graph_breaks(cuts_before: int = 0) -> Iterator[GraphBreak]:
    """Yield all breaks since dynamo was last reset, without the first cuts of graphs.

    Dynamo's counter of breaks leaves out branches on a value and functions that stay uncompiled,
    so both are read where it keeps the reasons: its list of cut graphs, and its record of
    compilations.
    """
    for cut in graph_break_reasons[cuts_before:]:
        frames = [(f.filename, f.lineno or 0, f.name) for f in reversed(cut.user_stack)]
        yield GraphBreak(cut.reason, frames)
    for compiled in get_compilation_metrics():
        if compiled.fail_type == GIVEN_UP and not _is_limit(compiled):
            path, line = compiled.fail_user_frame_filename, compiled.fail_user_frame_lineno
            function = compiled.co_name or ""
            frame = (path or "", line or 0, function)
            yield GraphBreak(compiled.fail_reason or "", [frame], given_up=function)


def recorded_recompiles() -> Iterator[Recompile]:
    """Yield all recompilations since dynamo was last reset.

    The one beyond the limit has no function of its own: it is that of the same frame before.
    """
    frames: dict[str, Frame] = {}
    for compiled in get_compilation_metrics():
        frame = str(compiled.compile_id).partition("/")[0]
        if compiled.co_name:
            place = compiled.co_filename or "", compiled.co_firstlineno or 0, compiled.co_name
            frames[frame] = place
        if compiled.recompile_reason:
            place = frames.get(frame, ("", 0, ""))
            reason = str(compiled.recompile_reason)
            yield Recompile(
                place[2],
                GUARD_SOURCE.split(first_line(reason), maxsplit=1)[0],
                innermost_line([place]) or "",
                innermost_line(_stack(reason)) or "",
                _is_limit(compiled),
            )


def compiled_again() -> str:
    """Say what was compiled again last, for which guard and where; "" where nothing was."""
    for last in list(recorded_recompiles())[-1:]:
        said = f"{last.function} was compiled again too often, each time for {last.guard}"
        return f"{said} ({last.line or last.begins})"
    return ""


def _stack(reason: str) -> list[Frame]:
    """Return the frames that a guard's reason ends with, innermost first."""
    found = [(m["path"], int(m["line"]), m["function"]) for m in STACK_LINE.finditer(reason)]
    return found[::-1]


def _is_limit(compiled: CompilationMetrics) -> bool:
    return LIMIT in first_line(compiled.fail_reason or "")


def count_graph_breaks(cuts_before: int = 0) -> dict[str, int]:
    """Return how often each break occurred since then, by reason and line."""
    return dict(Counter(map(_describe, recorded_graph_breaks(cuts_before))))


def _describe(found: GraphBreak) -> str:
    first = first_line(found.reason)
    reason = BREAK_REASONS.get(first.split(" ", 1)[0], first)
    line = innermost_line(found.frames)
    text = f"{reason}, {line}" if line else reason
    return f"{found.given_up} left uncompiled: {text}" if found.given_up else text


def first_line(text: str) -> str:
    """Return the first line of what may be a page."""
    return text.strip().splitlines()[0] if text.strip() else ""


PROBE = CompilationProbe
