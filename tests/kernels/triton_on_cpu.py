"""How Triton's kernels are tested without a GPU: interpreted on the CPU, and compiled for sm_90.

Triton decides at its import whether kernels are interpreted, so both happen in a child process.
What is to be interpreted stands in a class `Interpreted`, which pytest does not collect by itself;
`test_interpreted.py` finds and runs them all, those marked `slow` apart. One file alone:

    TRITON_INTERPRET=1 pytest -o python_classes=Interpreted -k Interpreted tests/kernels/FILE
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="runs natively here")

# Launches compile and run nothing; `kernels` collects what came out.
FOR_HOPPER = """
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

class Hopper:
    get_current_device = staticmethod(lambda: 0)
    get_current_stream = staticmethod(lambda device: 0)
    get_current_target = staticmethod(lambda: GPUTarget("cuda", 90, 32))

def launch_nothing(self, grid):
    return lambda *args, **options: kernels.append(
        self.run(*args, grid=grid, warmup=True, **options))

kernels = []
driver.set_active(Hopper())
JITFunction.__getitem__ = launch_nothing
torch.cuda.get_device_capability = lambda device=None: (9, 0)
"""

# Asserted of kernels that pass once over rows: sixteen bytes at a time, by a load or by a copy to
# shared memory, and no spilled registers.
ROW_PASSES = """
for kernel in kernels:
    assert kernel.metadata.shared <= 99 * 1024, kernel.metadata
    ptx = kernel.asm["ptx"]
    assert "ld.global.v4.b32" in ptx or "cp.async.cg.shared.global" in ptx, kernel.metadata.name
    assert ".local" not in ptx, kernel.metadata.name
    if kernel.metadata.name != "column_sums_kernel":  # which stores one row for many that it loads
        assert "st.global.v4.b32" in ptx, kernel.metadata.name
print(len(kernels), "kernels")
"""


def run_interpreted(files):
    """Run the classes `Interpreted` of test files where Triton interprets its kernels."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, files)]
    command += ["-o", "python_classes=Interpreted", "-k", "Interpreted"]
    done = _in_a_child(command, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-1000:]
    assert " passed" in done.stdout


def compile_for_hopper(launches):
    """Run code that launches kernels and asserts about `kernels`; return what it prints."""
    done = _in_a_child([sys.executable, "-c", FOR_HOPPER + launches], TRITON_INTERPRET="0")
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


def _in_a_child(command, **variables):
    path = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, **variables},
        capture_output=True,
        text=True,
        timeout=600,
    )
