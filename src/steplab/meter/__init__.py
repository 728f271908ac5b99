"""The Meter: for people with a training loop of their own."""

from steplab.meter.meter import Meter

__all__ = ["Meter"]
