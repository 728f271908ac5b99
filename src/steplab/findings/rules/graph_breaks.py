"""torch.compile splits the model into several graphs.

What it sees: the reasons for which Dynamo ended a graph, and the time spent between graphs; or that
it gave a function up, as for a break inside a loop, and what that function runs op by op.
Why it costs: nothing fuses across a break; the ops between run one by one, from Python.
Remedy: remove the named construct from the forward pass; `compile.fullgraph=true` keeps it out.
When it is wrong: a break outside the hot path, once per step, costs a few microseconds.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

import numpy as np

from steplab.core import Finding, units
from steplab.findings.case import Case
from steplab.findings.claims import Claim
from steplab.trace.compiled import COMPILED, FUSED, FUSIBLE
from steplab.trace.events import Ints, Trace
from steplab.trace.lines import user_line
from steplab.trace.spans import Intervals, union

# What runs a graph: Inductor's code, or the function that calls it under another backend.
GRAPHS = ("## Call CompiledFxGraph", "CompiledFunction")
PASSES = ("forward", "backward")
RESUME = "torch_dynamo_resume_in_"  # how Dynamo names the code after a break
# Around every step of an optimizer torch has a break of its own, which nobody can take out.
OF_TORCH = "torch/optim/optimizer.py"
# How the Run writes that Dynamo gave a function up; the line is the one that breaks.
LEFT = re.compile(r"(?P<name>\S+) left uncompiled: .*?(?P<file>[^\s:,]+\.py):\d+ \(")
SHARE = 0.03
FILLS = "memset"  # gradients of slices, which a graph writes in place


def check(case: Case) -> Finding | None:
    """Tell the function that was given up, or the breaks and the forward time outside of graphs."""
    compilation = case.run.compilation if case.run else None
    breaks = compilation.breaks if compilation else {}
    if case.rows is not None and breaks and not len(_graph_spans(case.rows.source)[0]):
        return None  # no graph is cut where none runs: compiled_not_faster tells what is left
    return _given_up(case, tuple(breaks)) or _cut(case, breaks)


def _given_up(case: Case, breaks: tuple[str, ...]) -> Finding | None:
    """Take what functions run op by op that Dynamo left as they are, with their gradients."""
    left = {(m["name"], m["file"]): text for text in breaks if (m := LEFT.match(text))}
    rows = case.rows
    if rows is None or not left:
        return None
    mask = rows.called_in(lambda function: _name_and_file(function) in left)
    mask &= ~rows.within(lambda call: call.name.startswith(COMPILED))
    spent = case.cost_ms(mask)
    gain = FUSED * case.cost_ms(mask & rows.category(*FUSIBLE, FILLS))
    if not gain > SHARE * case.step_ms:
        return None
    return Claim(
        rule="graph_breaks",
        claim=f"a break leaves {', '.join(name for name, _ in left)} uncompiled: "
        f"{units.milliseconds(spent)} a step run op by op",
        evidence=(*left.values(), *rows.hot_lines(mask)),
        remedy="take the named construct out of the loop or the function that is compiled, then "
        "compile.fullgraph=true",
        stake_ms=spent,
        why="where a graph cannot be cut, as inside a loop, the whole function runs as written",
        gain_ms=gain,
        work=mask,
        is_cause=True,
    )


def _name_and_file(function: str) -> tuple[str, str]:
    """Return ("forward", "net.py") of "net.py:8 (forward)"."""
    place, _, name = function.partition(" (")
    return name.removesuffix(")"), place.partition(":")[0]


def _cut(case: Case, breaks: Mapping[str, int]) -> Finding | None:
    """Count the breaks and the forward time outside of graphs."""
    resumed = _resumed(case)
    if not breaks and not resumed:
        return None
    between, graphs = _between_ms(case), _graphs(case)
    waits = _waits_ms(case, graphs, sum(count for _, count in resumed))
    reasons = sorted(breaks.items(), key=lambda item: -item[1])
    evidence = [f"{reason} (x {count})" for reason, count in reasons[:3]]
    evidence += _earlier(case, [line for line, _ in resumed])
    evidence += [f"{line}: resumed {count} times a step" for line, count in resumed[:3]]
    if between is not None:
        text = f"{units.milliseconds(between)} of forward and backward are between graphs"
        evidence.append(f"{text}, {graphs:.0f} of which run in a forward")
    count = sum(breaks.values()) or sum(count for _, count in resumed)
    return Finding(
        rule="graph_breaks",
        claim=f"the compiled model is cut into pieces by {units.counted(count, 'graph break')}",
        evidence=tuple(evidence),
        remedy="take the named construct out of the forward pass, then compile.fullgraph=true",
        stake_ms=None if between is None else between + waits,
        why="every graph is entered and left from Python, and nothing fuses across a break",
        # One graph remains to be entered. What fusing would gain comes on top.
        gain_ms=None if between is None else between * (1 - 1 / max(graphs, 1)) + waits,
    )


def _earlier(case: Case, lines: list[str]) -> list[str]:
    """Return the breaks from before the recording at lines where this step resumes."""
    compilation = case.run.compilation if case.run else None
    breaks = compilation.earlier_breaks if compilation else ()
    return [text for text in breaks if any(f", {line} (" in text for line in lines)][:3]


def _waits_ms(case: Case, graphs: float, resumed: int) -> float:
    """Return the waits for launches that go with the graphs after breaks: each is entered alike."""
    if not case.on_device or not graphs:
        return 0.0
    return max(0.0, case.launch_wait_ms) * min(1.0, resumed / graphs)


def _resumed(case: Case) -> list[tuple[str, int]]:
    """Return the lines at which compiled code resumes after a break, and how often per step."""
    if case.analysis is None:
        return []
    trace = case.analysis.detail or case.analysis.trace
    lines: Counter[str] = Counter()
    for code, count in zip(*np.unique(trace.python.name, return_counts=True), strict=True):
        name = trace.text(int(code))
        if RESUME in name and OF_TORCH not in name:
            lines[(user_line(name) or name).partition(" (")[0]] += int(count)
    return lines.most_common()


def _between_ms(case: Case) -> float | None:
    """Return the ms of forward and backward outside of graphs; None if the trace has no graphs.

    On a GPU, of the kernels launched between graphs; on a CPU, all of the host's time.
    """
    rows = case.rows
    if rows is None or case.analysis is None:
        return None
    if case.on_device:
        launched = rows.labeled("phase", lambda label: label in PASSES)
        inside = rows.within(lambda call: call.name.startswith(GRAPHS))
        return rows.ms(launched & ~inside) if (launched & inside).any() else None
    passes, graphs = _spans(case.analysis.trace, PASSES), _graph_spans(case.analysis.trace)
    run = passes & union(*graphs)
    return (passes.total - run.total) / 1e6 / rows.steps * rows.scale if run.total else None


def _graphs(case: Case) -> float:
    """Return how many graphs run in the forward pass of a step; 0 without a trace."""
    if case.rows is None or case.analysis is None:
        return 0.0
    forward = _spans(case.analysis.trace, ("forward",))
    starts, ends = _graph_spans(case.analysis.trace)
    return float((forward.within(starts, ends) > 0).sum()) / case.rows.steps


def _graph_spans(trace: Trace) -> tuple[Ints, Ints]:
    """Return starts and ends of the calls of graphs; of Inductor's own where there are any."""
    inductor, other = (_spans_beginning(trace, prefix) for prefix in GRAPHS)
    return inductor if len(inductor[0]) else other


def _spans_beginning(trace: Trace, prefix: str) -> tuple[Ints, Ints]:
    tables = (trace.ops, trace.ranges)
    chosen = [trace.named(spans, lambda name: name.startswith(prefix)) for spans in tables]
    pairs = list(zip(tables, chosen, strict=True))
    starts = np.concatenate([spans.start[mask] for spans, mask in pairs])
    return starts, np.concatenate([spans.end[mask] for spans, mask in pairs])


def _spans(trace: Trace, names: tuple[str, ...]) -> Intervals:
    """Return when ranges of these names were open."""
    chosen = trace.named(trace.ranges, names.__contains__)
    return union(trace.ranges.start[chosen], trace.ranges.end[chosen])


RULE = check
