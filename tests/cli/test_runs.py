import json
from dataclasses import replace

import pytest

pytest.importorskip("rich")

from steplab.cli.main import main
from steplab.core import Column, Table
from tests.store.test_store import make_run


@pytest.fixture
def filled(store):
    runs = [make_run(), make_run(status="oom", reason="no memory"), make_run(group="g1")]
    for run in runs:
        store.save(run)
    return runs


def runs_command(store, *words):
    return main(["runs", "--store", str(store.root), *words])


def test_list_and_filter(store, filled, capsys):
    assert runs_command(store) == 0
    out = capsys.readouterr().out
    assert all(run.id in out for run in filled) and "3 Runs" in out
    assert runs_command(store, "--status", "oom") == 0
    out = capsys.readouterr().out
    assert filled[1].id in out and filled[0].id not in out
    assert runs_command(store, "--group", "g1") == 0
    assert filled[2].id in capsys.readouterr().out
    assert runs_command(store, "--newest", "1") == 0
    assert "1 Run" in capsys.readouterr().out


def test_json_is_the_whole_record(store, filled, capsys):
    assert runs_command(store, filled[0].id, "--json") == 0
    assert json.loads(capsys.readouterr().out)["run"]["id"] == filled[0].id


def test_delete_by_filter(store, filled, capsys):
    assert runs_command(store, "--status", "oom", "--delete") == 0
    assert filled[1].id not in store.ids() and len(store.ids()) == 2


def test_pack_and_unpack(store, filled, tmp_path, capsys):
    target = tmp_path / "all.zip"
    assert runs_command(store, "--pack", str(target)) == 0
    assert main(["runs", "--store", str(tmp_path / "other"), "--unpack", str(target)]) == 0
    assert "3 Runs added" in capsys.readouterr().out


def test_a_damaged_run_is_shown_as_such(store, filled, capsys):
    (store.runs / filled[0].id / "run.json").write_text("{")
    assert runs_command(store) == 0
    assert "unreadable" in capsys.readouterr().out


def test_a_filter_never_selects_what_cannot_be_read(store, filled, capsys):
    """A Run of a newer version must not fall to `--status oom --delete`."""
    (store.runs / filled[0].id / "run.json").write_text('{"steplab_record": 9, "run": {}}')
    assert runs_command(store, "--status", "oom", "--delete") == 0
    assert filled[0].id in store.ids() and filled[1].id not in store.ids()
    assert runs_command(store, "--json") == 2
    assert "Upgrade steplab" in capsys.readouterr().err


def test_groups_by_their_beginning(store, filled, capsys):
    assert runs_command(store, "--group", "g") == 0
    assert "1 Run" in capsys.readouterr().out


def test_an_empty_store_is_no_error(store, capsys):
    assert runs_command(store) == 0
    assert "0 Runs" in capsys.readouterr().out


def test_what_has_no_time_or_no_loss_says_so(store, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    turns = Table("one against the other", (Column("recipe"),), (("plain",),))
    store.save(replace(make_run(), losses=(float("nan"),)))
    store.save(replace(make_run(), clock=None, tables={"versus": turns}))
    assert runs_command(store) == 0
    out = capsys.readouterr().out
    assert "ok, loss not finite" in out and "ok, tables: versus" in out
