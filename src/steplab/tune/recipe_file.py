"""A Recipe as a TOML file that every --recipe accepts. No torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from steplab.spec import Recipe
from steplab.spec.recipe import Setting
from steplab.store.atomic import disk_errors, write_file


def write_recipe(recipe: Recipe, path: Path, comments: Sequence[str] = ()) -> None:
    """Write one table of settings per technique; `comments` stand above."""
    lines = [f"# {' '.join(comment.split())}" for comment in comments]
    for name, settings in sorted(recipe.techniques.items()):
        lines += ["", f"[{name}]", *(f"{key} = {_value(v)}" for key, v in settings.items())]
    with disk_errors(path.parent, "--out"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, ("\n".join(lines) + "\n").encode())


def _value(value: Setting) -> str:
    """A number, a bool or a text in TOML, which writes these as JSON does."""
    return json.dumps(value)
