import json
from dataclasses import replace

import pytest

pytest.importorskip("rich")

from steplab.cli.main import main
from steplab.core import Clock, Column, Run, RunSpec, Samples, Table, new_run_id
from steplab.techniques.recipes import parse_recipe
from tests.report.test_tables import on_terminal
from tests.store.test_store import ENVIRONMENT, make_run

STEADY = Samples((5.0,) * 10, "ms")
CONTENDED = Clock(STEADY, STEADY, STEADY, {}, {}, 50.0, "perf_counter", contended=0.5)


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
    assert all(run.id[-6:] in out for run in filled) and "3 Runs" in out
    assert runs_command(store, "--status", "oom") == 0
    out = capsys.readouterr().out
    assert filled[1].id[-6:] in out and filled[0].id[-6:] not in out
    assert runs_command(store, "--group", "g1") == 0
    assert filled[2].id[-6:] in capsys.readouterr().out
    assert runs_command(store, "--newest", "1") == 0
    assert "1 Run" in capsys.readouterr().out


OP_CELL = RunSpec("attention", size="T128 D16 fp32 compiled-reference")
RECIPES = ("precision=bf16", "compile=blocks", "precision=bf16,impl.attention=math")


def test_runs_are_told_apart_in_100_columns(store, monkeypatch):
    """Ids of op benches left no room for the recipes of the others, nor for their sizes."""
    small = RunSpec("gpt", {"width": 64}, "tiny", overrides=("width",))
    specs = [OP_CELL, *(replace(small, recipe=parse_recipe(one)) for one in RECIPES)]
    for spec in specs:
        store.save(Run(new_run_id(spec), spec, ENVIRONMENT, clock=CONTENDED))
    text = on_terminal(monkeypatch, 100, lambda: runs_command(store))
    assert max(map(len, text.splitlines())) <= 100
    assert "compiled-reference" in text and "width 64" in text and "ok, contended" in text
    assert "compile=blocks" in text and "attention=" in text and "precision=bf16" in text
    assert "no room for: created, mode (full), device (cpu)" in text
    for run_id in store.ids():
        assert f"\n{run_id[-6:]} " in text and store.load(run_id[-6:]).id == run_id


def test_files_have_whole_ids(store, filled, tmp_path):
    assert runs_command(store, "--out", str(tmp_path / "runs.csv")) == 0
    assert all(run.id in (tmp_path / "runs.csv").read_text() for run in filled)


def test_both_sides_of_a_comparison_are_listed(store, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    dense, routed = (
        RunSpec("hydra", {"mod": mod}, "tiny", overrides=("mod",)) for mod in ("dense", "top-k")
    )
    fused = replace(routed, recipe=parse_recipe("optimizer=fused"))
    store.save(Run(new_run_id(dense), dense, ENVIRONMENT, against=fused))
    assert runs_command(store) == 0
    out = capsys.readouterr().out
    assert "tiny, mod dense / tiny, mod top-k" in out and "plain / optimizer=fused" in out
    assert "hydra /" not in out


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
