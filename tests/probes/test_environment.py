import getpass
import json
import platform
import sys
import types

import torch

from steplab.core.codec import encode
from steplab.probes import environment as environment_module
from steplab.probes.environment import capture_environment, cpu_name, has_bf16


def test_environment_says_what_runs():
    environment = capture_environment()
    assert environment.torch == torch.__version__
    assert environment.python == platform.python_version()
    assert environment.cores >= 1 and environment.memory_bytes > 2**20
    assert environment.torch in environment.conditions


def test_environment_holds_no_host_or_home():
    text = json.dumps(encode(capture_environment()))
    assert platform.node() not in text or platform.node() in ("", "localhost")
    assert f"/home/{getpass.getuser()}" not in text


def test_paths_in_variables_are_not_kept(monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/home/alice/cache")
    monkeypatch.setenv("CUDA_HOME", "C:\\alice\\cuda")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    variables = capture_environment.__wrapped__().variables
    assert variables["TORCHINDUCTOR_CACHE_DIR"] == variables["CUDA_HOME"] == "<path>"
    assert variables["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"


def test_the_power_limit_is_that_of_the_visible_gpu(monkeypatch):
    """CUDA_VISIBLE_DEVICES=1: torch's device 0 is NVML's device 1."""
    limits = {"GPU-aaaa": 700_000, "GPU-bbbb": 310_000}
    nvml = types.SimpleNamespace(
        NVMLError=OSError,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetHandleByIndex=lambda index: list(limits)[index],
        nvmlDeviceGetEnforcedPowerLimit=limits.__getitem__,
        nvmlDeviceGetPowerManagementDefaultLimit=lambda handle: 700_000,
        nvmlSystemGetDriverVersion=lambda: "580.1",
    )
    seen = types.SimpleNamespace(
        name="NVIDIA H200", total_memory=2**37, major=9, minor=0, multi_processor_count=132,
        uuid="bbbb",
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: seen)
    (card,) = environment_module._accelerators()
    assert (card.power_limit_w, card.power_default_w, card.driver) == (310, 700, "580.1")


def test_bf16_instructions_are_read_from_the_flags(monkeypatch, tmp_path):
    said = tmp_path / "cpuinfo"
    monkeypatch.setattr(environment_module, "CPU_INFO", said)
    assert has_bf16() is None
    for text, expected in {
        "model name\t: A Xeon\nflags\t\t: fpu avx512f avx512_bf16\n": True,
        "model name\t: A Xeon\nflags\t\t: fpu avx2 avx512f\n": False,
        "Features\t: fp asimd bf16 i8mm\n": True,
        "power management:\n": None,
    }.items():
        said.write_text(text)
        assert has_bf16() is expected
    said.write_text("model name\t: A Xeon: fast\n")
    assert cpu_name() == "A Xeon: fast"
