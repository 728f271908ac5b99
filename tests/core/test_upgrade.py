"""Documents of earlier versions, path by path. Whole files: tests/test_stored_files.py."""

import pytest

from steplab.core.errors import UserError
from steplab.core.upgrade import VERSION, check_version, upgrade


def budget(term, name, key):
    terms = {"kernels": 1.0, term: 2.0, "launch": 3.0}
    step = {"number": 1, "terms": terms, "categories": [{"name": name, key: 1.0}]}
    return {"profile": {"budget": {"steps": [step]}}}


def test_budgets_and_findings_of_version_1():
    old = budget("synchronisation", "normalisation", "modelled_ms")
    new = budget("synchronization", "normalization", "modeled_ms")
    old["findings"] = [{"rule": "synchronisation"}, {"rule": "launch_bound"}]
    new["findings"] = [{"rule": "synchronization"}, {"rule": "launch_bound"}]
    found = upgrade("run", 1, old)
    assert found == new
    # Terms are shown in the order they are stored.
    assert list(found["profile"]["budget"]["steps"][0]["terms"])[1] == "synchronization"


def test_names_of_the_user_are_left_alone():
    config = {"along": 1, "normalise": "x", "synchronisation": 2}
    run = {"spec": {"config": dict(config)}, "profile": None, "findings": []}
    assert upgrade("run", 1, run)["spec"]["config"] == config


def test_ladders_and_checkpoints_of_version_1():
    rungs = [{"technique": "a", "along": ["b"], "waits": 0}]
    assert upgrade("ladder", 1, {"rungs": rungs}) == {
        "rungs": [{"technique": "a", "requires": ["b"], "waits": 0}]
    }
    document = {"progress": {"spec": {"settings": {"normalise": "max"}}}}
    assert upgrade("checkpoint", 1, document)["progress"]["spec"]["settings"] == {
        "normalize": "max"
    }


@pytest.mark.parametrize("data", [None, [], {}, {"profile": 3}, {"findings": [None, {}]}])
def test_damaged_documents_are_left_to_the_decoder(data):
    assert upgrade("run", 1, data) == data


def test_documents_of_this_version_are_left_alone():
    new = budget("synchronisation", "normalisation", "modelled_ms")
    assert upgrade("run", VERSION, new) == budget("synchronisation", "normalisation", "modelled_ms")


def test_a_newer_document_says_upgrade():
    check_version(VERSION, "x")
    with pytest.raises(UserError, match=r"x has version 9; .* Upgrade steplab"):
        check_version(9, "x")
