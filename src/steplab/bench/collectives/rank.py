"""What runs in every rank: time the collectives of a job, check their results, let rank 0 report.

Buffers are filled with values whose result is known: every (sender, part) has a tile of
pseudo-random integers, repeated over that part of the message, so that a part that is lost,
doubled, swapped or shifted shows.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from time import perf_counter
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import record

from steplab.bench.collectives.job import (
    JOB_FILE,
    LARGEST_VALUE,
    MAX_WORLD,
    OUTCOME_FILE,
    Collective,
    CollectiveOp,
    Job,
    Outcome,
    message_elements,
)
from steplab.core.codec import decode, encode
from steplab.probes.clock import Stopwatch

T = TypeVar("T")
# A prime, so that no split of a message into blocks falls on the tile's period.
PERIOD = 1021
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# About 1 ms at the 2 GHz of an H200, some ten times what the host needs to queue two collectives.
SLEEP_CYCLES = 2_000_000
# torch 2.13 renamed both and warns about the old names at every call.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Timing(NamedTuple):
    """One run on one rank, in milliseconds."""

    ms: float  # until the result was there: on the device's clock on CUDA, else on the host's
    host_ms: float  # until the call returned
    late: bool = False  # the device reached the run before all of it was queued


@dataclass(frozen=True)
class RankResult:
    """What one rank measured in a cell."""

    runs: tuple[Timing, ...]
    window_ms: float
    wrong: int  # elements with a wrong value after the last run


@record
def measure_job(folder: str) -> None:
    """Measure all cells of the job in `folder`; rank 0 appends one line per cell as it ends."""
    job: Job = decode(Job, json.loads((Path(folder) / JOB_FILE).read_text()), JOB_FILE)
    device = torch.device("cpu")
    if job.backend == "nccl":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group(
        job.backend,
        timeout=timedelta(seconds=job.timeout_s),
        device_id=device if job.backend == "nccl" else None,
    )
    with (Path(folder) / OUTCOME_FILE).open("a") as file:
        for cell in job.cells:
            outcome = _measure(job, cell, device)
            if dist.get_rank() == 0:
                file.write(json.dumps(encode(outcome)) + "\n")
                file.flush()
    dist.destroy_process_group()


def _measure(job: Job, cell: Collective, device: torch.device) -> Outcome:
    buffers, problem = None, None
    elements = message_elements(cell.mib, job.dtype, job.world)
    try:
        buffers = Buffers(cell.op, elements, DTYPES[job.dtype], device, dist.get_rank(), job.world)
    except Exception as error:
        problem = _problem(error, cell)
    # All ranks must know before any of them waits for a collective that will not come.
    for rank, failed in enumerate(_from_all(problem)):
        if failed is not None:
            return replace(failed, reason=f"rank {rank} {failed.reason}")
    assert buffers is not None
    timed = _time_queued if device.type == "cuda" else _time_call
    for _ in range(job.warmup):
        timed(buffers)
    start = perf_counter()
    runs = tuple(timed(buffers) for _ in range(job.runs))
    window_ms = (perf_counter() - start) * 1e3
    return _judged(_from_all(RankResult(runs, window_ms, buffers.wrong())))


def _problem(error: Exception, cell: Collective) -> Outcome:
    """Return the outcome of a cell whose buffers could not be made; the reason lacks the rank."""
    from steplab.step.failures import is_out_of_memory

    text = " ".join(str(error).split())[:200] or type(error).__name__
    if is_out_of_memory(error):
        return Outcome("oom", f"had no memory for {cell}: {text}")
    return Outcome(
        "failed", f"could not make the buffers of {cell}: {type(error).__name__}: {text}"
    )


def _time_call(buffers: Buffers) -> Timing:
    """Run the collective once on CPU, where the call returns when it is done."""
    buffers.refill()
    dist.barrier()
    watch = Stopwatch(on_cuda=False)
    start = watch.mark()
    buffers.communicate()
    ms = watch.host_ms(start, watch.mark())
    return Timing(ms, ms)


def _time_queued(buffers: Buffers) -> Timing:
    """Run the collective once on CUDA and time the device.

    An idle device would pass the start event at once and then wait for the host, which needs tens
    of microseconds to launch: more than a small message takes. So everything is queued while the
    device sleeps. Back-to-back calls would not do: the host is slower than small messages.
    """
    buffers.refill()
    dist.barrier()
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)
    # Sleeps end at different times; the ranks leave a collective within microseconds. Not a
    # barrier, for which the host would wait.
    dist.all_reduce(buffers.token)
    watch = Stopwatch(on_cuda=True)
    start = watch.mark()
    buffers.communicate()
    end = watch.mark()
    late = watch.events[start].query()
    torch.cuda.synchronize()
    return Timing(watch.device_ms(start, end), watch.host_ms(start, end), late)


def _judged(ranks: list[RankResult]) -> Outcome:
    for rank, result in enumerate(ranks):
        if result.wrong:
            return Outcome("failed", f"rank {rank} received {result.wrong:,} wrong values")
    return Outcome(
        rank_ms=tuple(tuple(run.ms for run in result.runs) for result in ranks),
        rank_host_ms=tuple(tuple(run.host_ms for run in result.runs) for result in ranks),
        late_runs=sum(
            any(run.late for run in ranks_of_run)
            for ranks_of_run in zip(*(result.runs for result in ranks), strict=True)
        ),
        window_ms=max(result.window_ms for result in ranks),
    )


def _from_all(mine: T) -> list[T]:
    everyone: list[T] = [mine] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


class Buffers:
    """Send and receive buffers of `op` for a full message of `elements` elements."""

    def __init__(
        self,
        op: CollectiveOp,
        elements: int,
        dtype: torch.dtype,
        device: torch.device,
        rank: int,
        world: int,
    ) -> None:
        part = elements // world
        self.sent = [t.to(device, dtype) for t in sent_tiles(op, rank, world)]
        self.expected = expected_tiles(op, rank, world)
        self.token = torch.zeros(1, device=device)  # for a collective that only lines up the ranks
        source_size = part if op == "all-gather" else elements
        self.source = self.result = torch.empty(source_size, dtype=dtype, device=device)
        if op != "all-reduce":
            result_size = part if op == "reduce-scatter" else elements
            self.result = torch.empty(result_size, dtype=dtype, device=device)
        calls: dict[CollectiveOp, Callable[[], object]] = {
            "all-reduce": lambda: dist.all_reduce(self.source),
            "all-gather": lambda: _gather(self.result, self.source),
            "reduce-scatter": lambda: _scatter(self.result, self.source),
            "all-to-all": lambda: dist.all_to_all_single(self.result, self.source),
        }
        self.communicate = calls[op]

    def refill(self) -> None:
        """Restore the values to send: an in-place sum grows as world**runs and overflows fp32."""
        if self.result is not self.source:
            self.result.fill_(-1)
        write_tiles(self.source, self.sent)

    def wrong(self) -> int:
        """Count the received elements that are not what the collective must deliver."""
        return count_wrong(self.result, self.expected)


def tile(sender: int, part: int) -> Tensor:
    """Return the values [PERIOD] that rank `sender` puts into part `part` of its message."""
    generator = torch.Generator().manual_seed(sender * MAX_WORLD + part)
    return torch.randint(0, LARGEST_VALUE + 1, (PERIOD,), generator=generator)


def sent_tiles(op: CollectiveOp, rank: int, world: int) -> list[Tensor]:
    """Return one tile per part of what `rank` sends: a part for each rank, or one for all."""
    parts = world if op in ("reduce-scatter", "all-to-all") else 1
    return [tile(rank, part) for part in range(parts)]


def expected_tiles(op: CollectiveOp, rank: int, world: int) -> list[Tensor]:
    """Return one tile per part of what `rank` must hold afterward: the collective's definition."""
    part = rank if op in ("reduce-scatter", "all-to-all") else 0
    arrived = [tile(sender, part) for sender in range(world)]
    if op in ("all-reduce", "reduce-scatter"):
        return [torch.stack(arrived).sum(0)]
    return arrived


def write_tiles(x: Tensor, tiles: Sequence[Tensor]) -> None:
    """Fill each of `len(tiles)` equal parts of the flat `x` with its tile, repeated."""
    for part, values in zip(x.view(len(tiles), -1), tiles, strict=True):
        whole = part.numel() // PERIOD * PERIOD
        part[:whole].view(-1, PERIOD).copy_(values)
        part[whole:].copy_(values[: part.numel() - whole])


def count_wrong(x: Tensor, tiles: Sequence[Tensor]) -> int:
    """Count the elements of the flat `x` that differ from what `write_tiles` would write."""
    wrong = 0
    for part, values in zip(x.view(len(tiles), -1), tiles, strict=True):
        expected = values.to(x.device, x.dtype)
        whole = part.numel() // PERIOD * PERIOD
        wrong += int((part[:whole].view(-1, PERIOD) != expected).sum())
        wrong += int((part[whole:] != expected[: part.numel() - whole]).sum())
    return wrong
