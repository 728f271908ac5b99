"""How long collectives take: world size x operation x message size, each cell a Run."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace

from steplab.errors import UserError
from steplab.record import Environment, Run
from steplab.spec import RunSpec, fingerprint
from steplab.store import Store, open_sweep
from steplab.studies.collectives import group
from steplab.studies.collectives.bandwidth import message_elements
from steplab.studies.collectives.job import MAX_WORLD, Backend, Cell, Dtype, Job, Op, Outcome
from steplab.studies.collectives.recording import to_run


@dataclass(frozen=True)
class Grid:
    """The values of every axis, and what is the same in all cells."""

    ops: tuple[Op, ...]
    mibs: tuple[float, ...]
    worlds: tuple[int, ...]
    device: str = "cpu"
    dtype: Dtype = "fp32"
    runs: int = 10
    warmup: int = 2
    timeout_s: float = 600.0  # per world size

    def __post_init__(self) -> None:
        if self.runs < 1 or self.warmup < 0 or not 0 < self.timeout_s < math.inf:
            raise UserError(
                "A study of collectives needs at least 1 run, 0 warm-ups and a positive timeout."
            )
        for world, mib in itertools.product(self.worlds, self.mibs):
            if not 1 <= world <= MAX_WORLD:
                raise UserError(f"{world} ranks cannot be measured.", f"Use 1 to {MAX_WORLD}.")
            if not 0 < mib < math.inf or message_elements(mib, self.dtype, world) == 0:
                raise UserError(
                    f"A message of {mib:g} MiB has no {self.dtype} element for each of {world} "
                    "ranks.",
                    "Use a larger --mib.",
                )

    @property
    def backend(self) -> Backend:
        """What carries the messages on this device."""
        return "nccl" if self.device == "cuda" else "gloo"


def plan(grid: Grid) -> list[RunSpec]:
    """Return one spec per cell, world sizes outermost: the ranks of one are started once."""
    same = {"dtype": grid.dtype, "backend": grid.backend, "runs": grid.runs, "warmup": grid.warmup}
    return [
        RunSpec(
            workload="collectives",
            config={"op": op, "world": world, "mib": mib, **same},
            device=grid.device,
            steps=grid.runs,
            warmup=grid.warmup,
        )
        for world, op, mib in itertools.product(grid.worlds, grid.ops, grid.mibs)
    ]


def sweep(
    grid: Grid, store: Store, environment: Environment, command: Sequence[str] = ()
) -> Iterator[Run]:
    """Yield a Run for every cell of `plan(grid)`, in order; each is stored before it is yielded.

    Cells that an interrupted sweep of the same grid has finished are read, not measured again.
    """
    specs = plan(grid)
    current = open_sweep(store, specs, environment)
    for world, cells in itertools.groupby(specs, key=lambda spec: int(spec.config["world"])):
        waiting = []
        for spec in cells:
            done = current.finished.get(fingerprint(spec))
            if done is None:
                waiting.append(spec)
            else:
                yield done
        with contextlib.closing(_outcomes(grid, world, waiting, environment)) as outcomes:
            for spec, outcome in zip(waiting, outcomes, strict=True):
                run = to_run(spec, outcome, environment)
                run = replace(run, group=current.id, command=tuple(command))
                store.save(run)
                yield run


def refusal(backend: Backend, world: int, environment: Environment) -> str:
    """Return why `world` ranks cannot be started here, or "" when they can."""
    gpus = len(environment.accelerators)
    if backend == "nccl" and world > gpus:
        return f"NCCL ranks do not share a GPU, and {world} ranks found {gpus}; use --device cpu"
    return ""


def _outcomes(
    grid: Grid, world: int, specs: Sequence[RunSpec], environment: Environment
) -> Generator[Outcome, None, None]:
    reason = refusal(grid.backend, world, environment)
    if reason:
        yield from [Outcome("unsupported", reason)] * len(specs)
    elif specs:
        cells = tuple(Cell(spec.config["op"], spec.config["mib"]) for spec in specs)
        yield from group.measure(
            Job(world, grid.backend, grid.dtype, cells, grid.runs, grid.warmup, grid.timeout_s)
        )
