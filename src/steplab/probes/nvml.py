"""NVML's handle of a device that torch sees."""

from __future__ import annotations

from typing import Any


def open_device(index: int) -> tuple[Any, Any] | None:
    """Return (pynvml, handle) of torch's CUDA device number `index`, or None without NVML.

    The device is found by its UUID: CUDA_VISIBLE_DEVICES renumbers the devices for torch, but
    not for NVML.
    """
    import torch

    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
        uuid = f"GPU-{torch.cuda.get_device_properties(index).uuid}"
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid)
    except pynvml.NVMLError:
        return None
