"""Adding costs what CONTRIBUTING.md says: each kind of thing is added to a copy, and then exists.

Nothing else in the copy is touched. The copy is what the child process imports.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "steplab"

TECHNIQUE = '''
from dataclasses import dataclass
from steplab.techniques.technique import Stage, Technique

@dataclass(frozen=True)
class DeterministicSettings:
    """Whether torch must take deterministic algorithms."""
    on: bool = True

class Deterministic(Technique):
    """Deterministic algorithms only."""
    stage = Stage.IMPLEMENTATION
    settings = DeterministicSettings

    def apply(self, parts, settings):
        """Ask torch for them."""
        import torch
        torch.use_deterministic_algorithms(settings["on"])

    def mismatch(self, settings, run):
        """The Run has what ran: implementations, kernels, dtypes (`Ran` in core/run.py)."""
        atomic = [name for name in run.ran.kernels if "atomic" in name]
        return f"{atomic[0]} is not deterministic" if settings["on"] and atomic else ""

TECHNIQUE = Deterministic()
'''
USE_TECHNIQUE = """
import torch
from steplab.cli.main import main
from steplab.techniques.recipes import parse_recipe
assert parse_recipe("deterministic=true").label == "deterministic=true"
words = "bench step gpt --layers 1 --context 8 --batch 1 --mode full --steps 1 --warmup 0"
assert main([*words.split(), "--recipe", "deterministic=true"]) == 0
"""

RULE = '''
"""The loss is exactly zero."""
from steplab.core import Finding

def check(case):
    """Look at the last loss."""
    if case.run and case.run.losses and case.run.losses[-1] == 0.0:
        seen = ("the last loss is 0.0",)
        return Finding("zero_loss", "the loss is zero", seen, "look at the labels")
    return None

RULE = check
'''
USE_RULE = """
import steplab
from steplab.core import Environment
from steplab.findings import Case
run = steplab.Run("r", steplab.RunSpec("gpt", {}), Environment("", "", "", "", 1, 1), losses=(0.0,))
assert "zero_loss" in [finding.rule for finding in steplab.explain(Case(run))]
"""

WORKLOAD = '''
"""A line through points."""
from dataclasses import dataclass
from steplab.workloads.workload import WorkloadEntry

@dataclass(frozen=True)
class LineConfig:
    """How many inputs."""
    width: int = 4

WORKLOAD = WorkloadEntry("line", "a line", LineConfig, "steplab.workloads.line.workload:Line")
'''
WORKLOAD_CODE = """
import torch
from torch import nn
from steplab.workloads.workload import StepOutput

class Line:
    def __init__(self, config):
        self.width = config.width
    def model(self):
        return nn.Linear(self.width, 1)
    def batches(self, batch, device, seed):
        generator = torch.Generator().manual_seed(seed)
        while True:
            yield torch.randn(batch, self.width, generator=generator).to(device)
    def loss(self, model, batch):
        return StepOutput(model(batch).square().mean())
    def predict(self, model, batch):
        return model(batch)
    def optimizer(self, model, **implementation):
        return torch.optim.SGD(model.parameters(), 0.1, **implementation)
    def tokens(self, batch):
        return batch
    def work(self, batch, mode, ran):
        return None
