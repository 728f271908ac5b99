"""What the playbook does on a GPU only, with a fake clock and a fake device."""

import csv
import json
import re
from time import perf_counter

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from steplab.bench import playbook_cell as cell_module
from steplab.bench.playbook import Playbook, playbook_cells
from steplab.cli.main import main
from steplab.profiling.plan import ProfilePlan
from steplab.step.assemble import assemble, micro_batches

SMALL = {"preset": "tiny", "config": {"layers": 1, "modes": 2}}


class FakeEvent:
    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = perf_counter()

    def elapsed_time(self, later):
        return (later.at - self.at) * 1e3


@pytest.fixture
def fake_gpu(monkeypatch):
    """Return how often the device was waited for."""
    waits = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(None))
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(cell_module, "profile", profile_of_the_cpu)
    return waits


def profile_of_the_cpu(activities, **options):
    assert activities == [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    return profile(activities=activities[:1], **options)


@pytest.mark.parametrize("forward_only", [False, True])
def test_times_and_traces(tmp_path, fake_gpu, forward_only):
    plan = ProfilePlan((0, 1, 1, 1), detail=False)
    book = Playbook([16], plan, tmp_path, forward_only=forward_only, **SMALL)
    (cell,) = playbook_cells(book)
    step = assemble(cell.spec)
    batches = micro_batches(step, cell.spec)
    times, phases = cell_module._timed(step, batches, on_cuda=True)
    assert len(times) == cell_module.TIMED and len(fake_gpu) == 2 * 9
    forward = phases.mean_ms("forward")
    assert forward is not None and 0 < forward <= max(times)
    assert (phases.mean_ms("backward") is None) == forward_only
    (cell.folder / "reports").mkdir(parents=True)
    cell_module._trace_steps(step, batches, cell, plan, on_cuda=True)
    names = {path.name for path in (cell.folder / "reports").iterdir()}
    of_training = {"key_averages_cuda_time.txt", "key_averages_mem.txt"}
    assert names == ({"key_averages.txt"} if forward_only else of_training)


def test_both_cells_of_a_sweep_have_their_reductions(tmp_path):
    book = Playbook([8], ProfilePlan((0, 0, 1, 1)), tmp_path, "bf16", bf16_sweep=True, **SMALL)
    asked = [cell.spec.recipe.techniques["precision"]["sums"] for cell in playbook_cells(book)]
    assert asked == ["bf16", "fp32"]


@pytest.mark.gpu
def test_the_sweep_on_a_gpu(tmp_path):
    pytest.importorskip("msgspec")
    words = "profile megalodon --seq-lens 40 --dtype bf16 --bf16-sweep --schedule 0 1 1 1"
    assert main(f"{words} --preset tiny --layers 1 --device cuda --out {tmp_path}".split()) == 0
    with (tmp_path / "summary.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [(line["ema"], line["status"]) for line in lines] == [("scan", "ok")] * 2
    assert all(float(line["peak_mem_gb"]) > 0 and float(line["forward_ms"]) > 0 for line in lines)
    for reduction in ("on", "off"):
        folder = tmp_path / "bf16" / f"bfloat16_{reduction}_L40"
        for name in ("FFT", "SEQ", "SCAN"):
            events = json.loads((folder / f"ema_{name.lower()}.json").read_text())["traceEvents"]
            kinds = {event["name"]: event.get("cat") for event in events if "name" in event}
            assert f"EMA_{name}_L40" in kinds and "kernel" in kinds.values()
        table = (folder / "reports" / "key_averages_cuda_time.txt").read_text()
        assert "Self CUDA" in table
        rows = [line.split() for line in table.splitlines()]
        device_ms = {row[0]: float(row[2]) for row in rows if len(row) == 4 and "." in row[2]}
        assert {"FORWARD", "BACKWARD", "OPTIMIZER"} <= {
            name for name, ms in device_ms.items() if ms
        }
        shares = [re.findall(r"([\d.]+)%", line) for line in table.splitlines()]
        own = [float(percents[2]) for percents in shares if len(percents) == 3]
        assert own and 0 < max(own) <= 100, "no range is counted as work of the device"
