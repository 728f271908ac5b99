"""Recipe: which techniques change a step, and how each is set."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Setting = str | int | float | bool
Settings = Mapping[str, Setting]


@dataclass(frozen=True)
class Recipe:
    """Settings per technique: `{"precision": {"dtype": "bf16"}, "compile": {"scope": "blocks"}}`.

    Holds only what was asked for; a technique fills in its own defaults. The order of the
    techniques means nothing: each declares the stage at which it is applied.
    """

    techniques: Mapping[str, Settings] = field(default_factory=dict)

    @property
    def label(self) -> str:
        """One line that `parse_recipe` reads back: `precision=bf16,compile=blocks`."""
        words = []
        for name in sorted(self.techniques):
            for index, (key, value) in enumerate(self.techniques[name].items()):
                # impl is keyed by op, so its first key is no more implied than its second.
                short = index == 0 and name != "impl"
                words.append(f"{name if short else f'{name}.{key}'}={_text(value)}")
        return ",".join(words) or "plain"


PLAIN = Recipe()


def _text(value: Setting) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
