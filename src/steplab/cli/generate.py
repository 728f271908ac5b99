"""Let a trained model continue a text."""

from __future__ import annotations

import argparse
import codecs
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from steplab.cli.command import Command
from steplab.cli.flags import add_device_flag
from steplab.cli.step_flags import add_model_flag, add_recipe_flag, own_model
from steplab.core import units
from steplab.core.errors import Unsupported, UserError
from steplab.core.input_file import read_input, shorten

LARGEST_PROMPT = 64 << 20  # bytes
PROMPT = "def "  # for a model of Python's sources


def _flags(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    add = parser.add_argument
    add("--prompt", metavar="TEXT", default=None, help=f"how the text begins; default: {PROMPT!r}")
    add("--prompt-file", type=Path, metavar="FILE", help="the same from a UTF-8 file")
    about = "a checkpoint or a folder of them; default: steplab train's newest"
    add("--checkpoint", type=Path, metavar="PATH", help=about)
    add_model_flag(parser)
    add("--length", type=int, default=400, metavar="N", help="bytes to write")
    add("--temperature", type=float, default=0.8, metavar="X",
        help="of the sampling; 0: always the likeliest byte")  # fmt: skip
    add("--top-k", type=int, default=0, metavar="N", help="choose among the N likeliest; 0: all")
    add("--seed", type=int, default=0, metavar="N", help="seed of the sampling")
    add_recipe_flag(parser)
    add_device_flag(parser)


def _run(args: argparse.Namespace) -> int:
    prompt = _prompt(args)
    _check(args)
    from steplab.step.failures import is_out_of_memory, memory_sentence  # imports torch
    from steplab.train.generate import load_text_generator

    own = own_model(args.model)
    generator = load_text_generator(args.checkpoint, args.device, args.recipe, own)
    if generator.note:
        _note(generator.note)
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    times = [time.perf_counter()]
    notes: list[str] = []

    def show_byte(byte: int) -> None:
        times.append(time.perf_counter())
        beginning = prompt.decode(errors="replace") if len(times) == 2 else ""
        _show(beginning + decoder.decode(bytes([byte])))

    try:
        sampling = (args.temperature, args.top_k, args.seed)
        generator.generate(prompt, args.length, *sampling, show_byte, notes.append)
    except KeyboardInterrupt:
        _show("\n")  # the message that follows begins a line
        raise
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        why = f"Out of memory: {memory_sentence(error)}."
        raise Unsupported(why, "Use a shorter prompt or a smaller --length.") from None
    _show(decoder.decode(b"", final=True) + "\n")
    for note in notes:  # not in the middle of the text
        _note(note)
    written = units.counted(args.length, "byte")
    print(f"{written} by {generator.name}{_speed(times)}", file=sys.stderr)
    return 0


def _speed(times: Sequence[float]) -> str:
    """Tell reading the prompt from writing: `, the first after 0.12 s, then 250 bytes/s`.

    `times` are in seconds: of the start, then of every byte.
    """
    first = f", the first after {units.milliseconds((times[1] - times[0]) * 1e3)}"
    if len(times) == 2:
        return first
    return f"{first}, then {(len(times) - 2) / (times[-1] - times[1]):,.0f} bytes/s"


def _prompt(args: argparse.Namespace) -> bytes:
    file = args.prompt_file
    if file is None:
        prompt = (PROMPT if args.prompt is None else args.prompt).encode(errors="surrogateescape")
    elif args.prompt is not None:
        raise UserError("--prompt and --prompt-file both say how the text begins.", "Use one.")
    else:
        prompt = _read(file)
    if not prompt:
        raise UserError("The prompt is empty.", "Give at least one character by --prompt.")
    return bytes(prompt)


def _read(file: Path) -> bytes:
    data = read_input(file, LARGEST_PROMPT)
    try:
        data.decode()
    except UnicodeDecodeError as error:
        raise UserError(f"{shorten(file)} cannot be read as UTF-8 ({error}).") from None
    return data


def _check(args: argparse.Namespace) -> None:
    if args.length < 1:
        raise UserError(f"--length must be at least 1, not {args.length}.")
    if not 0 <= args.temperature < float("inf"):
        raise UserError(f"--temperature must be a number of 0 or more, not {args.temperature}.")
    if args.top_k < 0:
        raise UserError(f"--top-k must be 0 or more, not {args.top_k}.")


def _note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


def _show(text: str) -> None:
    print(text, end="", flush=True)


COMMAND = Command(_flags, _run)
