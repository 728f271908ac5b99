"""Traces for tests: a few words per event, written as torch.profiler writes its files.

All times are whole nanoseconds; the file gets microseconds with three decimals.

    text = kineto([op("aten::mm", 0, 5_000), *launched("gemm", 1_000, 7_000, 20_000)])
    trace = trace_of([op("aten::mm", 0, 5_000)])
"""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from steplab.trace.events import Trace
from steplab.trace.load import read_trace

PID = 100
MAIN, AUTOGRAD = 100, 101  # thread numbers
STREAM = 7

Event = dict[str, Any]


def microseconds(ns: int) -> str:
    """Return `ns` as Kineto prints it: microseconds with exactly three decimals."""
    sign, ns = ("-", -ns) if ns < 0 else ("", ns)
    return f"{sign}{ns // 1000}.{ns % 1000:03d}"


def complete(
    category: str,
    name: str,
    start: int,
    duration: int,
    pid: int | str = PID,
    tid: int | str = MAIN,
    **args: object,
) -> Event:
    """Return an event of phase X; underscores in the names of `args` stand for blanks."""
    named = {key.replace("_", " "): value for key, value in args.items() if value is not None}
    event: Event = {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid}
    return {**event, "ts": microseconds(start), "dur": microseconds(duration), "args": named}


def op(
    name: str,
    start: int,
    duration: int,
    thread: int = MAIN,
    *,
    sequence: int | None = None,
    forward_thread: int | None = None,
    shapes: object = None,
    strides: object = None,
    dtypes: object = None,
    values: object = None,
) -> Event:
    """Return an operator; `shapes` and the like are lists, as `[[8, 64], [64, 64]]`."""
    args = {
        "Sequence number": sequence,
        "Fwd thread id": forward_thread,
        "Input Dims": shapes,
        "Input Strides": strides,
        "Input type": dtypes,
        "Concrete Inputs": values,
    }
    return complete("cpu_op", name, start, duration, PID, thread, **args)


def python(name: str, start: int, duration: int, thread: int = MAIN) -> Event:
    """Return a Python call: "model.py(12): forward" or "nn.Module: Linear_0"."""
    return complete("python_function", name, start, duration, PID, thread, Python_id=1)


def range_(name: str, start: int, duration: int, thread: int = MAIN) -> Event:
    """Return a record_function range of the host, such as "forward" or "ProfilerStep#3"."""
    return complete("user_annotation", name, start, duration, PID, thread)


def device_range(name: str, start: int, duration: int, stream: int = STREAM) -> Event:
    """Return a record_function range as the device saw it."""
    return complete("gpu_user_annotation", name, start, duration, 0, stream)


def call(
    name: str,
    start: int,
    duration: int,
    correlation: int = 0,
    thread: int = MAIN,
    category: str = "cuda_runtime",
) -> Event:
    """Return a call of the CUDA runtime by the host."""
    return complete(category, name, start, duration, PID, thread, correlation=correlation)


def kernel(
    name: str,
    start: int,
    duration: int,
    correlation: int = 0,
    stream: int = STREAM,
    device: int = 0,
    graph: int | None = None,
    grid: tuple[int, int, int] = (1, 1, 1),
) -> Event:
    """Return a kernel on the device."""
    args = {
        "device": device,
        "stream": stream,
        "correlation": correlation,
        "graph id": graph,
        "grid": list(grid),
        "block": [128, 1, 1],
        "registers per thread": 32,
    }
    return complete("kernel", name, start, duration, device, stream, **args)


def copy(
    name: str,
    start: int,
    duration: int,
    correlation: int = 0,
    bytes_: int = 0,
    stream: int = STREAM,
    device: int = 0,
) -> Event:
    """Return a copy, named as CUPTI does: "Memcpy HtoD (Pageable -> Device)"."""
    args = {"device": device, "stream": stream, "correlation": correlation, "bytes": bytes_}
    return complete("gpu_memcpy", name, start, duration, device, stream, **args)


def fill(
    start: int,
    duration: int,
    correlation: int = 0,
    bytes_: int = 0,
    stream: int = STREAM,
    device: int = 0,
) -> Event:
    """Return a memset on the device."""
    args = {"device": device, "stream": stream, "correlation": correlation, "bytes": bytes_}
    name = "Memset (Device)"
    return complete("gpu_memset", name, start, duration, device, stream, **args)


def launched(
    name: str,
    called: int,
    returned: int,
    start: int,
    duration: int = 1_000,
    correlation: int = 1,
    **kernel_args: Any,
) -> list[Event]:
    """Return a launch by the host from `called` to `returned`, its kernel and their arrow."""
    host = call("cudaLaunchKernel", called, returned - called, correlation)
    arrow = {"cat": "ac2g", "name": "ac2g", "id": correlation}
    leave: Event = {"ph": "s", "pid": PID, "tid": MAIN, "ts": microseconds(called), **arrow}
    arrive: Event = {"ph": "f", "pid": 0, "tid": STREAM, "ts": microseconds(start), **arrow}
    work = kernel(name, start, duration, correlation, **kernel_args)
    return [host, leave, work, {**arrive, "bp": "e"}]


def memory(
    time: int,
    bytes_: int,
    address: int = 1,
    allocated: int = 0,
    on_device: bool = True,
) -> Event:
    """Return an allocation (+) or a free (-)."""
    args = {
        "Total Reserved": allocated,
        "Total Allocated": allocated,
        "Bytes": bytes_,
        "Addr": address,
        "Device Id": 0 if on_device else -1,
        "Device Type": int(on_device),
    }
    event: Event = {"ph": "i", "cat": "cpu_instant_event", "s": "t", "name": "[memory]"}
    return {**event, "pid": PID, "tid": MAIN, "ts": microseconds(time), "args": args}


def kineto(
    events: Iterable[Event],
    *,
    base: int = 0,
    properties: Mapping[str, object] | None = None,
    indent: int | None = None,
) -> str:
    """Return a file's text; `base` (ns) is what all times of the file are relative to."""
    head = {"schemaVersion": 1, "deviceProperties": [], "displayTimeUnit": "ms"}
    head |= {"baseTimeNanoseconds": base, **(properties or {})}
    listed = ",\n  ".join(event_text(event, indent) for event in events)
    return f'{json.dumps(head)[:-1]}, "traceEvents": [\n  {listed}\n  ], "traceName": "t.json" }}'


def event_text(event: Event, indent: int | None = None) -> str:
    """Return one event as JSON; "ts" and "dur" are numbers already in text form."""
    blank = " " if indent is None else "\n" + " " * indent

    def value_text(key: str, value: object) -> str:
        return str(value) if key in ("ts", "dur") else json.dumps(value, indent=indent)

    pairs = (f"{blank}{json.dumps(key)}: {value_text(key, event[key])}" for key in event)
    return "{" + ",".join(pairs) + "}"


def write_trace(path: Path, events: Iterable[Event], **options: Any) -> Path:
    """Write a trace file, compressed where the name ends in .gz; return the path."""
    data = kineto(events, **options).encode()
    path.write_bytes(gzip.compress(data, 1) if path.suffix == ".gz" else data)
    return path


def trace_of(events: Iterable[Event], **options: Any) -> Trace:
    """Return the Trace that the loader makes of `events`."""
    return read_trace(io.BytesIO(kineto(events, **options).encode()), "a test's trace")
