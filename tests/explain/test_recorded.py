"""Recorded exhibits: the rules must go on saying of them what they said, without torch or a GPU.

The files are made by `benchmarks/fault_museum.py --pack`, on two CPU cores and on an H200.
"""

import ast
from pathlib import Path

import pytest

from steplab.explain import case_of_run, explain, is_note
from steplab.record import Run
from steplab.store import Store
from steplab.store.pack import unpack_runs

PACKS = sorted(Path(__file__).parent.glob("museum*.zip"))
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def museum(tmp_path_factory) -> Store:
    store = Store(tmp_path_factory.mktemp("museum"))
    for pack in PACKS:
        unpack_runs(store, pack)
    return store


def newest(store: Store) -> dict[tuple[str, str], Run]:
    """The last Run of every (file, twin): earlier ones are only compared with."""
    found = {}
    for _, run in store.all():
        file, _, twin = run.spec.workload.rpartition(":")
        found[file, twin] = run
    return found


def rule_of(file: str) -> str:
    body = ast.parse((ROOT / file).read_text()).body
    constants = [node for node in body if isinstance(node, ast.Assign)]
    return next(ast.literal_eval(n.value) for n in constants if n.targets[0].id == "rule")


def test_every_recorded_fault_is_named_first(museum):
    faulty = {file: run for (file, twin), run in newest(museum).items() if twin == "faulty"}
    assert len(faulty) >= 8
    named = {file: explain(case_of_run(run, museum)) for file, run in faulty.items()}
    assert {file: found[0].rule for file, found in named.items()} == {
        file: rule_of(file) for file in faulty
    }


def test_nothing_is_found_in_a_clean_twin(museum):
    clean = {file: run for (file, twin), run in newest(museum).items() if twin == "clean"}
    assert len(clean) >= 8
    for file, run in clean.items():
        case = case_of_run(run, museum)
        large = [finding.rule for finding in explain(case) if not is_note(finding, case)]
        assert large == [], file
