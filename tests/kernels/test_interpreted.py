"""All tests of Triton kernels in its interpreter, a few files in each child process.

A child takes seconds to import torch and to start its compiler, so one for every file would take
half as long again; one for all would leave the other cores idle.
"""

from pathlib import Path

import numpy as np
import pytest

from tests.kernels.triton_on_cpu import needs_no_gpu, run_interpreted

TEXTS = {
    path: path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.glob("test_*"))
}
SLOW = [path for path, text in TEXTS.items() if "\n@pytest.mark.slow\nclass Interpreted" in text]
QUICK = [path for path, text in TEXTS.items() if "\nclass Interpreted" in text and path not in SLOW]
CHILDREN = [
    QUICK[::2],
    QUICK[1::2],
    pytest.param(SLOW[::2], marks=pytest.mark.slow),
    pytest.param(SLOW[1::2], marks=pytest.mark.slow),
]


def test_the_files_are_found():
    assert len(QUICK) >= 7 and len(SLOW) >= 3


@needs_no_gpu
@pytest.mark.parametrize("files", CHILDREN, ids=lambda files: " ".join(f.stem[5:] for f in files))
def test_in_the_interpreter(files):
    triton = pytest.importorskip("triton")
    if triton.__version__ < "3.7" and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        pytest.skip("Triton 3.6, which comes with torch 2.11, interprets with numpy below 2.4 only")
    run_interpreted(files)
