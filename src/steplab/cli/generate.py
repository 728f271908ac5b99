"""`steplab generate --prompt TEXT`: let a trained model go on from a beginning."""

from __future__ import annotations

import argparse
import codecs
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from steplab.cli.command import Command
from steplab.errors import UserError
from steplab.techniques.parse import parse_recipe


def _flags(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    add = parser.add_argument
    add("--prompt", default="def ", metavar="TEXT", help="how the text begins")
    add("--prompt-file", type=Path, metavar="FILE", help="the same from a UTF-8 file")
    about = "a checkpoint or a folder of them; default: steplab train's newest"
    add("--checkpoint", type=Path, metavar="PATH", help=about)
    add("--length", type=int, default=400, metavar="N", help="bytes to write")
    add("--temperature", type=float, default=0.8, metavar="X", help="0: always the likeliest byte")
    add("--top-k", type=int, default=0, metavar="N", help="choose among the N likeliest; 0: all")
    add("--seed", type=int, default=0, metavar="N", help="another seed, another text")
    add("--recipe", default="plain", help="plain, or precision=bf16, impl.attention=...")
    add("--device", default="auto", help="cpu, cuda, or auto")


def _run(args: argparse.Namespace) -> int:
    recipe = parse_recipe(args.recipe)
    prompt = _prompt(args)
    _check(args)
    from steplab.engine.generating import load  # imports torch

    writer = load(args.checkpoint, args.device, recipe)
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    _show(prompt.decode())
    started = time.perf_counter()
    sampling = (args.temperature, args.top_k, args.seed)
    writer.write(
        prompt, args.length, *sampling, tell=lambda byte: _show(decoder.decode(bytes([byte])))
    )
    seconds = time.perf_counter() - started
    _show(decoder.decode(b"", final=True) + "\n")
    rate = args.length / seconds
    print(f"{args.length:,} bytes by {writer.name}, {rate:,.0f} bytes/s", file=sys.stderr)
    return 0


def _prompt(args: argparse.Namespace) -> bytes:
    if args.prompt_file is None:
        prompt = args.prompt.encode()
    else:
        try:
            prompt = args.prompt_file.read_text(encoding="utf-8").encode()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{args.prompt_file} cannot be read as UTF-8 ({error}).") from None
    if not prompt:
        raise UserError("The prompt is empty.", "Give at least one character by --prompt.")
    return bytes(prompt)


def _check(args: argparse.Namespace) -> None:
    if args.length < 1:
        raise UserError(f"--length must be at least 1, not {args.length}.")
    if not 0 <= args.temperature < float("inf"):
        raise UserError(f"--temperature must be 0 or more, not {args.temperature}.")
    if args.top_k < 0:
        raise UserError(f"--top-k must be 0 or more, not {args.top_k}.")


def _show(text: str) -> None:
    print(text, end="", flush=True)


COMMAND = Command("let a trained model go on from a beginning", _flags, _run)
