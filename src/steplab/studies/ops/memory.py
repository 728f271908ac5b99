"""Bytes that an op takes beyond its inputs. Imports torch."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable
from itertools import accumulate

import torch
from torch.profiler import ProfilerActivity, profile

from steplab.probes.allocations.cpu import SOURCE, read_tree
from steplab.record import Memory
from steplab.studies.ops.rows import KEPT
from steplab.studies.ops.subject import Subject


def measure_memory(subject: Subject) -> Memory:
    """Run forward and backward once and return what was held at most, in each and in between.

    Output and gradients count, inputs do not: they are in `before`. On a CPU `before` is 0, and
    all else is told by the profiler's allocations.
    """
    gc.collect()
    return _on_cuda(subject) if subject.dout.device.type == "cuda" else _on_cpu(subject)


def _on_cuda(subject: Subject) -> Memory:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = subject.forward()
    peaks = {"forward": torch.cuda.max_memory_allocated(), KEPT: torch.cuda.memory_allocated()}
    torch.cuda.reset_peak_memory_stats()
    gradients = subject.backward(out)
    peaks["backward"] = torch.cuda.max_memory_allocated()
    reserved = torch.cuda.max_memory_reserved()
    del out, gradients
    total = torch.cuda.get_device_properties(0).total_memory
    return Memory(before, max(peaks.values()), reserved, total, "cuda allocator", peaks)


def _on_cpu(subject: Subject) -> Memory:
    # Without stacks: a Python loop inside the op (Triton's interpreter) would take minutes.
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as seen:
        out = subject.forward()
        moment_ns = time.time_ns()
        gradients = subject.backward(out)
        end_ns = time.time_ns()
    del out, gradients
    changes = read_tree(seen.profiler.kineto_results.experimental_event_tree())
    first = [change.bytes for change in changes if change.time_ns <= moment_ns]
    second = [change.bytes for change in changes if moment_ns < change.time_ns <= end_ns]
    kept = sum(first)
    peaks = {"forward": _highest(0, first), KEPT: kept, "backward": _highest(kept, second)}
    return Memory(0, max(peaks.values()), None, None, SOURCE, peaks)


def _highest(start: int, changes: Iterable[int]) -> int:
    return max(accumulate(changes, initial=start))
