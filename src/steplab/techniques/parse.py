"""Words and files to Recipes, checked against the techniques that exist."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

from steplab import shelf
from steplab.errors import UserError
from steplab.spec import PLAIN, Recipe
from steplab.techniques.technique import Technique


def technique(name: str) -> Technique:
    """Return the technique of that name."""
    found: Technique = shelf.load("steplab.techniques", name, "TECHNIQUE")
    return found


def parse_recipe(text: str) -> Recipe:
    """Read `plain`, `precision=bf16,compile=blocks,impl.attention=flash`, or a .toml/.json file."""
    if text == "plain":
        return PLAIN
    if text.endswith((".toml", ".json")):
        return read_recipe_file(Path(text))
    words: dict[str, dict[str, str]] = {}
    for part in text.split(","):
        left, equals, value = part.partition("=")
        name, _, key = left.strip().partition(".")
        if not equals or not name or not value:
            raise UserError(
                f"{part!r} in the recipe {text!r} is not technique=value.",
                "Example: precision=bf16,compile=blocks",
            )
        own = words.setdefault(name, {})
        if key in own:
            raise UserError(f"The recipe {text!r} sets {left.strip()} twice.", "Keep one.")
        own[key] = value.strip()
    recipe = Recipe({name: technique(name).read(given, name) for name, given in words.items()})
    check_recipe(recipe)
    return recipe


def read_recipe_file(path: Path) -> Recipe:
    """Read a recipe from TOML (`[precision]` / `dtype = "bf16"`) or the same as JSON."""
    try:
        text = path.read_text(encoding="utf-8")
        data: Any = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except FileNotFoundError:
        raise UserError(f"There is no recipe file {path}.") from None
    except (OSError, ValueError) as error:
        raise UserError(f"The recipe {path} cannot be read ({error}).") from None
    if not isinstance(data, dict) or not all(isinstance(v, dict) for v in data.values()):
        raise UserError(f"The recipe {path} must hold one table of settings per technique.")
    return Recipe({name: technique(name).complete(given, name) for name, given in data.items()})


def check_recipe(recipe: Recipe) -> None:
    """Raise a UserError for unknown techniques, bad settings or techniques that conflict."""
    for name, settings in recipe.techniques.items():
        found = technique(name)
        found.check(settings, name)
        clash = next((other for other in found.conflicts if other in recipe.techniques), None)
        if clash:
            raise UserError(f"The techniques {name} and {clash} cannot be used together.")
