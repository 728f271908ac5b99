"""Training: the Step in a loop, with data, a schedule, validation and checkpoints."""

from steplab.engine.training.loop import Outcome, train

__all__ = ["Outcome", "train"]
