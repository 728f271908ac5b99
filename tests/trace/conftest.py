"""Real traces, recorded once per session by the torch that is installed."""

import os

os.environ.setdefault("KINETO_LOG_LEVEL", "6")

from pathlib import Path

import pytest
import torch


@pytest.fixture(scope="session")
def cpu_trace_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two training steps of a small model on the CPU: stacks, shapes, memory and ranges."""
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x_BD = torch.randn(8, 16)
    options = {"record_shapes": True, "with_stack": True, "profile_memory": True}
    options["acc_events"] = True  # torch 2.11 warns without it
    activities = [torch.profiler.ProfilerActivity.CPU]
    path = tmp_path_factory.mktemp("trace") / "cpu.json"
    with torch.profiler.profile(
        activities=activities,
        schedule=torch.profiler.schedule(wait=0, warmup=1, active=2, repeat=1),
        on_trace_ready=lambda profiler: profiler.export_chrome_trace(str(path)),
        **options,
    ) as profiler:
        for _ in range(3):
            with torch.profiler.record_function("forward"):
                loss = model(x_BD).square().mean()
            with torch.profiler.record_function("backward"):
                loss.backward()
            with torch.profiler.record_function("optimizer"):
                optimizer.step()
                optimizer.zero_grad()
            profiler.step()
    return path
