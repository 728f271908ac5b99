"""Scripts that measure GPUs say so where there is none."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

FOLDER = Path(__file__).parents[1] / "benchmarks"
NEED_A_GPU = [
    *("attention_tiles", "cuda_graphs", "ema_kernels", "epilogue_kernels"),
    *(
        "experts_kernels",
        "flagship",
        "hydra_first",
        "hydra_notes",
        "loss_kernels",
        "megalodon_notes",
        "norms_kernels",
    ),
]


@pytest.mark.parametrize("name", NEED_A_GPU)
def test_without_a_gpu_a_script_ends_with_one_sentence(name, monkeypatch, capsys):
    for needed in ("triton", "rich", "msgspec"):
        pytest.importorskip(needed)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", [f"{name}.py"])
    monkeypatch.syspath_prepend(FOLDER)
    script = importlib.import_module(name)
    with pytest.raises(SystemExit) as ended:
        script.main()
    printed = capsys.readouterr()
    assert ended.value.code == 3 and not printed.out
    assert printed.err.startswith(f"{name}.py: There is nothing to measure: torch sees no GPU.")
    assert printed.err.count("\n") == 1


@pytest.mark.slow
def test_the_cost_of_sharding_is_measured_without_other_ranks():
    words = ["--size", "tiny", "--device", "cpu", "--batch", "1", "--way", "parallel=fsdp"]
    script = [sys.executable, str(FOLDER / "sharding_cost.py"), *words]
    source = str(FOLDER.parent / "src")
    done = subprocess.run(
        script, env={**os.environ, "PYTHONPATH": source}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "rank 0 of 8, no communication" in done.stdout and "ok" in done.stdout
