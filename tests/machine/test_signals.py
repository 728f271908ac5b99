"""SIGINT, SIGTERM and SIGHUP: blocks are left, work is saved, the exit code is the shell's."""

import contextlib
import importlib
import os
import pty
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from steplab.cli import main as program
from steplab.cli.main import end_on_signal, main
from steplab.train.checkpoint import read_progress
from steplab.train.checkpoint_files import newest_checkpoint
from steplab.train.stop import stop_on_signal
from tests.train.test_loop import train_command

SOURCE = Path(__file__).parents[2] / "src"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_leaves_the_blocks_of_any_command(monkeypatch, capsys, number):
    left = []

    def command(*args):
        try:
            os.kill(os.getpid(), number)
            signal.pause()
        finally:
            left.append(True)

    monkeypatch.setattr(program, "dispatch", command)
    before = {n: signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)}
    assert main(["runs"]) == 128 + number and left
    said = "interrupted." if number == signal.SIGINT else f"ended by {number.name}."
    assert capsys.readouterr().err == f"steplab: {said}\n"
    assert before == {n: signal.getsignal(n) for n in before}


def test_an_interrupt_while_a_class_is_made_is_no_traceback(monkeypatch, capsys):
    """Python 3.11 turns it into a RuntimeError; it came up in `import torch`."""

    class Interrupting:
        def __set_name__(self, owner, name):
            os.kill(os.getpid(), signal.SIGINT)

    def command(*args):
        type("Made", (), {"field": Interrupting()})

    monkeypatch.setattr(program, "dispatch", command)
    assert main(["runs"]) == 130 and capsys.readouterr().err == "steplab: interrupted.\n"


def test_a_hangup_that_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with end_on_signal(), stop_on_signal() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not stop.requested
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_in_another_thread_nothing_is_installed():
    seen = []

    def work():
        with end_on_signal():
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [signal.SIG_DFL]


def test_the_end_of_a_program_is_an_interrupt_to_whoever_cleans_up():
    with pytest.raises(KeyboardInterrupt), end_on_signal() as came:
        os.kill(os.getpid(), signal.SIGTERM)
    assert came == [signal.SIGTERM]


@pytest.mark.parametrize("signals", [1, 2])
def test_an_import_is_interrupted_by_a_second_signal_only(tmp_path, monkeypatch, capsys, signals):
    """The first one is in force once it is done: torch goes on with half of numpy otherwise."""
    kill, done = "os.kill(os.getpid(), signal.SIGTERM)\n", []
    (tmp_path / "signaled.py").write_text(f"import os, signal\n{kill * signals}")
    monkeypatch.syspath_prepend(tmp_path)

    def command(*args):
        try:
            done.append(importlib.import_module("signaled"))
            signal.pause()
        finally:
            sys.modules.pop("signaled", None)

    monkeypatch.setattr(program, "dispatch", command)
    assert main(["runs"]) == 128 + signal.SIGTERM and len(done) == 2 - signals
    assert capsys.readouterr().err == "steplab: ended by SIGTERM.\n"


def test_what_fails_after_a_signal_is_no_traceback(monkeypatch, capsys):
    """Somebody may have caught the interrupt, and left something half done."""

    def command(*args):
        with contextlib.suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGHUP)
            signal.pause()
        raise RecursionError

    monkeypatch.setattr(program, "dispatch", command)
    assert main(["runs"]) == 128 + signal.SIGHUP
    assert capsys.readouterr().err == "steplab: ended by SIGHUP.\n"


@pytest.mark.parametrize("module", ["steplab.cli.main", "argparse", "steplab.cli.step_flags"])
def test_ctrl_c_while_modules_are_imported_is_no_traceback(module, tmp_path):
    code = (
        "import os, signal, sys\n"
        "from steplab.__main__ import run\n"
        "def interrupt(event, args):\n"
        f"    if event == 'import' and args[0] == {module!r}:\n"
        "        os.kill(os.getpid(), signal.SIGINT)\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "sys.addaudithook(interrupt)\n"
        "sys.argv[1:] = ['bench', 'step', '--size', 'tiny']\n"
        "run()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT, cwd=tmp_path
    )
    assert done.returncode == 130 and "Traceback" not in done.stderr


def started(folder, output) -> subprocess.Popen:
    """Start a training that saves only at its end, or when it is asked to stop."""
    command = train_command(folder, 100_000)
    command[command.index("--checkpoint-every=1")] = "--checkpoint-every=100000"
    return subprocess.Popen(
        command,
        env=ENVIRONMENT,
        stdout=output,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    )


def test_a_hangup_saves_though_the_terminal_is_gone(tmp_path):
    """The terminal takes no more lines; the training saves its last step all the same."""
    terminal, inside = pty.openpty()
    process = started(tmp_path, inside)
    os.close(inside)
    seen = b""
    while b"step=3 loss" not in seen:
        seen += os.read(terminal, 4096)
    os.close(terminal)
    process.send_signal(signal.SIGHUP)
    error = process.communicate(timeout=60)[1]
    assert process.returncode == 129 and b"Traceback" not in error
    assert read_progress(newest_checkpoint(tmp_path)).step >= 3


def test_a_reader_that_goes_away_ends_a_training_which_saves(tmp_path):
    """As in `steplab train | head`."""
    process = started(tmp_path, subprocess.PIPE)
    while b"step=3 loss" not in process.stdout.readline():
        pass
    process.stdout.close()
    assert process.wait(timeout=60) == 128 + signal.SIGPIPE
    assert process.stderr.read() == b""
    process.stderr.close()
    assert read_progress(newest_checkpoint(tmp_path)).step >= 3
