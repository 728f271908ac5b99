"""The pages as a browser reads them: whole, from nowhere else, and deaf to hostile names."""

import base64
import hashlib
import json
import re
from dataclasses import replace

import pytest

pytest.importorskip("rich")

from steplab.core import (
    Accelerator,
    Allocation,
    Column,
    Finding,
    MemoryTimeline,
    Profile,
    Samples,
    Table,
)
from steplab.core.comparison import Change, Comparison
from steplab.core.errors import UserError
from steplab.core.run import MEMORY_KINDS
from steplab.report.markup import Html, data_block, element, join
from steplab.report.pages import write_compare_page, write_explain_page, write_profile_page
from steplab.report.pages.document import table_html
from tests.compare.sides import ENVIRONMENT, noisy, run_of
from tests.report.analyses import KERNELS, Kernel, analysis_of
from tests.report.reading import Page

EVIL = """</script><script>alert(1)</script><img src=x onerror='alert(2)'>"&\u2028"""
H200 = replace(ENVIRONMENT, accelerators=(Accelerator("NVIDIA H200", 2**37),), cuda="12.8")


def memory_timeline(name="forward"):
    held = dict.fromkeys(MEMORY_KINDS, (0, 2**20, 0))
    block = Allocation(2**20, "activations", (4, 8), "float32", f"{name}.py:1", name, name)
    return MemoryTimeline(
        times_ms=(0.0, 1.0, 2.0),
        bytes_by_kind=held,
        phases_ms={name: (0.0, 2.0)},
        peak_bytes=6 * 2**20,
        peak_ms=1.0,
        peak_by_kind=dict.fromkeys(MEMORY_KINDS, 2**20),
        at_peak=(block,),
        largest=(block,),
        saved_by_module={name: 2**20},
        notes=(name,),
    )


def profiled(run, name="forward"):
    profile = Profile((0, 1, 3, 1), ("trace_1.json.gz",), memory=memory_timeline(name))
    return replace(run, profile=profile)


def profile_page(tmp_path, run=None, analysis=None):
    write_profile_page(run, analysis, tmp_path / "new" / "page.html")
    return Page((tmp_path / "new" / "page.html").read_text(encoding="utf-8"))


def comparison(**changes):
    table = Table("kernels", (Column("kernel"), Column("difference", "ms")), (("k", 1.0),))
    total = replace(table, rows=(("k", 1.0), ("the whole step", 1.0)))
    fields = {
        "a": "run-a",
        "b": "run-b",
        "verdict": "faster",
        "reason": "B takes less.",
        "samples_a": Samples(noisy(10), "ms"),
        "samples_b": Samples(noisy(9), "ms"),
        "method": "in turns",
        "change": Change(-0.1, -0.12, -0.08, 0.95, 0.02),
        "tables": {"kernels": table, "budget": total},
        "conditions": ("a machine",),
    }
    return Comparison(**(fields | changes))


def compare_page(tmp_path, **changes):
    write_compare_page(comparison(**changes), tmp_path / "c.html")
    return Page((tmp_path / "c.html").read_text(encoding="utf-8"))


def test_a_profile_has_all_its_parts(tmp_path):
    run = profiled(run_of(noisy(9.4), environment=H200, device="cuda"))
    page = profile_page(tmp_path, run, analysis_of())
    assert page.ids() == ["budget", "timeline", "categories", "kernels", "memory", "roofline"]
    text = page.text()
    for part in ("gpt tiny, batch 4", "tokens per second", "matmul bf16", "NVIDIA H200"):
        assert part in text
    for part in ("ideal [ms]", "wait 0, warm-up 1", "warm-up 5", "bf16/fp16", "layer_norm"):
        assert part in text


def test_parts_without_data_are_left_out(tmp_path):
    assert profile_page(tmp_path, run_of()).ids() == []
    cpu = profile_page(tmp_path, None, analysis_of(device=False))
    assert cpu.ids() == ["budget", "timeline", "categories", "kernels"]
    assert "Operators by phase" in cpu.text() and "3 steps, without a Run" in cpu.text()
    write_explain_page(None, None, (), tmp_path / "e.html")
    assert "No rule finds anything" in (tmp_path / "e.html").read_text()


def test_an_explanation_ranks_what_is_at_stake(tmp_path):
    findings = (
        Finding("sync", "the host waits", ("item x 3",), "do not", 2.0, None, "it idles", 1.5),
        Finding("logits", "kept whole", (), "chunk it", 0.1, 2**28),
        Finding("launches", "op by op", (), "compile it", 4.0, ordinary=True),  # no fault: a note
    )
    write_explain_page(run_of((10.0,) * 9), analysis_of(), findings, tmp_path / "e.html")
    page = Page((tmp_path / "e.html").read_text())
    assert page.ids() == ["budget", "findings", "timeline"]
    assert [a["class"] for a in page.all("article")] == ["finding", *["finding small"] * 2]
    for part in ("2.000 ms (20.0 %)", "256 MiB", "it idles", "Expected gain: 1.500 ms"):
        assert part in page.text()


def test_a_comparison_shows_verdict_and_every_sample(tmp_path):
    page = compare_page(tmp_path)
    assert "B is faster than A: B takes less." in page.text() and "1.11x" in page.text()
    dots = [a for a in page.all("circle") if "side-" in a["class"]]
    assert len(dots) == 60 and page.ids() == ["samples", "kernels", "budget"]
    assert [a.get("class") for a in page.all("tr")].count("sum") == 1
    many = compare_page(tmp_path, samples_a=Samples(noisy(10, 5000), "ms"))
    assert len([a for a in many.all("circle") if a["class"] == "dot side-A"]) <= 1000


