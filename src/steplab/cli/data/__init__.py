"""`steplab data`: what prepares series for training, one file each."""

from steplab.cli.command import Group

COMMAND = Group("prepare series: look at them, clean, pack, download", "steplab.cli.data")
