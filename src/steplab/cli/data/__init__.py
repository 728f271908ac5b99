"""Prepare series: inspect, clean, pack, download."""

from steplab.cli.command import Group

COMMAND = Group("steplab.cli.data")
