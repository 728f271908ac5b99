"""What runs in every rank: time the cells of a job, check their results, let rank 0 report."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from time import perf_counter
from typing import TypeVar

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


@dataclass(frozen=True)
class Seen:
    """What one rank saw of a cell, in milliseconds per run."""

    ms: tuple[float, ...]
    host_ms: tuple[float, ...]
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
    message, problem = None, ""
    elements = message_elements(cell.mib, job.dtype, job.world)
    try:
        message = Message(cell.op, elements, DTYPES[job.dtype], device, dist.get_rank(), job.world)
    except (RuntimeError, MemoryError) as error:  # allocations: torch raises either for no memory
        problem = " ".join(str(error).split())[:200] or type(error).__name__
    # All ranks must know before any of them waits for a collective that will not come.
    for rank, text in enumerate(_from_all(problem)):
        if text:
            return Outcome("oom", f"rank {rank} had no memory for {cell}: {text}")
    assert message is not None
    for _ in range(job.warmup):
        _time_once(message, device)
    start = perf_counter()
    times = [_time_once(message, device) for _ in range(job.runs)]
    window_ms = (perf_counter() - start) * 1e3
    ms, host_ms = zip(*times, strict=True)
    return _judged(_from_all(Seen(ms, host_ms, window_ms, message.wrong())))


def _time_once(message: Message, device: torch.device) -> tuple[float, float]:
    """Run the collective once; return its milliseconds on the device's and on the host's clock."""
    on_cuda = device.type == "cuda"
    message.refill()
    dist.barrier()
    if on_cuda:
        torch.cuda.synchronize()
    watch = Stopwatch(on_cuda)
    start = watch.mark()
    message.communicate()
    end = watch.mark()
    if on_cuda:
        torch.cuda.synchronize()
    return watch.device_ms(start, end), watch.host_ms(start, end)


def _judged(ranks: list[Seen]) -> Outcome:
    for rank, seen in enumerate(ranks):
        if seen.wrong:
            return Outcome("failed", f"rank {rank} received {seen.wrong:,} wrong values")
    return Outcome(
        rank_ms=tuple(seen.ms for seen in ranks),
        rank_host_ms=tuple(seen.host_ms for seen in ranks),
        window_ms=max(seen.window_ms for seen in ranks),
    )


def _from_all(mine: T) -> list[T]:
    everyone: list[T] = [mine] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone
