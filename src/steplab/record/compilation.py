"""Compilation: what torch.compile did during a Run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Recompile:
    """One recompilation: the function and the guard that failed."""

    function: str
    reason: str


@dataclass(frozen=True)
class Compilation:
    """Graphs, breaks and recompiles up to the end of the measured window."""

    graphs: int
    graphs_in_window: int  # new graphs while the clock ran: the samples are not steady if > 0
    breaks: Mapping[str, int] = field(default_factory=dict)  # reason -> count
    recompiles: tuple[Recompile, ...] = ()
    first_seconds: float | None = None  # the first step, compilation included
    cache_hits: int = 0
    cache_misses: int = 0
    # The first step again after a reset in the same process, disk cache filled. A new process
    # pays more: it also imports the compiler and loads the kernels.
    warm_seconds: float | None = None
    cudagraph_skips: int = 0  # graphs that Inductor was to replay by CUDA graph and could not

    @property
    def cold_seconds(self) -> float | None:
        """The first step's seconds if nothing came out of the compile cache, else None."""
        return self.first_seconds if self.cache_misses and not self.cache_hits else None
