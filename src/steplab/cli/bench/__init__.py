"""Measure a training step, one op, precision, collectives or forecasts."""

from steplab.cli.command import Group

COMMAND = Group("steplab.cli.bench")
