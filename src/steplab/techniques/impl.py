"""Implementation of an op, as in `impl.attention=flash`: sets `impl` on the modules of that op."""

from __future__ import annotations

from collections.abc import Mapping

from steplab.errors import Unsupported, UserError, did_you_mean
from steplab.kernels.impl import AUTO, impls
from steplab.record import Ran
from steplab.spec.recipe import Setting
from steplab.techniques.technique import Stage, StepParts, Technique


class Impl(Technique):
    """Its settings are the ops that exist in `kernels/`; each value is a file there, or `auto`."""

    summary = "implementation of an op: impl.attention=cudnn|flash|efficient|math|reference|auto"
    stage = Stage.IMPLEMENTATION
    settings = None  # keyed by op, so not a dataclass

    def read(self, words: Mapping[str, str], name: str) -> dict[str, Setting]:
        """Check each op and implementation by name."""
        if "" in words:
            raise UserError(f"{name} needs an op.", f"Example: {name}.attention=flash")
        self.check(words, name)
        return dict(words)

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

    def deviation(self, settings: Mapping[str, Setting], ran: Ran) -> str:
        """Compare with what the modules dispatched and with the aten ops in the trace."""
        for op, impl in settings.items():
            seen = ran.impls.get(op, ())
            if impl != AUTO and seen != (impl,):
                return f"{op} {impl!r} was asked for, but {', '.join(seen) or 'nothing'} ran"
            if op == "attention" and impl in ("flash", "efficient", "cudnn"):
                wanted = f"_{impl}_attention"
                if not any(wanted in name for name in ran.attention_ops):
                    names = ", ".join(ran.attention_ops) or "no attention op"
                    return f"attention {impl!r} was asked for, but the trace shows {names}"
        return ""


TECHNIQUE = Impl()
