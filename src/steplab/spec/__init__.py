"""What to run: pure data, no torch."""

from steplab.spec.recipe import PLAIN, Recipe
from steplab.spec.spec import MODES, Mode, RunSpec, fingerprint

__all__ = ["MODES", "PLAIN", "Mode", "Recipe", "RunSpec", "fingerprint"]
