"""All tests of Triton kernels in its interpreter, a few files in each child process.

A child takes seconds to import torch and to start its compiler, so one for every file would take
half as long again; one for all would leave the other cores idle.
"""

from pathlib import Path

import pytest

from tests.kernels.triton_on_cpu import needs_no_gpu, run_interpreted

FILES = sorted(
    path
    for path in Path(__file__).parent.glob("test_*.py")
    if "\nclass Interpreted" in path.read_text(encoding="utf-8")
)
CHILDREN = 4


def test_the_files_are_found():
    assert len(FILES) >= 11


@needs_no_gpu
@pytest.mark.parametrize("child", range(CHILDREN))
def test_in_the_interpreter(child):
    pytest.importorskip("triton")
    run_interpreted(FILES[child::CHILDREN])
