"""Entry point: find the command, run it, turn failures into one sentence and an exit code."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence

from steplab.cli.command import Group, Parser, add_memory_flag
from steplab.core.errors import SteplabError, UserError, did_you_mean
from steplab.core.input_file import set_memory_limit
from steplab.core.printable import printable
from steplab.parallel.environment import is_first

INTERRUPTED = 130  # what shells report for a program ended by Ctrl-C


def main(words: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    words = list(sys.argv[1:] if words is None else words)
    if isinstance(sys.stdout, io.TextIOWrapper):  # a terminal may have another encoding than UTF-8
        sys.stdout.reconfigure(errors="backslashreplace")
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # torch's profiler: two lines a step otherwise
    try:
        return dispatch("steplab", Group("steplab.cli"), words)
    except SteplabError as error:
        if is_first():  # the other ranks were started with the same words
            print(f"steplab: {printable(str(error))}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("steplab: interrupted.", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) has gone; keep Python from complaining at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


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
    command.flags(parser, words[1:])
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
