"""What went wrong, in one sentence: the status and the reason of a Run that failed."""

from __future__ import annotations

import re
from dataclasses import replace

import torch
from torch._dynamo.exc import FailOnRecompileLimitHit

from steplab.core import Run, units
from steplab.core.errors import SteplabError, Unsupported
from steplab.probes.compilation import compiled_again
from steplab.trace.user_frames import error_line


def failed_run(run: Run, error: Exception) -> Run:
    """Turn an exception into a status with one sentence."""
    if isinstance(error, Unsupported):
        return replace(run, status="unsupported", reason=str(error))
    if isinstance(error, SteplabError):
        return replace(run, status="failed", reason=str(error))
    if is_out_of_memory(error):
        return replace(run, status="oom", reason=memory_sentence(error))
    return replace(run, status="failed", reason=error_sentence(error))


def error_sentence(error: BaseException) -> str:
    """Say what an error is, in its first sentence, and the user's line that it comes from."""
    said = f"{first_sentence(error)} ({error_line(error)})"
    if isinstance(error, FailOnRecompileLimitHit):
        said = compiled_again() or said
    return f"{type(error).__name__}: {said}"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the device or the host had no memory left."""
    no_host_memory = "can't allocate memory" in str(error) or isinstance(error, MemoryError)
    return isinstance(error, torch.OutOfMemoryError) or no_host_memory


def memory_sentence(error: BaseException) -> str:
    """Say how much could not be allocated: on a CPU torch's message begins with its source line."""
    asked = re.search(r"tried to allocate (\d+) bytes", str(error))
    if asked:
        return f"no host memory for another {units.bytes_(int(asked[1]))}"
    return first_sentence(error)


def first_sentence(error: BaseException) -> str:
    """Return the first sentence of an error's message, 300 characters at most."""
    text = " ".join(str(error).split()).split(" Explanation: ")[0]  # dynamo's second part
    return text.split(". ")[0][:300] or type(error).__name__
