"""The house rules, checked."""

import ast
import dataclasses
import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from steplab.core import registry
from steplab.core.codec import type_hints

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "steplab"
FILES = sorted(SOURCE.rglob("*.py"))
LONGEST_FUNCTION = 60


# What reads, compares and draws Runs, the whole command line, and the parents of workers.
WITHOUT_TORCH = """core hardware costs store trace findings compare report cli
workers.client tune.search techniques.recipes workloads.gpt.config""".split()


@pytest.mark.parametrize("package", WITHOUT_TORCH)
def test_these_leave_torch_out(package):
    pytest.importorskip("rich")
    code = (
        "import importlib, pkgutil, sys\n"
        f"root = importlib.import_module('steplab.{package}')\n"
        "for found in pkgutil.walk_packages(getattr(root, '__path__', []), root.__name__ + '.'):\n"
        "    importlib.import_module(found.name)\n"
        "    assert not {'torch', 'triton'} & set(sys.modules), found.name\n"
        "assert not {'torch', 'triton'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT / "src", capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_reading_a_recipe_needs_no_torch():
    code = (
        "import sys\n"
        "from steplab.techniques.recipes import parse_recipe\n"
        "parse_recipe('precision=bf16,compile=blocks,impl.attention=flash,optimizer=fused')\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], cwd=ROOT / "src", check=False).returncode == 0
    )


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_functions_stay_small_and_code_is_ascii(path):
    text = path.read_text()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = node.end_lineno - node.lineno + 1
            assert length <= LONGEST_FUNCTION, f"{node.name} has {length} lines"
    assert text.isascii() or not text, "code is ASCII"


def test_no_setting_of_a_technique_is_called_off():
    """`compile=off` takes a technique out of a recipe."""
    for name in registry.names("steplab.techniques", "TECHNIQUE"):
        settings = registry.load("steplab.techniques", name, "TECHNIQUE").settings
        kinds = type_hints(settings).values() if dataclasses.is_dataclass(settings) else ()
        assert not any("off" in get_args(kind) for kind in kinds), name


def test_the_design_is_filled_in():
    """The walks and the table of sizes were pasted, not left to be written."""
    design = (ROOT / "DESIGN.md").read_text()
    assert not re.findall(r"^[A-Z]+$", design, re.M)
    named = set(re.findall(r"`(\w+(?:/\w+)*/\w+\.py)`", design))
    missing = [f for f in named if not (SOURCE / f).exists() and not (ROOT / f).exists()]
    assert not [file for file in missing if "/" in file], missing


def test_no_drawers():
    drawers = {"utils", "helpers", "common", "misc"}
    assert not [p for p in SOURCE.rglob("*") if p.stem in drawers]


def test_no_technique_is_named_where_steps_run():
    """A technique's name in what assembles, measures or trains would be a special case of it."""
    words = re.compile(r"""["'](precision|compile|impl|optimizer)["']\s*(in|not in|==|!=|:)""")
    folders = ("step", "workers", "verify", "profiling", "train", "meter", "lint")
    files = (path for folder in folders for path in (SOURCE / folder).rglob("*.py"))
    assert [path.name for path in files if words.search(path.read_text())] == []


@pytest.mark.parametrize(
    ("package", "constant"),
    [
        ("steplab.techniques", "TECHNIQUE"),
        ("steplab.probes", "PROBE"),
        ("steplab.workloads", "WORKLOAD"),
        ("steplab.findings.rules", "RULE"),
        ("steplab.data.formats", "FORMAT"),
        ("steplab.bench.ops", "BENCH"),
        ("steplab.cli", "COMMAND"),
        ("steplab.cli.bench", "COMMAND"),
        ("steplab.cli.data", "COMMAND"),
    ],
)
def test_every_member_of_every_registry_loads(package, constant):
    if "cli" in package:
        pytest.importorskip("rich")
    members = registry.names(package, constant)
    assert members
    for name in members:
        assert registry.load(package, name, constant) is not None


def test_every_probe_fills_a_field_of_run():
    import dataclasses

    from steplab.core import Run

    fields = {field.name for field in dataclasses.fields(Run)}
    assert set(registry.names("steplab.probes", "PROBE")) <= fields


def test_public_names_exist_and_are_documented():
    import steplab

    for name in steplab.__all__:
        assert getattr(steplab, name).__doc__, name
    with pytest.raises(AttributeError):
        _ = steplab.nothing


def test_ci_calls_the_readmes_test_command():
    readme, ci = (ROOT / "README.md").read_text(), (ROOT / ".ci" / "run").read_text()
    commands = re.findall(r"^python3 -m venv .*pytest.*$", readme, re.M)
    assert len(commands) == 1 and commands[0] in ci


def test_version_is_said_once():
    import tomllib

    import steplab

    metadata = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert metadata["project"]["version"] == steplab.__version__


# Who may turn a word into code. Records are read everywhere, so the list is short, and each entry
# says where its words come from.
IMPORTERS = {
    "__init__.py": "public names of a fixed table",
    "core/registry.py": "members of a package of ours, listed from its folder",
    "kernels/dispatch.py": "implementations, listed from their folder",
    "kernels/triton_runtime.py": "triton",
    "workers/program.py": "functions that the parent names in its source",
    "workloads/workload.py": "factories that our WORKLOAD constants name",
    "workloads/user_model.py": "files that the user has named",
    "workloads/script/run.py": "the training script that the user has named",
}
NAMERS = {
    "cli/step_flags.py": "the first word, and --model",
    "cli/compare.py": "--model",
    "forecasting/forecaster.py": "model= of Forecaster.load",
    "workloads/workload.py": "requested_workload, for the files above",
}
IMPORTS = {"import_module", "exec_module", "__import__", "compile", "exec", "eval"}
NAMING = {"load_user_model", "requested_workload"}


@pytest.mark.parametrize(("words", "allowed"), [(IMPORTS, IMPORTERS), (NAMING, NAMERS)])
def test_code_is_imported_only_where_its_name_is_ours_or_the_users(words, allowed):
    found = set()
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                called = ast.unparse(node.func)
                last = called.rpartition(".")[2]
                if called in words or last in words - {"compile", "eval"}:  # methods of torch too
                    found.add(str(path.relative_to(SOURCE)))
    assert found == set(allowed)
