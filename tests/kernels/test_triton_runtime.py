"""Kernels are imported, and refused with a reason, where Triton is not installed."""

import subprocess
import sys

import pytest
import torch

from steplab.core.errors import Unsupported
from steplab.kernels import rms_norm
from steplab.kernels.dispatch import ops
from steplab.kernels.triton_runtime import refuse_batch, refuse_dtype, use_triton

WITHOUT_TRITON = f"""
import importlib, importlib.util, sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError(name)

find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "triton" else find_spec(name, *rest)
sys.meta_path.insert(0, Hidden())
for op in {ops()}:
    importlib.import_module(f"steplab.kernels.{{op}}")
assert "triton" not in sys.modules

import torch
from steplab.core.errors import Unsupported
from steplab.kernels import rms_norm

x, weight = torch.ones(2, 8), torch.ones(8)
assert rms_norm.choose("auto", x, weight) == "aten"
try:
    rms_norm.choose("triton_norm", x, weight)
except Unsupported as error:
    print(error)
"""


def test_without_triton_everything_is_imported_and_its_kernels_are_refused():
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TRITON], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "rms_norm 'triton_norm' needs triton, which is not installed" in done.stdout


def test_what_a_launch_cannot_take_is_said():
    assert refuse_dtype(torch.ones(1), None, torch.ones(1, dtype=torch.float16)) == ""
    assert refuse_dtype(torch.ones(1), torch.ones(1).double()) == (
        "needs fp16, bf16 or fp32, not torch.float64"
    )
    assert refuse_batch(torch.empty(65_535, 0)) == ""
    assert "at most 65535, not 65536" in refuse_batch(torch.empty(65_536, 0))


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
def test_a_cpu_is_refused():
    assert not use_triton(torch.ones(1))
    with pytest.raises(Unsupported, match="needs an NVIDIA GPU, not cpu"):
        rms_norm.choose("triton_norm", torch.ones(2, 8), torch.ones(8))