"""
USE_WORKLOAD = """
from steplab.cli.main import main
assert main("bench step line --width 8 --batch 2 --mode full --steps 1 --warmup 0".split()) == 0
"""

KERNEL = '''
"""The norm of the definition, by another name."""
from steplab.kernels.rms_norm.reference import rms_norm
'''
USE_KERNEL = """
from steplab.cli.main import main
words = "bench step gpt --layers 1 --context 8 --batch 1 --mode full --steps 1 --warmup 0"
assert main([*words.split(), "--recipe", "impl.rms_norm=renamed"]) == 0
"""

TRITON_KERNEL = '''
"""The norm of one row per program, forward only."""
from __future__ import annotations
import torch
from torch import Tensor
from steplab.kernels.triton_runtime import on_device_of, refuse_device, tl, triton

NEEDS_GPU = True

@triton.jit
def norm_row_kernel(x, weight, out, width, eps, D: tl.constexpr):
    d_D = tl.arange(0, D)
    offset_D = tl.program_id(0) * width + d_D
    x_D = tl.load(x + offset_D, mask=d_D < width, other=0.0).to(tl.float32)
    weight_D = tl.load(weight + d_D, mask=d_D < width, other=0.0)
    rstd = tl.rsqrt(tl.sum(x_D * x_D, 0) / width + eps)
    tl.store(out + offset_D, x_D * rstd * weight_D, mask=d_D < width)

@torch.library.custom_op("steplab::rms_norm_triton_row", mutates_args=())
def norm_rows(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    out, width = torch.empty_like(x), x.shape[-1]
    with on_device_of(x):
        norm_row_kernel[(x.numel() // width,)](
            x.contiguous(), weight, out, width, eps, D=triton.next_power_of_2(width)
        )
    return out

def refuse(x, weight, added=None):
    """Return why it cannot run, or ""."""
    return refuse_device(x)

def rms_norm(x, weight, eps, added, dtype):
    """Return (normed, stream)."""
    stream = x if added is None else x + added
    return norm_rows(stream, weight, eps).to(dtype or stream.dtype), stream
'''
USE_TRITON_KERNEL = """
import os
os.environ["TRITON_INTERPRET"] = "1"
import torch
from steplab.cli.main import main
from steplab.kernels import rms_norm
x, weight = torch.randn(3, 5), torch.randn(5)
found, exact = (rms_norm.rms_norm(impl, x, weight, 1e-6) for impl in ("triton_row", "reference"))
torch.testing.assert_close(found, exact)
words = "bench step gpt --layers 1 --context 8 --batch 1 --mode forward --steps 1 --warmup 0"
assert main([*words.split(), "--recipe", "impl.rms_norm=triton_row"]) == 0
"""

FORMAT = '''
"""One series per file, one number per line."""
import numpy as np
from steplab.data.series import InMemorySeries

def read_lines(path):
    """Read a file of numbers."""
    return InMemorySeries(str(path), [np.loadtxt(path, dtype=np.float32)])

FORMAT = {".lines": read_lines}
'''
USE_FORMAT = """
from pathlib import Path
from steplab.cli.main import main
Path("x.lines").write_text("\\n".join(map(str, range(50))))
assert main(["data", "info", "x.lines"]) == 0
"""

OP_BENCHMARK = '''
"""Time RMSNorm: rows x implementations, with errors against fp64."""
from steplab.bench.op_bench import COMPILED, OpAxis, OpBench, dtype_axis, impl_axis

class NormInstance:
    """A norm of random rows of 64."""

    def __init__(self, config, seed, device):
        import torch
        from steplab.bench.op_measure import BoundOp, use_dtype
        dtype = use_dtype(config["dtype"], device)
        generator = torch.Generator().manual_seed(seed)
        x, dout = torch.randn(2, config["rows"], 64, generator=generator).to(device, dtype)
        self.leaves = {"x": x.requires_grad_()}
        self.impl, self.dout = config["impl"].removeprefix(COMPILED), dout
        self.call = BoundOp(lambda: norm(self.impl, x), self.leaves, dout)

    def check(self):
        """Compare all rows."""
        import torch
        from steplab.bench.op_accuracy import check_accuracy
        from steplab.bench.op_measure import BoundOp
        def definition(dtype):
            x = self.leaves["x"].detach().to(dtype).requires_grad_()
            return BoundOp(lambda: norm("reference", x), {"x": x}, self.dout.to(dtype)).results()
        peer, truth = definition(self.dout.dtype), definition(torch.float64)
        return check_accuracy(self.call.results(), peer, truth), "all rows"

    def notes(self):
        """Return nothing."""
        return []

def norm(impl, x):
    """Return the norm of the last axis, by one implementation."""
    from steplab.kernels import rms_norm
    return rms_norm.rms_norm(impl, x, x.new_ones(64), 1e-6)[0]

BENCH = OpBench(
    name="norm",
    kernel="rms_norm",
    axes=(
        OpAxis("rows", "number of rows", gpu=[65536], cpu=[256]),
        dtype_axis(),
        impl_axis(gpu=["reference"], cpu=["reference"]),
    ),
    build=NormInstance,
    size="R{rows} {dtype} {impl}",
    results=("out", "dx"),
    flops=lambda config: (4.0 * 64 * config["rows"], 8.0 * 64 * config["rows"]),
    flops_note="4 per element forward and 8 backward",
    x_axis="rows",
)
'''
USE_OP_BENCHMARK = """
from steplab.cli.main import main
words = "bench norm --rows 16 32 --repeats 6 --seconds 0 --device cpu --plot x.svg"
assert main(words.split()) == 0
"""

ADDITIONS = {
    "technique": ({"techniques/deterministic.py": TECHNIQUE}, USE_TECHNIQUE),
    "rule": ({"findings/rules/zero_loss.py": RULE}, USE_RULE),
    "workload": (
        {"workloads/line/__init__.py": WORKLOAD, "workloads/line/workload.py": WORKLOAD_CODE},
        USE_WORKLOAD,
    ),
    "implementation": ({"kernels/rms_norm/renamed.py": KERNEL}, USE_KERNEL),
    "Triton implementation": ({"kernels/rms_norm/triton_row.py": TRITON_KERNEL}, USE_TRITON_KERNEL),
    "data format": ({"data/formats/lines.py": FORMAT}, USE_FORMAT),
    "op benchmark": ({"bench/ops/norm.py": OP_BENCHMARK}, USE_OP_BENCHMARK),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ADDITIONS)
def test_a_file_is_all_that_it_takes(kind, tmp_path):
    files, use = ADDITIONS[kind]
    copy = tmp_path / "src" / "steplab"
    shutil.copytree(SOURCE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for name, text in files.items():
        assert not (copy / name).exists()
        (copy / name).parent.mkdir(exist_ok=True)
        (copy / name).write_text(text)
    environment = {**os.environ, "PYTHONPATH": str(copy.parent), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", use],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
