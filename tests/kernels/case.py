"""What the cases of all kernels share."""

from dataclasses import fields


class Named:
    """A dataclass of one case; as text, and so as the id of a test, what is not as by default."""

    def __str__(self):
        given = [(f.name, getattr(self, f.name)) for f in fields(self)]
        default = {f.name: f.default for f in fields(self)}
        changed = [f"{name}={value}" for name, value in given if value != default[name]]
        return ",".join(changed).replace("torch.", "") or "plain"
