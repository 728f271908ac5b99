"""Recipes from words, presets and files, checked against the techniques that exist."""

from __future__ import annotations

from pathlib import Path

from steplab.core import PLAIN, Recipe, registry
from steplab.core.errors import UserError
from steplab.core.input_file import parse_json, parse_toml, read_input, shorten
from steplab.techniques.technique import Technique

PRESETS = Path(__file__).parents[1] / "recipes"
OFF = "off"
LARGEST_RECIPE = 1 << 20  # bytes; the largest of ours has 500


PARALLEL = "parallel"  # the technique by which several ranks share a step


def technique(name: str) -> Technique:
    """Return the technique of that name."""
    found: Technique = registry.load("steplab.techniques", name, "TECHNIQUE")
    return found


def presets() -> list[str]:
    """Return the names of the recipes that come with steplab."""
    return sorted(path.stem for path in PRESETS.glob("*.toml"))


def parse_recipe(text: str) -> Recipe:
    """Read `plain`, a preset's name, a .toml or .json file, or `precision=bf16,compile=blocks`.

    Words may follow a name or a file and change it: `production-training,compile.mode=default`;
    `compile=off` takes a technique out.
    """
    first, _, rest = text.partition(",")
    base = None if "=" in first else _named(first.strip())
    techniques = dict(base.techniques) if base else {}
    for name, given in _words(text if base is None else rest, text).items():
        found = technique(name)
        if given == {"": OFF}:
            if techniques.pop(name, None) is None:
                raise UserError(
                    f"There is no {name} to take out of {first.strip()!r}.",
                    f"{name}={OFF} removes {name} from a preset or a file.",
                )
            continue
        techniques[name] = found.read(given, name, techniques.get(name))
    recipe = Recipe(techniques) if techniques else PLAIN
    check_recipe(recipe)
    return recipe


def _named(word: str) -> Recipe | None:
    """Return the recipe of a file or a preset; None for a word that names neither."""
    if word == "plain":
        return PLAIN
    if word.endswith((".toml", ".json")):
        return read_recipe_file(Path(word))
    return read_recipe_file(PRESETS / f"{word}.toml") if word in presets() else None


def _words(text: str, whole: str) -> dict[str, dict[str, str]]:
    """Return `{"compile": {"": "blocks", "mode": "default"}}` for the words of a recipe."""
    words: dict[str, dict[str, str]] = {}
    for part in text.split(",") if text else []:
        left, equals, value = part.partition("=")
        name, _, key = left.strip().partition(".")
        if not equals or not name or not value:
            raise UserError(
                f"{shorten(part)!r} in the recipe {shorten(whole)!r} is not technique=value.",
                f"Example: precision=bf16,compile=blocks. Presets: {', '.join(presets())}.",
            )
        own = words.setdefault(name, {})
        if key in own:
            raise UserError(
                f"The recipe {shorten(whole)!r} sets {shorten(left.strip())} twice.", "Keep one."
            )
        own[key] = value.strip()
    return words


def read_recipe_file(path: Path) -> Recipe:
    """Read a recipe from TOML (`[precision]` / `dtype = "bf16"`) or the same as JSON."""
    name = f"The recipe {shorten(path)}"
    text = read_input(path, LARGEST_RECIPE)
    data = parse_json(text, name) if path.suffix == ".json" else parse_toml(text, name)
    if not isinstance(data, dict) or not all(isinstance(v, dict) for v in data.values()):
        raise UserError(f"{name} must hold one table of settings per technique.")
    return Recipe({name: technique(name).complete(given) for name, given in data.items()})


def check_recipe(recipe: Recipe) -> None:
    """Raise a UserError for unknown techniques, bad settings or techniques that conflict."""
    for name, settings in recipe.techniques.items():
        found = technique(name)
        found.check(settings, name)
        excluded = next((other for other in found.excludes if other in recipe.techniques), None)
        if excluded:
            raise UserError(f"The techniques {name} and {excluded} cannot be used together.")
        missing = next((other for other in found.needs if other not in recipe.techniques), None)
        if missing:
            raise UserError(f"The technique {name} needs {missing}.", f"Add {missing}=...")
        reason = found.conflict(settings, recipe.techniques)
        if reason:
            raise UserError(f"{name}: {reason}.", f"Change it, or leave {name} out.")


def lacks_scheme(recipe: Recipe, ranks: int) -> bool:
    """Whether each of `ranks` ranks would train a model of its own with the recipe."""
    return ranks > 1 and PARALLEL not in recipe.techniques


def shared_by(recipe: Recipe, ranks: int) -> Recipe:
    """Return the recipe with a scheme by which `ranks` ranks share a step: its own or the default.

    A UserError where the recipe cannot be shared.
    """
    if not lacks_scheme(recipe, ranks):
        return recipe
    scheme = technique(PARALLEL)
    shared = Recipe({**recipe.techniques, PARALLEL: scheme.complete({})})
    # In words that the user wrote: the scheme is not one of them.
    reason = scheme.conflict(shared.techniques[PARALLEL], shared.techniques)
    if reason:
        raise UserError(
            f"{ranks} ranks cannot share a step of this recipe: {reason}.",
            "Leave that out of the recipe, or use one rank.",
        )
    check_recipe(shared)
    return shared


def alone(recipe: Recipe) -> Recipe:
    """Return the recipe without the scheme by which ranks share a step."""
    return Recipe({name: how for name, how in recipe.techniques.items() if name != PARALLEL})
