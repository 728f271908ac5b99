"""Faster forms of what a model of one's own computes, put where they were and proved there.

`substitute=all`, or kinds by name: `substitute=attention+loss`. See `steplab.substitute`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from steplab.core import Run, Setting, Settings, registry
from steplab.core.errors import Unsupported, UserError, did_you_mean
from steplab.core.units import counted
from steplab.techniques.compile import WITH_LOSS
from steplab.techniques.context import StepContext, Suggestion
from steplab.techniques.technique import Stage, StepParts, Technique

if TYPE_CHECKING:
    from steplab.substitute.backend import SubstitutingBackend

ALL = "all"
# Inductor fuses norms too, so a measurement decides: on an H200 nanoGPT's step takes 28.8 ms with
# Inductor's and 28.6 with ours, a Llama's 248 and 250.
BY_NAME = ("norm",)
EXPERTS = "experts"
LOSS = "loss"  # also without a compiler, by logits that wait
# What can go: attention to a third (a dense mask), passes over logits, a loop over experts.
SAVINGS = {
    ALL: {"kind:attention": 0.7, "kind:softmax": 0.5, "kind:elementwise": 0.3}
    | {"memory:activations": 0.8},
    EXPERTS: {"term:launch": 1.0, "term:synchronization": 1.0, "kind:copy": 0.5, "kind:other": 1.0}
    | {"kind:elementwise": 0.5, "memory:activations": 0.5},
    LOSS: {"kind:softmax": 0.5, "memory:activations": 0.5},
    "norm": {"kind:normalization": 0.2, "kind:reduction": 0.5},
}


@dataclass(frozen=True)
class SubstituteSettings:
    """Kinds of substitutions by name, joined by `+`; `all`: those that need no measurement."""

    kinds: str = ALL


class Substitute(Technique):
    """Applied before the model is compiled; the graphs are changed while it is."""

    stage = Stage.SUBSTITUTION
    settings: ClassVar[type] = SubstituteSettings

    def check(self, settings: Mapping[str, Setting], name: str) -> None:
        """Every kind must exist."""
        super().check(settings, name)
        for kind in str(settings["kinds"]).split("+"):
            if kind not in (ALL, *known_kinds()):
                hint = did_you_mean(kind, [ALL, *known_kinds()])
                raise UserError(f"There is no substitution called {kind!r}.", hint)

    def conflict(self, settings: Mapping[str, Setting], recipe: Mapping[str, Settings]) -> str:
        """What is found in graphs needs a compiler; a loss one that sees it."""
        asked, compiled = asked_kinds(settings), recipe.get("compile")
        if compiled is None:
            in_graphs = [kind for kind in asked if kind in graph_kinds() and kind != LOSS]
            named = ALL if takes_all(settings) else next(iter(in_graphs), "")
            return f"{named} needs compile, whose graphs are changed" if named else ""
        if LOSS in asked and compiled.get("scope") not in WITH_LOSS:
            return "head and loss are not in the graphs of the blocks (compile=loss has them)"
        return ""

    def apply(self, parts: StepParts, settings: Mapping[str, Setting]) -> None:
        """Change modules now, and let `compile` hand its graphs over."""
        from steplab.substitute.backend import SubstitutingBackend

        named, every = asked_kinds(settings), takes_all(settings)
        kinds = [k for k in known_kinds() if k in named or (every and k in kinds_of_all())]
        in_modules = [
            found
            for kind in module_kinds()
            if kind in kinds
            for found in registry.load("steplab.substitute", kind, "MODULE_REWRITE").replace(
                parts.model, parts.forward_context
            )
        ]
        in_graphs = [kind for kind in kinds if kind in graph_kinds()]
        if not in_modules and not in_graphs:
            raise Unsupported(
                f"This model has no modules for substitute={settings['kinds']}.",
                "Leave substitute out.",
            )
        parts.substituting = SubstitutingBackend(in_graphs, in_modules)
        if LOSS in in_graphs:
            self._wait_with_logits(parts, parts.substituting)

    def _wait_with_logits(self, parts: StepParts, backend: SubstitutingBackend) -> None:
        """Let a step that will not be compiled put its logits off."""
        from steplab.substitute.lazy_logits import LazyHeads

        around, heads = parts.forward_context, LazyHeads(backend)

        @contextmanager
        def context() -> Iterator[None]:
            with around(), nullcontext() if parts.is_compiled else heads:
                yield

        parts.forward_context = context

    def suggest(self, context: StepContext, current: Settings) -> list[Suggestion]:
        """Offer it once the step is compiled; built-in models choose by `impl`.

        Experts that read their routing on the host are what breaks the graph of a mixture.
        """
        compiled = context.recipe.techniques.get("compile", {})
        if not context.run.spec.source:
            return []
        if not compiled:
            is_broken = any(change.startswith("compile=") for change in context.failed)
            kinds = (EXPERTS, LOSS) if is_broken and not current else ()
            return [Suggestion({"kinds": kind}, SAVINGS[kind]) for kind in kinds]
        if not takes_all(current):
            return [Suggestion({"kinds": ALL}, SAVINGS[ALL])]
        if not context.on_cuda:  # there all is left to the compiler
            return []
        more = [kind for kind in BY_NAME if kind not in asked_kinds(current)]
        return [Suggestion({"kinds": f"{current['kinds']}+{k}"}, SAVINGS[k]) for k in more]

    def remedy(self, run: Run) -> str:
        """Say why nothing was replaced."""
        reasons = [f"{one.place}: {one.reason}" for one in run.substitutions if one.reason]
        return "; ".join(reasons[:2])

    def mismatch(self, settings: Mapping[str, Setting], run: Run) -> str:
        """What was asked for must have been replaced, and as many must run as were planned."""
        planned = planned_counts(run)
        for kind in asked_kinds(settings) if planned else (str(settings["kinds"]),):
            if kind not in planned:
                return f"nothing was replaced by substitute={kind}{_why(run, kind)}"
        ran = executed_counts(run)
        for kind, count in planned.items():
            if kind in ran and ran[kind] < count * run.spec.accumulate:
                places = counted(count, "place")
                return f"substitute replaced {kind} in {places}, but {ran[kind]} ran in a step"
        return ""


def graph_kinds() -> list[str]:
    """Return the kinds that are found in compiled graphs, without importing any."""
    return registry.names("steplab.substitute", "REWRITE")


def module_kinds() -> list[str]:
    """Return the kinds that are found among the modules of a model."""
    return registry.names("steplab.substitute", "MODULE_REWRITE")


def known_kinds() -> list[str]:
    """Return the names of all kinds."""
    return sorted(graph_kinds() + module_kinds())


def kinds_of_all() -> list[str]:
    """Return the kinds that `all` stands for."""
    return [kind for kind in known_kinds() if kind not in BY_NAME]


def asked_kinds(settings: Mapping[str, Setting]) -> tuple[str, ...]:
    """Return the kinds that were named, each of which must be found."""
    return tuple(kind for kind in str(settings["kinds"]).split("+") if kind != ALL)


def takes_all(settings: Mapping[str, Setting]) -> bool:
    """Whether every kind is taken that needs no measurement."""
    return ALL in str(settings.get("kinds", "")).split("+")


def planned_counts(run: Run) -> dict[str, int]:
    """Return by kind in how many places of the graphs a replacement stands."""
    found: dict[str, int] = {}
    for one in run.substitutions:
        if one.what:
            found[one.rewrite] = found.get(one.rewrite, 0) + one.count
    return found


def executed_counts(run: Run) -> dict[str, int]:
    """Return by kind how many replacements ran in one step, where the profiler can tell."""
    if run.ran is None:
        return {}

    def calls(word: str) -> int:
        ops = run.ran.own_ops if run.ran else {}
        return sum(n for op, n in ops.items() if word in op and not op.endswith("backward"))

    found = {LOSS: calls("cross_entropy"), "norm": calls("rms_norm") + calls("layer_norm")}
    # One op, or two grouped products and those of their gradients.
    found[EXPERTS] = calls("fused_experts") + calls("grouped_mm") // 2
    found["feed_forward"] = calls("feed_forward")
    found["rotary"] = calls("kept_in_memory")
    found["packed_attention"] = calls("packed_attention")
    if run.ran.attention_ops:  # a compiler may write attention out in products of its own
        # One that lost its mask may have become a packed one after that.
        found["attention"] = sum(run.ran.attention_ops.values()) + found["packed_attention"]
    return found


def _why(run: Run, kind: str) -> str:
    kinds = kind.split("+")
    left = [s for s in run.substitutions if s.reason and (ALL in kinds or s.rewrite in kinds)]
    if not left:
        return ": there is no place for it"
    return f": {left[0].reason} ({left[0].place})"


TECHNIQUE = Substitute()
