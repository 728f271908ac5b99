"""Large traces for benchmarks: a small real one with made-up device work, many times over."""

from __future__ import annotations

import json
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile

HEAD = """{
  "schemaVersion": 1,
  "deviceProperties": [
    {"id": 0, "name": "NVIDIA H200", "totalGlobalMem": 150754820096, "computeMajor": 9,
     "computeMinor": 0, "numSms": 132}
  ],
  "distributedInfo": {"backend": "nccl", "rank": RANK, "world_size": RANKS},
  "displayTimeUnit": "ms",
  "baseTimeNanoseconds": 1751410836000000000,
  "traceEvents": ["""
TAIL = """
  ], "traceName": "trace.json" }"""
SPAN = """
  {{
    "ph": "X",
    "cat": "{cat}",
    "name": "{name}",
    "pid": {pid},
    "tid": {tid},
    "ts": {ts},
    "dur": {dur}
    ,
    "args": {{
      {args}
    }}
  }},"""
ARROW = """
  {{
    "ph": "{ph}",
    "id": {id},
    "pid": {pid},
    "tid": {tid},
    "ts": {ts},
    "cat": "ac2g",
    "name": "ac2g"
    {binding}
  }},"""
KERNEL = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float> >"
KERNEL_ARGS = (
    '"External id": {op},"queued": 0, "device": 0, "context": 1, "stream": 7, "correlation": {id}, '
    '"registers per thread": 32, "shared memory": 0, "blocks per SM": 0.484848, '
    '"warps per SM": 1.939394, "grid": [64, 1, 1], "block": [128, 1, 1], '
    '"est. achieved occupancy %": 3, "graph id": 0, "graph node id": 0'
)
COLLECTIVE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"
COLLECTIVE_ARGS = (
    '"device": 0, "stream": 20, "correlation": {id}, "Collective name": "allreduce", '
    '"In msg nelems": 12582912, "Out msg nelems": 12582912, "Group size": {ranks}, '
    '"dtype": "BFloat16", "Process Group Name": "0", "Process Group Ranks": "{members}"'
)
# What must differ from copy to copy: times, and the numbers that join events.
MOVING = re.compile(r'"(ts|id|correlation|External id|Sequence number)": (\d+)')


@dataclass(frozen=True)
class Sample:
    """The events of a few milliseconds as a format string, and the numbers that belong in it."""

    template: str
    numbers: np.ndarray
    shifts: np.ndarray  # what each number grows by from copy to copy
    events: int
    period: int  # us

    def copy(self, index: int) -> str:
        """Return the text of copy `index`."""
        return self.template % tuple((self.numbers + index * self.shifts).tolist())


def record_sample() -> Sample:
    """Profile two training steps of a small model, and give every second operator a kernel."""
    layer = torch.nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    optimizer = torch.optim.AdamW(model.parameters())
    x_BTD = torch.randn(2, 16, 64)
    activities = [ProfilerActivity.CPU]
    with profile(
        activities=activities,
        record_shapes=True,
        with_stack=True,
        profile_memory=True,
        acc_events=True,  # torch 2.11 warns without it
    ) as profiler:
        for _ in range(2):
            model(x_BTD).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sample.json"
        profiler.export_chrome_trace(str(path))
        text = path.read_text()
    start = text.index('"traceEvents": [') + len('"traceEvents": [')
    recorded = text[start : text.rindex("]")].rstrip() + ","
    events = json.loads(text)["traceEvents"]
    made_up = [_device_work(number, event) for number, event in enumerate(_operators(events), 1)]
    spans = [event for event in events if event["ph"] == "X" and isinstance(event["pid"], int)]
    return _sample(recorded + "".join(made_up), len(events) + 4 * len(made_up), spans)


def _operators(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event.get("cat") == "cpu_op"][::2]


def _device_work(number: int, op: dict[str, Any]) -> str:
    """Return a launch within `op`, its kernel and the arrow between them."""
    called, ran = f"{op['ts']:.3f}", f"{op['ts'] + 9:.3f}"
    host = {"pid": op["pid"], "tid": op["tid"], "ts": called}
    device = {"pid": 0, "tid": 7, "ts": ran}
    numbers = {"id": number, "op": op["args"]["External id"]}
    call_args = '"External id": {op},"cbid": 211, "correlation": {id}'.format(**numbers)
    call = {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "dur": "4.125", "args": call_args}
    kernel = {
        "cat": "kernel",
        "name": KERNEL,
        "dur": "2.176",
        "args": KERNEL_ARGS.format(**numbers),
    }
    return (
        SPAN.format(**host, **call)
        + ARROW.format(ph="s", id=number, binding="", **host)
        + SPAN.format(**device, **kernel)
        + ARROW.format(ph="f", id=number, binding=', "bp": "e"', **device)
    )


def _sample(text: str, events: int, spans: list[dict[str, Any]]) -> Sample:
    found = list(MOVING.finditer(text))
    numbers = np.array([int(match[2]) for match in found])
    is_time = np.array([match[1] == "ts" for match in found])
    first = int(min(span["ts"] for span in spans))
    period = int(max(span["ts"] + span["dur"] for span in spans)) - first + 100
    return Sample(
        template=MOVING.sub(r'"\1": %d', text.replace("%", "%%")),
        numbers=np.where(is_time, numbers - first + 1_000_000, numbers),
        shifts=np.where(is_time, period, int(numbers[~is_time].max()) + 1),
        events=events,
        period=period,
    )


def write_trace_file(
    path: Path, megabytes: int, sample: Sample, rank: int = 0, ranks: int = 1
) -> int:
    """Write a file of about `megabytes` * 10**6 bytes, a step per copy; return its events.

    With several ranks, every step ends in a collective, to which rank 1 comes half of it late.
    """
    copies = max(1, round(megabytes * 1e6 / len(sample.copy(0))))
    with path.open("w") as file:
        file.write(HEAD.replace("RANKS", str(ranks)).replace("RANK", str(rank)))
        for index in range(copies):
            file.write(_step(index, sample.period))
            if ranks > 1:
                file.write(_collective(index, sample.period, rank, ranks))
            file.write(sample.copy(index).removesuffix(","))
            file.write("," if index < copies - 1 else TAIL)
    return (sample.events + 1 + (ranks > 1)) * copies


def _step(index: int, period: int) -> str:
    """Return the range of the profiler around copy `index`."""
    span = {"ts": f"{1_000_000 + index * period}.000", "dur": f"{period - 1}.000"}
    name, args = f"ProfilerStep#{index}", '"External id": 0'
    return SPAN.format(cat="user_annotation", name=name, pid=1, tid=1, args=args, **span)


def _collective(index: int, period: int, rank: int, ranks: int) -> str:
    """Return the kernel of an all-reduce in the last tenth of copy `index`."""
    end = 1_000_000 + (index + 1) * period
    length = period // (20 if rank == 1 else 10)
    args = COLLECTIVE_ARGS.format(id=2**40 + index, ranks=ranks, members=list(range(ranks)))
    span = {"ts": f"{end - length}.000", "dur": f"{length}.000"}
    return SPAN.format(cat="kernel", name=COLLECTIVE, pid=0, tid=20, args=args, **span)
