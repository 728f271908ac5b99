"""What runs in every rank: time the cells of a job, check their results, let rank 0 report."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from time import perf_counter
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from steplab.codec import decode, encode
from steplab.probes.clock import Stopwatch
from steplab.studies.collectives.bandwidth import message_elements
from steplab.studies.collectives.job import JOB_FILE, OUTCOME_FILE, Cell, Job, Outcome
from steplab.studies.collectives.message import Message

T = TypeVar("T")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# About 1 ms at the 2 GHz of an H200, some ten times what the host needs to queue two collectives.
SLEEP_CYCLES = 2_000_000


class Timing(NamedTuple):
    """One run on one rank, in milliseconds."""

    ms: float  # until the result was there: on the device's clock on CUDA, else on the host's
    host_ms: float  # until the call returned
    late: bool = False  # the device came to the run before all of it was queued


@dataclass(frozen=True)
class Seen:
    """What one rank saw of a cell."""

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


def _measure(job: Job, cell: Cell, device: torch.device) -> Outcome:
    message, problem = None, None
    elements = message_elements(cell.mib, job.dtype, job.world)
    try:
        message = Message(cell.op, elements, DTYPES[job.dtype], device, dist.get_rank(), job.world)
    except Exception as error:
        problem = _problem(error, cell)
    # All ranks must know before any of them waits for a collective that will not come.
    for rank, found in enumerate(_from_all(problem)):
        if found is not None:
            return replace(found, reason=f"rank {rank} {found.reason}")
    assert message is not None
    timed = _time_queued if device.type == "cuda" else _time_call
    for _ in range(job.warmup):
        timed(message)
    start = perf_counter()
    runs = tuple(timed(message) for _ in range(job.runs))
    window_ms = (perf_counter() - start) * 1e3
    return _judged(_from_all(Seen(runs, window_ms, message.wrong())))


def _problem(error: Exception, cell: Cell) -> Outcome:
    """Return how a cell ends whose buffers could not be made; the reason lacks the rank."""
    from steplab.engine.trial import is_out_of_memory

    text = " ".join(str(error).split())[:200] or type(error).__name__
    if is_out_of_memory(error):
        return Outcome("oom", f"had no memory for {cell}: {text}")
    return Outcome(
        "failed", f"could not make the buffers of {cell}: {type(error).__name__}: {text}"
    )


def _time_call(message: Message) -> Timing:
    """Run the collective once on CPU, where the call returns when it is done."""
    message.refill()
    dist.barrier()
    watch = Stopwatch(on_cuda=False)
    start = watch.mark()
    message.communicate()
    ms = watch.host_ms(start, watch.mark())
    return Timing(ms, ms)


def _time_queued(message: Message) -> Timing:
    """Run the collective once on CUDA and time the device.

    An idle device would pass the start event at once and then wait for the host, which needs tens
    of microseconds to launch: more than a small message takes. So everything is queued while the
    device sleeps. Back-to-back calls would not do: the host is slower than small messages.
    """
    message.refill()
    dist.barrier()
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP_CYCLES)
    # Sleeps end at different times; the ranks leave a collective within microseconds. Not a
    # barrier, for which the host would wait.
    dist.all_reduce(message.token)
    watch = Stopwatch(on_cuda=True)
    start = watch.mark()
    message.communicate()
    end = watch.mark()
    late = watch.events[start].query()
    torch.cuda.synchronize()
    return Timing(watch.device_ms(start, end), watch.host_ms(start, end), late)


def _judged(ranks: list[Seen]) -> Outcome:
    for rank, seen in enumerate(ranks):
        if seen.wrong:
            return Outcome("failed", f"rank {rank} received {seen.wrong:,} wrong values")
    return Outcome(
        rank_ms=tuple(tuple(run.ms for run in seen.runs) for seen in ranks),
        rank_host_ms=tuple(tuple(run.host_ms for run in seen.runs) for seen in ranks),
        late_runs=sum(
            any(run.late for run in ranks_of_run)
            for ranks_of_run in zip(*(seen.runs for seen in ranks), strict=True)
        ),
        window_ms=max(seen.window_ms for seen in ranks),
    )


def _from_all(mine: T) -> list[T]:
    everyone: list[T] = [mine] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone
