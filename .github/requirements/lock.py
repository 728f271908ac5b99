"""Write what the workflow installs: every package with its version and the hashes of its wheels.

    python .github/requirements/lock.py

Run it after a change of constraints.txt or of the dependencies in pyproject.toml. pip resolves for
every torch and every Python and installs nothing; it needs the network and about fifteen minutes.
The pins of constraints.txt hold, except torch's own and those in OTHER_PINS.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PYTHONS = ("3.11", "3.12", "3.13")
TORCHES = ("2.11", "2.13", "2.15")
DEVELOPMENT = ("dev", "docs", "gpu")
LIBRARIES = ("test", "hf", "accelerate", "lightning")  # for tests against those of others
# Triton 3.6, which comes with torch 2.11, interprets kernels with numpy below 2.4 only.
OTHER_PINS = {"2.11": {"numpy": "2.3.5"}}
HEADER = "# Written by lock.py for Python {}. Linux, x86-64.\n"


def main() -> None:
    """Write torch-*.txt, libraries.txt and audit.txt."""
    for torch in TORCHES:
        pins = pinned() | {"torch": f"{torch}.*"} | OTHER_PINS.get(torch, {})
        if pins["torch"] != f"{pinned()['torch'].rpartition('.')[0]}.*":
            del pins["triton"]  # each torch brings its own
        write(HERE / f"torch-{torch}.txt", requirements(DEVELOPMENT), pins)
    write(HERE / "libraries.txt", requirements(LIBRARIES), pinned(), ["3.12"])
    write(HERE / "audit.txt", ["pip-audit"], {})


def pinned() -> dict[str, str]:
    """Return the versions in constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


def requirements(chosen: Iterable[str]) -> list[str]:
    """Return what the package, these extras and its build need, as pyproject says."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    extras = project["project"]["optional-dependencies"]
    found = [*project["project"]["dependencies"], *project["build-system"]["requires"]]
    found.append("editables")  # hatchling asks for it when it installs the source tree in place
    wanted = [*chosen]
    for extra in wanted:
        for line in extras[extra]:
            own = re.fullmatch(r"steplab\[(.*)\]", line)
            if own:
                wanted.extend(own[1].split(","))
            else:
                found.append(line)
    return found


def write(
    path: Path, wanted: list[str], pins: dict[str, str], pythons: Sequence[str] = PYTHONS
) -> None:
    """Resolve for these Pythons and write one file that serves all of them."""
    hashes: defaultdict[str, set[str]] = defaultdict(set)
    for python in pythons:
        print(path.name, "for Python", python, flush=True)
        for name, version, found in resolve(wanted, pins, python):
            pins = pins | {name: version}  # the same version for the Pythons that follow
            hashes[name].add(found)
    lines = [HEADER.format(", ".join(pythons))]
    for name, found in sorted(hashes.items()):
        lines.append(f"{name}=={pins[name]} \\\n")
        lines.append(" \\\n".join(f"    --hash=sha256:{digest}" for digest in sorted(found)) + "\n")
    path.write_text("".join(lines), encoding="utf-8")


def resolve(wanted: list[str], pins: dict[str, str], python: str) -> list[tuple[str, str, str]]:
    """Let pip choose for one Python; return name, version and hash of each wheel."""
    with tempfile.TemporaryDirectory() as folder:
        constraints, report = Path(folder, "pins.txt"), Path(folder, "report.json")
        constraints.write_text("".join(f"{n}=={v}\n" for n, v in pins.items()), encoding="utf-8")
        command = [sys.executable, "-m", "pip", "install", "-q", "--dry-run", "--ignore-installed"]
        command += ["--only-binary=:all:", "--python-version", python, "--target", folder]
        command += ["--report", str(report), "-c", str(constraints), *wanted]
        subprocess.run(command, check=True)
        chosen = json.loads(report.read_text(encoding="utf-8"))["install"]
    return [
        (
            re.sub(r"[-_.]+", "-", one["metadata"]["name"]).lower(),
            one["metadata"]["version"],
            one["download_info"]["archive_info"]["hashes"]["sha256"],
        )
        for one in chosen
    ]


if __name__ == "__main__":
    main()
