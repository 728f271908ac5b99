"""What the workflow installs is pinned by hash, and agrees with constraints.txt."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".github" / "requirements"
WORKFLOW = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
AGAIN = "run: python .github/requirements/lock.py"

_spec = importlib.util.spec_from_file_location("lock", FOLDER / "lock.py")
lock = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(lock)


def locked(name: str) -> dict[str, str]:
    """Return the versions in a file; every one must have a hash."""
    text = (FOLDER / name).read_text(encoding="utf-8").replace("\\\n", " ")
    found = {}
    for line in text.splitlines():
        if line.startswith("#"):
            continue
        pin = re.fullmatch(r"([a-z0-9-]+)==(\S+)((?:\s+--hash=sha256:[0-9a-f]{64})+)\s*", line)
        assert pin is not None, line
        found[pin[1]] = pin[2]
    return found


def assert_locked(found: dict[str, str], extras: tuple[str, ...], pins: dict[str, str]) -> None:
    """Every requirement must be there, and what is pinned in its pinned version."""
    needed = {re.match(r"[\w-]+", line)[0] for line in lock.requirements(extras)}
    assert needed <= set(found), AGAIN
    assert all(pins.get(name, version) == version for name, version in found.items()), AGAIN


@pytest.mark.parametrize("torch", lock.TORCHES)
def test_the_files_agree_with_the_pins(torch):
    found = locked(f"torch-{torch}.txt")
    assert found["torch"].startswith(f"{torch}."), AGAIN
    pins = lock.pinned()
    if found["torch"] != pins["torch"]:
        del pins["torch"], pins["triton"]
    assert_locked(found, lock.DEVELOPMENT, pins | lock.OTHER_PINS.get(torch, {}))


def test_the_libraries_of_others_agree_with_the_pins():
    found = locked("libraries.txt")
    assert_locked(found, lock.LIBRARIES, lock.pinned())
    assert set(lock.pinned()) <= {*found, *locked("torch-2.13.txt")}, AGAIN


def test_the_workflow_installs_these_files_alone():
    assert set(re.findall(r'torch: "([\d.]+)"', WORKFLOW)) == set(lock.TORCHES)
    assert set(re.findall(r'python: "([\d.]+)"', WORKFLOW)) == set(lock.PYTHONS)
    assert WORKFLOW.count("--require-hashes --no-deps -r") == 4
    assert locked("audit.txt")["pip-audit"]


def test_actions_are_pinned_by_commit():
    used = re.findall(r"uses: (\S+)", WORKFLOW)
    assert used and all(re.search(r"@[0-9a-f]{40}$", action) for action in used)