def test_a_comparison_of_other_work_or_of_single_steps(tmp_path):
    one = Samples((3.0,), "ms")
    page = compare_page(tmp_path, verdict="not alike", change=None, samples_a=one, samples_b=one)
    assert "A and B are not alike" in page.text() and "speed-up" not in page.text()
    still = Change(0.0, 0.0, 0.0, 0.95, 0.0)
    assert compare_page(tmp_path, verdict="cannot tell", change=still).ids()


def assert_harmless(page, data):
    """One program, which is our own, no handler, no reference to anything outside."""
    kinds = [attributes.get("type") for attributes in page.all("script")]
    assert kinds.count(None) == 1 and set(kinds) <= {None, "application/json"}
    assert not page.all("img") and not page.all("link") and not page.all("iframe")
    for _, attributes in page.elements:
        assert not [name for name in attributes if name.startswith("on") or name == "src"]
        assert attributes.get("href", "#").startswith("#")
    assert b"url(" not in data and b"@import" not in data and b"https://" not in data


def test_hostile_names_stay_texts(tmp_path):
    kernels = (*KERNELS, Kernel(EVIL, 8_000_000, 500_000, EVIL, EVIL, EVIL, 1e9, 1e6))
    run = run_of(environment=H200, device="cuda", workload=f"{EVIL}:f", config={EVIL: EVIL})
    run = replace(run, id=EVIL, notes=(EVIL,), created=EVIL)
    run = replace(run, environment=replace(H200, cpu=EVIL, variables={EVIL: EVIL}))
    run = replace(run, findings=(Finding(EVIL, EVIL, (EVIL,), EVIL, 1.0, 1, EVIL),))
    analysis = analysis_of(kernels)
    budget = replace(analysis.budget, notes=(EVIL,), peaks={EVIL: EVIL})
    page = profile_page(tmp_path, profiled(run, EVIL), replace(analysis, budget=budget))
    assert_harmless(page, (tmp_path / "new" / "page.html").read_bytes())
    assert page.text().count("<script>alert(1)</script>") > 10
    names = next(data for tag, data in page.texts if tag == "script" and data.startswith("["))
    assert EVIL in json.loads(names) and "<" not in names


def test_hostile_comparisons_stay_texts(tmp_path):
    table = Table(EVIL, (Column(EVIL), Column("difference", EVIL)), ((EVIL, 1.0),), EVIL)
    words = {"a": EVIL, "b": EVIL, "reason": EVIL, "method": EVIL, "conditions": (EVIL,)}
    page = compare_page(tmp_path, tables={"kernels": table}, **words)
    assert_harmless(page, (tmp_path / "c.html").read_bytes())
    assert page.text().count("<script>alert(1)</script>") > 6


def test_the_policy_names_the_one_script(tmp_path):
    text = (tmp_path / "c.html", compare_page(tmp_path))[0].read_text()
    script = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    assert len(script) == 1
    digest = base64.b64encode(hashlib.sha256(script[0].encode()).digest()).decode()
    assert f"script-src &#x27;sha256-{digest}&#x27;" in text and "default-src &#x27;none" in text


def test_both_schemes_and_narrow_screens_are_styled(tmp_path):
    text = (tmp_path / "c.html", compare_page(tmp_path))[0].read_text()
    assert "prefers-color-scheme: dark" in text and "max-width: 640px" in text
    assert 'name="viewport"' in text


def test_a_page_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="Cannot write"):
        write_compare_page(comparison(), tmp_path / "file" / "c.html")


def test_half_of_a_surrogate_pair_can_be_written(tmp_path):
    assert "?" in compare_page(tmp_path, a="\ud800").text()


def test_markup_escapes_unless_it_is_markup():
    assert element("p", "<b>", element("i", "x"), class_='a"b') == (
        '<p class="a&quot;b">&lt;b&gt;<i>x</i></p>'
    )
    assert element("line", x1=0.1 + 0.2, data_v=None) == '<line x1="0.3"/>'
    assert join(["a&", Html("<b>")]) == "a&amp;<b>"
    assert json.loads(re.sub("<.*?>", "", data_block("n", [EVIL, "\ud800"]))) == [EVIL, "\ud800"]


def test_cells_sort_by_their_values():
    columns = (Column("name"), Column("time", "ms"), Column("difference", "ms"))
    table = Table("t", columns, (("a", 1234.5, -2.0), ("b", None, 1.0), ("c", float("nan"), None)))
    page = Page(table_html(table))
    values = [a["data-v"] for a in page.all("td") if "data-v" in a]
    assert values == ["1234.5", "-2.0", "-Infinity", "1.0", "-Infinity", "-Infinity"]
    bars = [(a["class"], a["style"]) for a in page.all("i")]
    assert bars[:2] == [("less", "width:50.00%"), ("more", "width:25.00%")]
    long = Page(table_html(Table("t", (Column("kernel"),), (("x" * 500,),))))
    assert long.all("div")[1]["data-tip"] == "x" * 500


def test_the_bar_and_the_table_of_the_budget_add_up(tmp_path):
    page = profile_page(tmp_path, None, analysis_of())
    widths = [
        float(attributes["style"][6:-1])
        for tag, attributes in page.elements
        if tag == "i" and "data-tip" in attributes
    ]
    assert sum(widths) == pytest.approx(100, abs=0.01) and len(widths) == 8
    assert "9.0 % is unexplained" in page.text()
