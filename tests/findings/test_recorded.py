"""Recorded exhibits: the rules must go on saying of them what they said, without torch or a GPU.

The files are made by `benchmarks/fault_museum.py --pack`, on two CPU cores and on an H200.
(full_logits:clean and small_expert_matmuls:faulty need `--pack-limit 450`, those of ranks 500,
small_operators 900.)
"""

import ast
from pathlib import Path

import pytest

from steplab.core import Run
from steplab.core.codec import encode
from steplab.findings import case_of_run, explain, is_note
from steplab.store import Store
from steplab.store.pack import unpack_runs
from steplab.trace.ranks.folder import rank_file

PACKS = sorted(Path(__file__).parent.glob("museum*.zip"))
ROOT = Path(__file__).parents[2]
MAX_BYTES = 2_000_000  # of the pack recorded on a CPU
UNRECORDED = {
    "compiled_not_faster": "three Runs of 400 KB; compares two moments of a quiet machine",
    "noisy_measurement": "its clean twin is clean on a quiet machine only",
    "power_bound": "needs a GPU at its power limit",
    "allocator_calls": "needs a GPU",
    "host_scalars": "needs a GPU",
    "index_gradient": "needs a GPU",
    **dict.fromkeys(
        ("slow_switch", "split_optimizer", "dense_embedding", "graph_memory", "unfused_chain"),
        "too large, or not visited on a quiet machine yet",
    ),
    **dict.fromkeys(("late_start", "transposed_norm"), "not visited on a GPU yet"),
    **dict.fromkeys(
        (
            *("uncalled_compile", "debugging_backend", "heads_in_a_loop", "partly_used"),
            *("written_out", "weight_gradients", "explicit_inverse", "bulky_activations"),
        ),
        "not visited on a quiet machine yet",
    ),
}


@pytest.fixture(scope="module")
def museum(tmp_path_factory) -> Store:
    store = Store(tmp_path_factory.mktemp("museum"))
    for pack in PACKS:
        unpack_runs(store, pack)
    return store


def newest(store: Store, twin: str) -> dict[str, Run]:
    """The last Run of every file's twin: earlier ones are only compared with."""
    found = {}
    for _, run in store.all():
        file, _, which = run.spec.workload.rpartition(":")
        if which == twin:
            found[file] = run
    return found


def constant(file: str, name: str, default=None):
    """What an exhibit says of itself, without importing it."""
    body = ast.parse((ROOT / file).read_text()).body
    assigned = [n for n in body if isinstance(n, ast.Assign)]
    named = [n for n in assigned if getattr(n.targets[0], "id", "") == name]
    return ast.literal_eval(named[0].value) if named else default


@pytest.mark.parametrize("twin", ["faulty", "clean"])
def test_every_exhibit_is_recorded_but_for_those_with_a_reason(museum, twin):
    exhibits = {path.stem for path in (ROOT / "examples" / "faults").glob("*.py")}
    recorded = {Path(file).stem for file in newest(museum, twin)}
    missing = exhibits - set(UNRECORDED) - recorded
    assert not missing, f"record {missing} by fault_museum.py --pack, or say in UNRECORDED why not"
    assert recorded == exhibits - set(UNRECORDED)
    assert (Path(__file__).parent / "museum.zip").stat().st_size < MAX_BYTES


def test_every_recorded_fault_is_named_first(museum):
    faulty = newest(museum, "faulty")
    named = {file: explain(case_of_run(run, museum)) for file, run in faulty.items()}
    assert {file: found[0].rule for file, found in named.items()} == {
        file: constant(file, "rule") for file in faulty
    }


def test_nothing_is_found_in_a_clean_twin(museum):
    for file, run in newest(museum, "clean").items():
        case = case_of_run(run, museum)
        large = {finding.rule for finding in explain(case) if not is_note(finding, case)}
        assert large <= set(constant(file, "both", ())), file
        encode(explain(case).record())  # plain numbers, as `explain --json` writes them


def test_ranks_are_recorded_with_a_trace_each(museum):
    shared = [run for _, run in museum.all() if run.spec.ranks > 1]
    names = [rank_file("trace_1.json.gz", rank) for rank in range(2)]
    assert len(shared) == 16 and all(set(names) <= set(run.artifacts) for run in shared)
