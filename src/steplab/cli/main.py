"""Entry point: find the command, run it, turn failures into one sentence and an exit code."""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import sleep
from types import FrameType

from steplab.cli.command import Group, Parser, add_memory_flag
from steplab.core.errors import SteplabError, UserError, did_you_mean
from steplab.core.input_file import cannot_open, set_memory_limit
from steplab.core.printable import printable_output
from steplab.parallel.environment import is_first

LONGEST = 1_500  # letters of a complaint; the longest list of flags has 800
SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")  # Windows has no SIGHUP
IMPORTING = "<frozen importlib._bootstrap>"  # the file of the frames below any import
IMPORT_POLL_S = 0.02


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    words = list(sys.argv[1:] if words is None else words)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal may have another encoding than UTF-8
        sys.stdout.reconfigure(errors="backslashreplace")
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # torch's profiler: two lines a step otherwise
    with printable_output():
        return _run(words)


def _run(words: list[str]) -> int:
    code, came = 0, list[int]()
    try:
        with end_on_signal() as came:
            code = dispatch("steplab", Group("steplab.cli"), words)
            sys.stdout.flush()  # here a full disk is one sentence; at exit it is a traceback
            return code
    except (Exception, KeyboardInterrupt) as error:
        if came:  # whatever went wrong since then, it is why
            return _say_interrupted(came[0])
        return _say_failure(error, code)


def _say_failure(error: BaseException, code: int) -> int:
    """Say in a sentence why a command failed, and return its exit code; raise what is a bug."""
    if isinstance(error, SteplabError):
        if is_first():  # the other ranks were started with the same words
            _complain(str(error))
        return error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return _say_interrupted(signal.SIGINT)
    if not isinstance(error, OSError):
        raise error
    _discard_output()
    if code or isinstance(error, BrokenPipeError):  # the reader (head, less) has gone
        return code
    if error.errno == errno.ENAMETOOLONG:  # asked for by any flag
        _complain(str(cannot_open(Path(error.filename), error)))
        return UserError.exit_code
    # Of the machine: a full disk below stdout, no more processes.
    where = f"{error.filename}: " if error.filename else ""
    _complain(f"the system refused: {where}{error.strerror or error}.")
    return SteplabError.exit_code


@contextlib.contextmanager
def end_on_signal() -> Iterator[list[int]]:
    """Let SIGTERM and SIGHUP interrupt as Ctrl-C does; yield the signals that have come.

    `with` blocks are left, so workers end and drafts go. What is ignored or handled already stays
    so. An import is interrupted by a second signal only: torch goes on with a numpy of which half
    is missing, which then fails anywhere.
    """
    came: list[int] = []
    again, over = threading.Event(), threading.Event()

    def end(number: int, frame: FrameType | None) -> None:
        is_second = bool(came) and not again.is_set()
        came.append(number)
        again.clear()
        if is_second or not _is_importing(frame):
            raise KeyboardInterrupt
        threading.Thread(target=send_again, args=(number,), daemon=True).start()

    def send_again(number: int) -> None:
        main = threading.main_thread().ident
        assert main is not None
        while _is_importing(sys._current_frames()[main]):
            sleep(IMPORT_POLL_S)
        if not over.is_set():
            again.set()
            signal.pthread_kill(main, number)

    here = threading.current_thread() is threading.main_thread()
    numbers = [getattr(signal, name) for name in SIGNALS if here and hasattr(signal, name)]
    unhandled = (signal.SIG_DFL, signal.default_int_handler)
    taken = {n: signal.getsignal(n) for n in numbers if signal.getsignal(n) in unhandled}
    try:
        for number in taken:
            signal.signal(number, end)
        yield came
    finally:
        over.set()
        for number, before in taken.items():
            signal.signal(number, before)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == IMPORTING:
            return True
        frame = frame.f_back
    return False


def _say_interrupted(number: int) -> int:
    """Say which signal ended the command; return the exit code that shells report for it."""
    name = signal.Signals(number).name
    _complain("interrupted." if number == signal.SIGINT else f"ended by {name}.")
    return 128 + number


def _complain(sentence: str) -> None:
    if len(sentence) > LONGEST:  # it repeats a key or a value of somebody's file
        sentence = f"{sentence[: LONGEST // 2]} ... {sentence[-LONGEST // 2 :]}"
    with contextlib.suppress(OSError):  # the terminal may be gone
        print(f"steplab: {sentence}", file=sys.stderr, flush=True)


def _discard_output() -> None:
    """Keep Python from complaining at exit about output that nobody takes."""
    with contextlib.suppress(io.UnsupportedOperation):  # stdout may be no file at all
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def dispatch(program: str, group: Group, words: list[str]) -> int:
    """Run the command of the group that the first word names."""
    commands = group.names()
    if not words or words[0] in ("-h", "--help", "help"):
        _print_help(program, group)
        return 0
    name = words[0]
    if name == "--version":
        from steplab import __version__

        print(f"steplab {__version__}")
        return 0
    if name not in commands:
        kind = "flag" if name.startswith("-") else "command"
        raise UserError(f"{program} has no {kind} {name!r}.", did_you_mean(name, commands))
    command = group.load(name)
    if isinstance(command, Group):
        return dispatch(f"{program} {name}", command, words[1:])
    parser = Parser(f"{program} {name}", group.summary(name))
    try:
        command.flags(parser, words[1:])
    except argparse.ArgumentError as clash:  # a flag made from a parameter of the user's own model
        raise UserError(
            f"The model has a parameter that is called as {program} {name}'s own flag "
            f"{clash.argument_name}.",
            "Rename the parameter.",
        ) from None
    add_memory_flag(parser)
    args = parser.parse(words[1:])
    set_memory_limit(args.max_memory)
    return command.run(args)


def _print_help(program: str, group: Group) -> None:
    print(f"usage: {program} COMMAND ...\n")
    if program == "steplab":
        print("Makes a PyTorch training step as fast as the hardware allows, and proves it.\n")
    commands = group.names()
    width = max(map(len, commands)) + 2
    for name in commands:
        print(f"  {name:<{width}}{group.summary(name).rstrip('.')}")
    print(f"\n{program} COMMAND --help shows the flags of a command.")
