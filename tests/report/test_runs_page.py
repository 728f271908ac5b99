"""The page of many Runs."""

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("rich")

from steplab.cli.main import main
from steplab.core import Figures, new_run_id
from steplab.report.pages import write_runs_page
from steplab.report.pages.runs import run_names
from tests.compare.sides import noisy, run_of
from tests.report.reading import Page
from tests.report.test_pages import EVIL, H200


def page_of(tmp_path, *runs):
    write_runs_page(runs, tmp_path / "r.html")
    return Page((tmp_path / "r.html").read_text(encoding="utf-8"))


def test_runs_of_one_kind_share_an_axis(tmp_path):
    fused = {"optimizer": {"impl": "fused"}}
    runs = [run_of(noisy(10)), run_of(noisy(8), "run-b", recipe=fused)]
    runs.append(run_of(noisy(3), "run-c", environment=H200, device="cuda"))
    page = page_of(tmp_path, *runs)
    assert page.ids() == ["group-1", "group-2"]
    text = page.text()
    assert "gpt tiny, batch 4, full, A CPU" in text and "full, NVIDIA H200" in text
    assert "optimizer=fused" in text and "3Runs" in text
    boxes = [box for box in page.all("rect") if box.get("class") == "box"]
    widths = [float(box["width"].rstrip("%")) for box in boxes]
    assert widths[0] / widths[1] == pytest.approx(10 / 8, rel=0.01)
    labels = [div for div in page.all("div") if div.get("class") == "label"]
    assert "optimizer=fused\nrun-b" in [label.get("data-tip") for label in labels]


def test_a_failure_is_a_lane_with_its_reason(tmp_path):
    lost = replace(run_of(name="run-b"), clock=None, memory=None, status="oom", reason="too large")
    page = page_of(tmp_path, run_of(), lost)
    assert page.text().count("oom: too large") == 2 and "1without a result" in page.text()


def test_an_impossible_utilization_is_not_shown(tmp_path):
    figures = Figures(8.026, None, None, 66.9, "a peak", "measurement error: not possible")
    assert "802.6" not in page_of(tmp_path, replace(run_of(), figures=figures)).text()
    right = replace(figures, mfu=0.436, warning="")
    assert "43.60" in page_of(tmp_path, replace(run_of(), figures=right)).text()


def test_names_tell_what_differs():
    runs = [run_of(config={"context": n}) for n in (128, 256)]
    assert run_names(runs) == ["plain, context=128", "plain, context=256"]
    assert run_names(runs[:1]) == ["plain"]


def test_hostile_names_stay_text(tmp_path):
    page = page_of(tmp_path, run_of(config={"note": EVIL}), run_of(workload=EVIL))
    assert len(page.all("script")) == 1 and not page.all("img")


def test_the_command(store, tmp_path, capsys):
    store.save(run_of())
    out = tmp_path / "page.html"
    assert main(["report", "--store", str(store.root), "--out", str(out)]) == 0
    assert "1 Run in" in capsys.readouterr().out and out.exists()
    assert main(["report", "--store", str(store.root), "--out", "page.txt"]) == 2
    assert "must end in .html" in capsys.readouterr().err
    assert main(["report", "--store", str(store.root), "--workload", "none"]) == 2
    assert "no Run to report." in capsys.readouterr().err


@pytest.mark.parametrize("words", [["report", "--out", "page.html"], ["runs", "--pack", "p.zip"]])
def test_runs_that_cannot_be_read_are_not_said_to_be_missing(store, words, capsys, monkeypatch):
    for _ in range(2):
        monkeypatch.chdir(store.save(run_of(name=new_run_id(run_of().spec))))
        Path("run.json").write_text("[]")
        assert main([*words, "last", "--store", str(store.root)]) == 2
        assert "1 Run cannot be read" in capsys.readouterr().err
    assert main([*words, "--store", str(store.root)]) == 2
    assert "2 Runs cannot be read (the first one:" in capsys.readouterr().err


def test_the_page_names_the_runs_that_it_leaves_out(store, tmp_path, capsys):
    store.save(run_of())
    damaged = store.save(run_of(name=new_run_id(run_of().spec)))
    Path(damaged, "run.json").write_text("[]")
    assert main(["report", "--store", str(store.root), "--out", str(tmp_path / "page.html")]) == 0
    out = capsys.readouterr().out
    assert "1 Run in" in out and f"left out {damaged.name}: " in out
