"""A run.json that somebody damaged, or made to harm, takes nothing else with it."""

import json
from pathlib import Path

import pytest

pytest.importorskip("rich")
pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, given, settings

from steplab.cli.main import main
from steplab.core import run_to_json
from steplab.core.errors import UserError
from steplab.store import Store
from tests.hostile import ESCAPES, FORMULA, hostile_json, recorded_runs
from tests.store.test_store import make_run

BAD = recorded_runs()[1]["run"]["id"]


def put(store: Store, run_id: str, data: bytes) -> None:
    folder = store.runs / run_id
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_bytes(data)


@pytest.fixture
def good(store):
    run = make_run()
    store.save(run)
    return run


@given(data=hostile_json(recorded_runs()[1]))
@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
def test_no_command_breaks_on_a_damaged_run(data, store, good, tmp_path, capsys):
    put(store, BAD, data)
    where = ["--store", str(store.root)]
    assert main(["runs", *where]) == 0
    assert good.id[-6:] in capsys.readouterr().out
    assert main(["report", "--out", str(tmp_path / "r.html"), *where]) == 0
    for words in (["explain", BAD], ["compare", good.id, BAD], ["runs", BAD, "--json"]):
        assert main([*words, *where]) in (0, 2)
    out, err = capsys.readouterr()
    assert "\x1b" not in out + err and "Traceback" not in err


def test_a_deep_record_is_listed_as_unreadable(store, good, capsys):
    put(store, "deep", b"[" * 100_000)
    put(store, "numbers", b"9" * 5000)
    (store.runs / "pipe").mkdir()
    (store.runs / "pipe" / "run.json").symlink_to("/dev/zero")
    assert main(["runs", "--store", str(store.root)]) == 0
    out = capsys.readouterr().out
    assert good.id[-6:] in out and out.count("unreadable") == 3


def test_a_record_cannot_claim_another_folder(store, good):
    put(store, "other", run_to_json(good).encode())
    with pytest.raises(UserError, match="the record of another Run"):
        store.load("other")


def test_names_in_a_record_steer_no_terminal_and_no_spreadsheet(store, tmp_path, capsys):
    document = recorded_runs()[1]
    run = document["run"]
    run["spec"]["workload"], run["spec"]["size"] = ESCAPES, FORMULA
    run["environment"]["cpu"] = run["reason"] = run["status"] = ESCAPES
    run["status"] = "failed"
    put(store, BAD, json.dumps(document).encode())
    where = ["--store", str(store.root)]
    for suffix in ("md", "csv", "svg", "json"):
        assert main(["runs", "--out", str(tmp_path / f"x.{suffix}"), *where]) == 0
        text = (tmp_path / f"x.{suffix}").read_text()
        assert "\x1b" not in text and "\x9b" not in text
        assert suffix == "json" or suffix == "csv" or "<script" not in text
    assert ",=HYPERLINK" not in (tmp_path / "x.csv").read_text()
    assert main(["explain", BAD, *where]) == 0
    assert main(["report", "--out", str(tmp_path / "r.html"), *where]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out and "\x9b" not in out and "\u202e" not in out and "\r" not in out
    assert "<script>alert" not in (tmp_path / "r.html").read_text()


@pytest.mark.parametrize("command", ["runs", "report", "explain", "compare a b"])
def test_a_store_that_is_no_folder_is_refused(command, tmp_path, capsys):
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to("loop")
    for name, words in (("file", "is a file, not a folder"), ("loop", "symbolic links")):
        assert main([*command.split(), "--store", str(tmp_path / name)]) == 2
        said = capsys.readouterr().err
        assert words in said and "--store" in said


def test_a_name_of_five_thousand_letters(store, good, capsys):
    for words in (["explain", "x" * 5000], ["runs", "--unpack", "x" * 5000]):
        assert main([*words, "--store", str(store.root)]) == 2
        assert len(capsys.readouterr().err) < 1000
    assert main(["runs", "--store", "x" * 5000]) == 2
    assert len(capsys.readouterr().err) < 1000
    assert isinstance(good.id, str) and Path(store.root).is_dir()
