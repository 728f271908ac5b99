"""Implementation of an op, as in `impl.attention=flash`: sets `impl` on the modules of that op."""

from __future__ import annotations

from collections.abc import Mapping

from steplab.core import Run, Setting, Settings
from steplab.core.errors import Unsupported, UserError, did_you_mean
from steplab.hardware.kernel_names import FUSED_ATTENTION, traced_attention
from steplab.kernels.dispatch import AUTO, REFERENCE, impls, needs_gpu, worth_trying
from steplab.techniques.context import StepContext, Suggestion
from steplab.techniques.technique import Stage, StepParts, Technique

UNLIKELY = 0.01  # what `auto` has passed over: tried when nothing else is left


class Impl(Technique):
    """Its settings are the ops that exist in `kernels/`; each value is a file there, or `auto`."""

    stage = Stage.IMPLEMENTATION
    settings = None  # keyed by op, so not a dataclass

    def read(
        self, words: Mapping[str, str], name: str, base: Mapping[str, Setting] | None = None
    ) -> dict[str, Setting]:
        """Check each op and implementation by name."""
        if "" in words:
            raise UserError(f"{name} needs an op.", f"Example: {name}.attention=flash")
        return {**(base or {}), **words}

    def complete(self, settings: Mapping[str, Setting]) -> dict[str, Setting]:
        """Return the settings: there is no first field to fill in."""
        return dict(settings)

    def check(self, settings: Mapping[str, Setting], name: str) -> None:
        """Raise a UserError for an unknown op or implementation."""
        for op, impl in settings.items():
            known = [*impls(op), AUTO]
            if impl not in known:
                raise UserError(
                    f"{op} has no implementation {impl!r}.", did_you_mean(str(impl), known)
                )

    def apply(self, parts: StepParts, settings: Mapping[str, Setting]) -> None:
        """Set `impl` on every module that declares the op."""
        for op, impl in settings.items():
            modules = [m for m in parts.model.modules() if getattr(m, "op", None) == op]
            if not modules:
                raise Unsupported(
                    f"This model has no module that declares the op {op!r}.",
                    "Leave impl out of the recipe.",
                )
            for module in modules:
                module.impl = impl  # type: ignore[assignment]

    def suggest(self, context: StepContext, current: Settings) -> list[Suggestion]:
        """The library's own choice for all ops that have another; then op by op.

        Not what the baseline ran: what is set now has beaten it. Where `auto` has chosen, the
        others are less likely to win.
        """
        named = [op for op in context.impls if current.get(op, AUTO) != AUTO]
        free = {**current, **dict.fromkeys(named, AUTO)}
        at_once = [Suggestion(free, {f"op:{op}": 1.0 for op in named})] if named else []
        one_by_one = [
            Suggestion(
                {**current, op: impl},
                {f"op:{op}": 1.0},
                prior=1.0 if op in named else UNLIKELY,
                refusal="needs a GPU" if needs_gpu(op, impl) and not context.on_cuda else "",
            )
            for op, ran in context.impls.items()
            for impl in impls(op)
            if impl not in (ran, REFERENCE, context.first_impls.get(op)) and worth_trying(op, impl)
        ]
        return at_once + one_by_one

    def mismatch(self, settings: Mapping[str, Setting], run: Run) -> str:
        """Compare with what the modules dispatched and with the attention seen in the trace."""
        for op, impl in settings.items():
            seen = run.ran.impls.get(op, ()) if run.ran else ()
            if impl != AUTO and seen != (impl,):
                return f"{op} {impl!r} was asked for, but {', '.join(seen) or 'nothing'} ran"
        asked, traced = settings.get("attention"), traced_attention(run.ran)
        if asked in FUSED_ATTENTION and traced and traced != {asked}:
            names = ", ".join(sorted(traced))
            return f"attention {asked!r} was asked for, but the trace shows {names}"
        return ""

    def unverified(self, settings: Mapping[str, Setting], run: Run) -> str:
        """A replayed CUDA graph dispatches no ops, and its kernel names may be unknown."""
        asked = settings.get("attention")
        if asked in FUSED_ATTENTION and not traced_attention(run.ran):
            return f"unverified: no attention op or known kernel in the trace, {asked} was asked"
        return ""


TECHNIQUE = Impl()
