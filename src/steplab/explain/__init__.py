"""What a stored Run says about itself. No torch."""

from steplab.explain.explain import explain

__all__ = ["explain"]
