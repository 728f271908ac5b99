"""Fuzzing in CI: the same inputs every time, and every input that once did something wrong."""

from pathlib import Path

import pytest

pytest.importorskip("pandas")
pytest.importorskip("pyarrow")
if not Path("/proc/self/statm").exists():
    pytest.skip("the sandbox reads its size from /proc", allow_module_level=True)

from tests.fuzz.campaign import Inputs, Sandbox, Tally, add_up, check_honest, fuzz, save, saved
from tests.fuzz.damage import Damage, TreeDamage
from tests.fuzz.readers import READERS

pytestmark = pytest.mark.slow
EXAMPLES = 40  # inputs of one reader: all of them take a minute


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox() as sandbox:
        yield sandbox


@pytest.fixture(scope="module")
def inputs():
    return Inputs()


@pytest.mark.parametrize("reader", READERS, ids=lambda reader: reader.name)
def test_damaged_inputs_end_in_one_sentence(reader, sandbox, inputs):
    check_honest(reader, sandbox, inputs)
    for name, command, files in saved(reader, inputs):
        assert sandbox.open(command, files) == [], f"tests/fuzz/corpus: {name} of {reader.name}"
    tally = Tally(reader.name)
    found = fuzz(reader, sandbox, inputs, tally, EXAMPLES)
    assert found is None, f"{found.args}; keep it: python -m tests.fuzz --save {reader.name!r}"
    assert tally.tried >= EXAMPLES


FAULTS = {
    "traceback: KeyError": "raise KeyError('planted')",
    "hang": "import __main__, time; __main__.SECONDS = 0.0; time.process_time()",
    "memory": "bytearray(8 << 30)",
    "code: subprocess.Popen": "import subprocess; subprocess.run(['true'])",
    "code: exec of text": "eval('\"fuzzmark\"')",
    "code: pickle.find_class": "import pickle; pickle.loads(b'cos\\ngetcwd\\n.')",
    "outside: open": "open('../../fuzzmark-planted', 'a').close()",
    "words: ": "import sys; print('Traceback (most recent call last)', file=sys.stderr)",
    "escape: ": "print('\\x1b[31m')",
    "crash: ": "import os; os._exit(3)",
}


@pytest.mark.parametrize("kind", FAULTS)
def test_the_sandbox_sees_what_no_input_may_do(sandbox, kind):
    """The oracle itself: without planted faults that it sees, zero findings would mean nothing."""
    assert sandbox.open("planted", {"planted.py": b"print('honest')"}) == []
    found = sandbox.open("planted", {"planted.py": FAULTS[kind].encode()})
    assert any(finding.startswith(kind) for finding in found), found
    if kind == "hang":
        sandbox.close_process()  # it would take everything for one now
    (sandbox.root.parent / "fuzzmark-planted").unlink(missing_ok=True)


def test_a_finding_is_kept_and_opened_again(tmp_path, inputs):
    reader = next(reader for reader in READERS if reader.name == "recipe")
    damage = Damage("recipe.json", tree=(TreeDamage("replace", 0.0, [1]),), command=0)
    path = save(reader, damage, inputs, tmp_path)
    ((_, command, files),) = saved(reader, inputs, tmp_path)
    assert path.read_bytes() == files["recipe.json"] and command == reader.commands[0]
    assert files["recipe.toml"] == inputs.honest(reader)["recipe.toml"]


ASKS_THE_DRIVER = b"""
import torch
def answer(): raise RuntimeError("the driver was asked")
torch.cuda._is_compiled, torch._C._cuda_getDeviceCount = (lambda: True), answer
torch.cuda.is_available(), torch.cuda.device_count()
"""


def test_a_gpu_changes_nothing_in_the_sandbox(sandbox):
    assert sandbox.open("planted", {"planted.py": ASKS_THE_DRIVER}) == []
    sandbox.close_process()  # its torch was changed


def test_campaigns_add_up_and_a_fault_counts_once():
    one = Tally("csv", 3, {"traceback: KeyError: 'a' (frame.py:5)": Damage("a")})
    two = Tally("csv", 4, {"traceback: KeyError: 'b' (frame.py:5)": Damage("b")})
    three = Tally("pack", 5, {"hang: 12 s": Damage("c"), "code: import x": Damage("d")})
    csv, pack = add_up([[one], [two, three]])
    assert (csv.reader, csv.tried, csv.count("traceback")) == ("csv", 7, 1)
    assert (pack.tried, pack.count("hang", "code"), pack.count("traceback")) == (5, 2, 0)


def test_what_was_found_before_the_time_was_over_counts(sandbox, inputs, monkeypatch):
    reader = next(reader for reader in READERS if reader.name == "recipe")
    answers = iter([["traceback: planted (a.py:1)"]])
    monkeypatch.setattr(sandbox, "open", lambda command, files: next(answers, []))
    time = iter([True])
    tally = Tally(reader.name)
    found = fuzz(reader, sandbox, inputs, tally, 20, go_on=lambda: next(time, False))
    assert found is not None and tally.count("traceback") == 1
