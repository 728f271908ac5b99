"""Measure a training step, one op, precision, collectives or forecasts."""

from __future__ import annotations

from steplab.cli.command import Command, Group
from steplab.core import registry

OPS = "steplab.bench.ops"


class BenchGroup(Group):
    """The commands of this folder, and one for every op benchmark in `steplab.bench.ops`."""

    def names(self) -> list[str]:
        """Return the commands of the group, sorted."""
        return sorted([*super().names(), *registry.names(OPS, "BENCH")])

    def summary(self, name: str) -> str:
        """Return one line about a command, without importing it."""
        if name in registry.names(OPS, "BENCH"):
            return registry.summary(OPS, name)
        return super().summary(name)

    def load(self, name: str) -> Command | Group:
        """Import a command, or make it from the declaration of an op benchmark."""
        if name not in registry.names(OPS, "BENCH"):
            return super().load(name)
        from steplab.cli.op_bench import op_command

        return op_command(registry.load(OPS, name, "BENCH"))


COMMAND = BenchGroup("steplab.cli.bench")
