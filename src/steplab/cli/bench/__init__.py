"""`steplab bench`: a shelf of studies, one file each."""

from steplab.cli.command import Group

COMMAND = Group(
    "measure: a training step, one op, precision, collectives, forecasts", "steplab.cli.bench"
)
