"""Environment: the conditions that every number carries."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from steplab.core.units import counted


@dataclass(frozen=True)
class Accelerator:
    """One GPU as its driver names it."""

    name: str
    memory_bytes: int
    capability: str = ""  # compute capability, as in "9.0"
    multiprocessors: int | None = None
    power_limit_w: float | None = None
    power_default_w: float | None = None
    driver: str = ""
    catalog_name: str = ""  # the card it was recognized as; "" when unknown


@dataclass(frozen=True)
class Environment:
    """Machine, versions and settings. Holds no user name, host name or path."""

    steplab: str
    python: str
    platform: str
    cpu: str
    cores: int
    memory_bytes: int | None
    torch: str = ""
    numpy: str = ""
    triton: str = ""
    cuda: str = ""
    cudnn: str = ""
    threads: int | None = None
    accelerators: tuple[Accelerator, ...] = ()
    git: str = ""  # commit of the working directory, "+dirty" when it has changes
    variables: Mapping[str, str] = field(default_factory=dict)  # settings that change speed

    @property
    def device_name(self) -> str:
        """The first GPU's name, or the CPU's."""
        return self.accelerators[0].name if self.accelerators else self.cpu

    @property
    def conditions(self) -> str:
        """One line to print under a table: of the GPU where there is one, else of the CPU."""
        return self.conditions_on("cuda" if self.accelerators else "cpu")

    def conditions_on(self, device: str) -> str:
        """One line to print under numbers that were measured on `device`, "cpu" or "cuda"."""
        if device == "cuda" and self.accelerators:
            cap = self.accelerators[0].power_limit_w
            where = f"{self.device_name}{f' at {cap:.0f} W' if cap else ''}, CUDA {self.cuda}"
        else:
            where = f"{self.cpu}, {counted(self.threads or self.cores, 'thread')}"
        return f"{where}, torch {self.torch}, Python {self.python}, steplab {self.steplab}"
