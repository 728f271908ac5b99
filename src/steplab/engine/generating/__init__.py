"""Text from a trained model, one byte after the other."""

from steplab.engine.generating.generate import Writer, load

__all__ = ["Writer", "load"]
