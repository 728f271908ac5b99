"""The conditions of a measurement: machine, versions, settings."""

from __future__ import annotations

import os
import platform
import subprocess
from functools import cache
from pathlib import Path

import steplab
from steplab.core import Accelerator, Environment
from steplab.hardware.catalog import find_card
from steplab.probes.counters import open_nvml_device

CPU_INFO = Path("/proc/cpuinfo")
# Prefixes of environment variables that change how fast or how exactly a step runs.
SPEED_VARIABLES = ("TORCH", "CUDA_", "NCCL_", "OMP_", "MKL_", "PYTORCH_", "TRITON_", "GOMP_")


@cache
def capture_environment() -> Environment:
    """Describe this machine and its torch; cached, as neither changes while a process lives."""
    import numpy
    import torch

    return Environment(
        steplab=steplab.__version__,
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        cpu=cpu_name(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else _cores(),
        memory_bytes=_memory_bytes(),
        cpu_bf16=has_bf16(),
        torch=torch.__version__,
        numpy=numpy.__version__,
        triton=_version("triton"),
        cuda=torch.version.cuda or "",
        cudnn=str(torch.backends.cudnn.version() or "") if torch.cuda.is_available() else "",
        threads=torch.get_num_threads(),
        accelerators=_accelerators(),
        git=_git(),
        variables=_variables(),
    )


def _variables() -> dict[str, str]:
    """Return environment variables that change speed; a value that contains a path is not kept."""
    return {
        name: "<path>" if "/" in value or "\\" in value else value
        for name, value in sorted(os.environ.items())
        if name.startswith(SPEED_VARIABLES)
    }


def _cores() -> int:
    return os.cpu_count() or 1


def cpu_name() -> str:
    """Return the name of this machine's processor."""
    return _cpu_line("model name") or platform.processor() or "unknown CPU"


def has_bf16() -> bool | None:
    """Whether the processor multiplies bf16 numbers by itself; None where it does not say.

    Without such instructions products in bf16 are emulated, several times slower than in fp32.
    """
    flags = set((_cpu_line("flags") or _cpu_line("Features")).split())  # on x86, on Arm
    return bool(flags & {"avx512_bf16", "amx_bf16", "bf16"}) if flags else None


def _cpu_line(name: str) -> str:
    """Return what Linux says of the first processor under this name, or ""."""
    try:
        lines = CPU_INFO.read_text().splitlines()
    except OSError:
        return ""
    found = next((line for line in lines if line.partition(":")[0].strip() == name), "")
    return found.partition(":")[2].strip()


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _version(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _git() -> str:
    """Return the commit of the working directory, with "+dirty" when files differ from it."""
    try:
        command = ["git", "describe", "--always", "--dirty=+dirty", "--abbrev=12", "--exclude=*"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _accelerators() -> tuple[Accelerator, ...]:
    import torch

    if not torch.cuda.is_available():
        return ()
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        card = find_card(properties.name)
        limit, default, driver = _nvml_facts(index)
        found.append(
            Accelerator(
                name=properties.name,
                memory_bytes=properties.total_memory,
                capability=f"{properties.major}.{properties.minor}",
                multiprocessors=properties.multi_processor_count,
                power_limit_w=limit,
                power_default_w=default,
                driver=driver,
                catalog_name=card.name if card else "",
            )
        )
    return tuple(found)


def _nvml_facts(index: int) -> tuple[float | None, float | None, str]:
    """Return (power limit in W, its default, driver version); None where NVML does not say."""
    opened = open_nvml_device(index)
    if opened is None:
        return None, None, ""
    nvml, handle = opened
    try:
        limit = nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3
        default = nvml.nvmlDeviceGetPowerManagementDefaultLimit(handle) / 1e3
        return limit, default, str(nvml.nvmlSystemGetDriverVersion())
    except nvml.NVMLError:
        return None, None, ""
