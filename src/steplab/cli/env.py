"""Describe this machine, ready to paste into a bug report."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence

from steplab.cli.command import Command
from steplab.core import Accelerator, Environment, units
from steplab.core.codec import encode
from steplab.hardware.catalog import find_card


def _flags(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    parser.add_argument("--json", action="store_true", help="print the record itself")


def _run(args: argparse.Namespace) -> int:
    from steplab.probes.environment import capture_environment

    environment = capture_environment()
    if args.json:
        print(json.dumps(encode(environment), indent=1))
    else:
        print("\n".join(_lines(environment)))
    return 0


def _lines(environment: Environment) -> list[str]:
    e = environment
    rows = {
        "steplab": e.steplab,
        "python": f"{e.python} on {e.platform}",
        "torch": f"{e.torch}, numpy {e.numpy}, triton {e.triton or 'not installed'}",
        "cpu": f"{e.cpu}, {e.cores} cores, {e.threads} threads used by torch",
        "memory": units.bytes_(e.memory_bytes),
        "cuda": f"{e.cuda}, cuDNN {e.cudnn}" if e.accelerators else "no GPU seen by torch",
    }
    lines = [f"{key:<9}{value}" for key, value in rows.items()]
    for index, card in enumerate(e.accelerators):
        lines += [f"gpu {index:<5}{text}" for text in _accelerator(card)]
    lines += [f"{'variable':<9}{key}={value}" for key, value in e.variables.items()]
    return lines


def _accelerator(found: Accelerator) -> list[str]:
    power = f"{found.power_limit_w:.0f} W" if found.power_limit_w else "unknown power limit"
    if (found.power_limit_w or 0) < (found.power_default_w or 0):
        power += f", capped below its default of {found.power_default_w:.0f} W"
    first = (
        f"{found.name}, {units.bytes_(found.memory_bytes)}, compute {found.capability}, "
        f"{found.multiprocessors} SMs, {power}, driver {found.driver or 'unknown'}"
    )
    card = find_card(found.name)
    if card is None:
        return [first, "peaks unknown: not in the catalog, so MFU needs --mfu-peak-tflops"]
    peaks = ", ".join(f"{dtype} {value:g}" for dtype, value in card.tflops.items())
    return [
        first,
        f"dense TFLOP/s: {peaks}; {card.bandwidth_gbs:g} GB/s ({card.provenance('bf16')})",
    ]


COMMAND = Command(_flags, _run)
