"""Bytes held by the training process, read between steps. No counter is reset: it is the user's."""

from __future__ import annotations

import torch

from steplab.probes.memory import status_bytes
from steplab.record import Memory


def read_memory(device: torch.device) -> Memory | None:
    """Return bytes held now and at most so far; None where the system does not tell."""
    if device.type == "cuda":
        return Memory(
            before=torch.cuda.memory_allocated(device),
            peak=torch.cuda.max_memory_allocated(device),
            reserved=torch.cuda.max_memory_reserved(device),
            total=torch.cuda.get_device_properties(device).total_memory,
            source="cuda allocator",
        )
    now, peak = status_bytes("VmRSS"), status_bytes("VmHWM")
    if now is None or peak is None:
        return None
    return Memory(now, peak, reserved=None, total=None, source="process resident set")
