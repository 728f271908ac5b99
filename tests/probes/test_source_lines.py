"""Lines of the user's files in which something is set or made."""

import importlib
import sys

import pytest

from steplab.probes import source_lines
from steplab.probes.source_lines import is_written, written_lines

SETUP = """\
import os

def make(torch, model):
    os.environ["CUDA_LAUNCH_BLOCKING"] = "1"
    torch.backends.cudnn.deterministic = True
    groups = [{"params": [p]} for p in model.parameters()]
    return torch.optim.AdamW(
        groups,
        lr=1e-3,
    )

def layers(nn):
    return [nn.Linear(2, 2), nn.Linear(2, 3),
            nn.Linear(2, 4),
            nn.Linear(2, 5),
            nn.Linear(2, 6)]

def compiled(torch, re, function):
    @torch.compile
    def inner(x):
        return x

    return torch.compile(function), re.compile("")
"""


@pytest.fixture
def imported(tmp_path, monkeypatch):
    """A module of the user's in the current folder, and no other."""
    path = tmp_path / "their_setup.py"
    path.write_text(SETUP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module("their_setup")
    theirs = source_lines._user_files()
    assert str(path) in theirs and not any("site-packages" in other for other in theirs)
    monkeypatch.setattr(source_lines, "_user_files", lambda: [str(path)])
    yield path
    sys.modules.pop("their_setup")


def test_calls_strings_and_assigned_attributes_have_lines(imported):
    sought = {"AdamW": ("AdamW",), "groups": ("params",), "blocking": ("CUDA_LAUNCH_BLOCKING",)}
    sought |= {"cudnn": ("deterministic=", "benchmark="), "rate": ("lr",), "nothing": ("SGD",)}
    assert written_lines(sought) == {
        "AdamW": ("their_setup.py:7 (make)",),
        "groups": ("their_setup.py:6 (make)",),
        "blocking": ("their_setup.py:4 (make)",),
        "cudnn": ("their_setup.py:5 (make)",),
        "rate": ("their_setup.py:9 (make)",),
    }


def test_a_name_with_its_module_is_found_as_a_call_and_as_a_decorator(imported):
    lines = ("their_setup.py:19 (inner)", "their_setup.py:23 (compiled)")
    assert written_lines({"compile": ("torch.compile",)}) == {"compile": lines}
    assert is_written("torch.compile", "SGD") and not is_written("re.match", "SGD")


def test_what_is_written_everywhere_tells_nothing(imported):
    assert written_lines({"layers": ("Linear",)}) == {}


def test_a_file_that_is_no_longer_python_is_left_out(imported):
    imported.write_text("def broken(:\n")
    assert written_lines({"AdamW": ("AdamW",)}) == {}
