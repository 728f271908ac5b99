"""The compiled step is no faster than the eager one.

What it sees: a Run with `compile` and one of the same step without it, in the same store. Without
such a pair: a result of torch.compile that is thrown away or passed by, as where a method is called
and not the compiled model; functions that a break leaves uncompiled; graphs that another backend
than Inductor runs op by op; operators of one's own inside a graph, which the compiler cannot look
into; and torch.compile itself, called in the step.
Why it costs: compiling takes seconds to minutes at every start and gains nothing here.
Remedy: leave `compile` out, or find what keeps it from fusing (graph breaks, or products that take
most of the step anyway).
When it is wrong: the two Runs were measured at different times; `bench step --alternate` measures
both in turns.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import numpy as np

from steplab.core import Finding, Recipe, Run, Settings, units
from steplab.costs.op_call import OpCall
from steplab.findings.case import Case
from steplab.findings.claims import Claim
from steplab.findings.module_calls import callers
from steplab.findings.rows import Mask, Rows
from steplab.trace.compiled import COMPILED, FUSED, FUSIBLE, INDUCTOR
from steplab.trace.spans import nest

# Two medians measured at different times must differ by more than this to mean anything.
MIN_GAIN = 0.03
_COMPILE = re.compile(r"torch/(__init__|nn/modules/module)\.py\(\d+\): compile$")
SHARE = 0.10
PASSES = ("forward", "backward")
KNOWN = (
    "aten",
    "prims",
    "autograd",
    "torch",
    "profiler",
    "c10d",
    "c10d_functional",
    "steplab",
    "_c10d_functional",
    "inductor",
    "quantized",
    "torchvision",
)


def check(case: Case) -> Finding | None:
    """Compare with a Run without `compile`; else look for work that compiling left as it was."""
    return _no_faster(case) or _left_eager(case) or _wrapped_again(case)


def _wrapped_again(case: Case) -> Finding | None:
    """Judge a torch.compile that every step calls: wrapping takes 0.4 ms even of what is known."""
    rows = case.rows
    if rows is None:
        return None
    python = rows.source.python
    called = rows.source.named(python, lambda name: _COMPILE.search(name) is not None)
    outer = np.flatnonzero(called & (nest(python, called).parents() < 0))
    if not len(outer):
        return None
    # As a share of what was recorded: stacks make Python several times as slow.
    recorded = int(rows.source.ops.end.max(initial=0) - rows.source.ops.start.min(initial=2**62))
    spent = float(python.duration[outer].sum()) / max(recorded, 1) * case.step_ms
    if not spent > MIN_GAIN * case.step_ms:
        return None
    steps = 1 if rows.analysis.detail is not None else rows.steps
    lines = callers(rows.source, python, outer)
    return Finding(
        rule="compiled_not_faster",
        claim=f"torch.compile is called {len(outer) / steps:.0f} times a step: "
        f"{units.milliseconds(spent)}",
        evidence=tuple(f"called at {line}" for line in lines),
        remedy="compile once, where the model is made, and call what torch.compile returned",
        stake_ms=spent,
        why="each call wraps the function anew, also where its graph is known",
        gain_ms=spent,
    )


def _left_eager(case: Case) -> Finding | None:
    """Add up the memory-bound kernels of torch where compiled ones should be."""
    rows = case.rows
    if rows is None:
        return None
    eager = rows.category(*FUSIBLE) & rows.labeled("phase", lambda label: label in PASSES)
    claim, why, remedy, mask, seen = _reason(case, rows, eager)
    spent = case.cost_ms(mask) if claim else 0.0
    if not spent > SHARE * case.step_ms:
        return None
    return Claim(
        rule="compiled_not_faster",
        claim=f"{claim}: {units.milliseconds(spent)} a step in operators that would fuse",
        evidence=(*seen, *rows.hot_lines(mask, calling_first=True)),
        remedy=remedy,
        stake_ms=spent,
        why=why,
        gain_ms=FUSED * spent,
        work=mask,
        is_cause=True,
    )


def _reason(case: Case, rows: Rows, eager: Mask) -> tuple[str, str, str, Mask, tuple[str, ...]]:
    """Return claim, reason, remedy, work and what was seen; no claim where nothing is amiss."""
    graphs = rows.with_gradients(rows.within(lambda call: call.name.startswith(COMPILED)))
    profile = case.run.profile if case.run is not None else None
    if profile is not None and profile.never_compiled and not graphs.any():
        claim = f"torch.compile wraps {', '.join(profile.never_compiled)} and compiled nothing"
        compilation = case.run.compilation if case.run is not None else None
        if compilation is not None and compilation.breaks:
            return (
                claim,
                "a function that breaks where no graph can be cut, as in a loop, stays uncompiled",
                "take the named construct out of the loop or the function that is compiled",
                eager,
                tuple(compilation.breaks),
            )
        return (
            claim,
            "only a call of what torch.compile returns is compiled; a method of it, or the model "
            "that it was given, runs as it was written",
            "call what torch.compile returns, or compile the method that is called",
            eager,
            _asked_for(case, "torch.compile"),
        )
    if not graphs.any():
        return "", "", "", eager, ()
    trace = rows.source
    if not trace.named(trace.ranges, lambda name: name.startswith(INDUCTOR)).any():
        return (
            "compiled graphs run op by op",
            "the backend is not Inductor: it traces the graph and fuses nothing",
            'no backend="aot_eager" or "eager": they are for debugging',
            eager & graphs,
            _asked_for(case, "backend"),
        )
    why = "the compiler cannot look into a custom operator, so nothing fuses in it or with it"
    remedy = "call the plain function, which the compiler fuses, or write the operator in Triton"
    own = eager & graphs & rows.within(_is_ones_own)
    return "operators of one's own run op by op in a compiled graph", why, remedy, own, ()


def _asked_for(case: Case, made: str) -> tuple[str, ...]:
    return tuple(f"asked for at {line}" for line in case.setup_lines(made))


def _is_ones_own(call: OpCall) -> bool:
    """Whether a call is of an operator that neither torch nor steplab has."""
    space, colons, _ = call.name.partition("::")
    return bool(colons) and space not in KNOWN and space.isidentifier()


def _no_faster(case: Case) -> Finding | None:
    run, eager = case.run, _eager(case)
    if run is None or eager is None or eager.clock is None or run.clock is None:
        return None
    compiled_ms, eager_ms = case.step_ms, eager.clock.step.median
    if not compiled_ms >= (1 - MIN_GAIN) * eager_ms:
        return None
    evidence = [f"{eager.id}: {units.milliseconds(eager_ms)} without compile"]
    if run.compilation is not None and run.compilation.first_seconds:
        evidence.append(f"the first step took {run.compilation.first_seconds:.1f} s")
    if case.rows is not None:
        products = case.rows.labeled("category", lambda c: c.startswith(("matmul", "attention")))
        share = case.rows.ms(products) / max(case.rows.ms(case.rows.inside), 1e-9)
        evidence.append(f"products and attention are {units.percent(share)} of the work")
    return Finding(
        rule="compiled_not_faster",
        claim=f"compiled {units.milliseconds(compiled_ms)}, eager {units.milliseconds(eager_ms)}",
        evidence=tuple(evidence),
        remedy="leave compile out, or look for graph breaks and for work that cannot fuse",
        stake_ms=max(0.0, compiled_ms - eager_ms),
        why="compiling costs seconds at every start and gives nothing back here",
        gain_ms=max(0.0, compiled_ms - eager_ms),
    )


def _eager(case: Case) -> Run | None:
    """Return the newest of the other Runs whose recipe is this one without `compile`."""
    if case.run is None or "compile" not in case.run.spec.recipe.techniques:
        return None
    wanted = _without_compile(case.run.spec.recipe)
    same = [run for run in case.others if run.spec.recipe.techniques == wanted]
    return max(same, key=lambda run: run.id, default=None)


def _without_compile(recipe: Recipe) -> Mapping[str, Settings]:
    return {name: given for name, given in recipe.techniques.items() if name != "compile"}


RULE = check
