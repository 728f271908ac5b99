"""The files that a search leaves, and the tables it prints."""

import io
from dataclasses import replace

import pytest

pytest.importorskip("rich")

from rich.console import Console

from steplab.core import PLAIN, Recipe, RunSpec, Samples
from steplab.core.comparison import Change
from steplab.core.errors import UserError
from steplab.core.ladder import Check, Ladder, Rung, Untried, change_label
from steplab.core.table import cell_text
from steplab.report.charts.step_times import ladder_chart
from steplab.report.pages import write_ladder_page
from steplab.report.terminal import _draw, fitted
from steplab.store import Store
from steplab.techniques.recipes import parse_recipe, read_recipe_file
from steplab.tune.folder import LadderFolder, open_ladder
from steplab.tune.options import TuneOptions
from steplab.tune.report import (
    gate_table,
    impact_table,
    interval,
    outlier_lines,
    padding_line,
    reasons_table,
    total_line,
    undecided_line,
    untried_table,
    write_recipe,
)
from tests.compare.sides import ENVIRONMENT, run_of
from tests.report.analyses import analysis_of
from tests.report.reading import Page

SPEC = RunSpec("gpt", {"context": 128}, "tiny", batch=4)
BF16, WRONG = parse_recipe("precision=bf16"), parse_recipe("precision=bf16,optimizer=fused")
GREEN, RED = Check("loss", True, "near"), Check("gradients", False, "w.weight: far off")
EVIL = "<script>alert(1)</script>"


def ladder() -> Ladder:
    ten, five = Samples((10.0,) * 6, "ms"), Samples((5.0,) * 6, "ms")
    change = Change(-0.5, -0.52, -0.48, 0.95, 0.01)
    kept = Rung(
        *("precision", {"dtype": "bf16"}, BF16, PLAIN, "kept", "faster"),
        ceiling=6.0, ceiling_share=0.6, ceiling_parts="matmul 6 ms", checks=(GREEN,), before=ten,
        after=five, gain=change, memory_before=2**31, memory=2**30, cold_seconds=12.0, run="run-b",
    )  # fmt: skip
    # A gain that must not be shown: its gate is red.
    wrong = Rung(
        *("optimizer", {"impl": "fused"}, WRONG, BF16, "red gate", f"gradients {EVIL}", "do not"),
        checks=(GREEN, RED), before=five, after=ten, gain=Change(-0.9, -0.91, -0.89, 0.95, 0.01),
    )  # fmt: skip
    broken = Rung("impl", {"attention": "math"}, BF16, BF16, "failed", "oom: too much", "less")
    broken = replace(broken, recipe=parse_recipe("precision=bf16,impl.attention=math"))
    return Ladder(
        "id", SPEC, ENVIRONMENT, created="now", baseline_checks=(GREEN,), winner=BF16,
        rungs=(kept, wrong, broken), untried=(Untried("compile=whole", "needs more"),),
        gate_shapes=("at batch 1",), before=ten, after=five, total=change, stopped="nothing left",
        baseline_run="run-a", winner_run="run-b", finished=True,
    )  # fmt: skip


def test_an_interrupted_ladder_does_not_say_that_nothing_won():
    """Its winner is known, what it gained over the baseline is not."""
    found = replace(ladder(), total=None)
    assert "precision=bf16: the best so far" in total_line(found)
    assert "stays as it is" in total_line(replace(found, winner=PLAIN))


def test_what_a_script_has_already_is_no_gain(tmp_path):
    found = replace(ladder(), spec=replace(SPEC, workload="script:train.py"), own=BF16)
    assert total_line(found) == "precision=bf16: train.py has this already: nothing to gain"
    tables = {"impact": impact_table(found)}
    run, path = run_of((10.0,)), tmp_path / "page.html"
    write_ladder_page(found, tables, "", run, analysis_of(), (), path)
    page = path.read_text(encoding="utf-8")
    assert "The script has precision=bf16 already: nothing to gain." in page
    assert "the speed</b>" not in page


def test_what_nobody_can_tell_of_is_told_beside_a_winner():
    found = ladder()
    assert undecided_line(found) == ""
    close = replace(found.rungs[1], outcome="cannot tell")
    found = replace(found, rungs=(found.rungs[0], close))
    assert undecided_line(found).startswith(f"undecided: {close.label};")
    assert undecided_line(replace(found, total=None)) == ""  # the total line says it


def test_a_change_is_named_as_the_recipe_would_have_it():
    compiled = parse_recipe("compile=blocks,compile.optimizer=true")
    assert change_label("compile", {"optimizer": True}, compiled) == "compile.optimizer=true"
    assert change_label("compile", {"scope": "blocks"}, compiled) == "compile=blocks"
    assert change_label("compile", {}, compiled) == "without compile"
    both = parse_recipe("impl.attention=math,impl.experts=loop")
    assert change_label("impl", {"experts": "loop"}, both) == "impl.experts=loop"


def test_rungs_that_were_tried_again_or_on_another_recipe_are_told_apart():
    """`compile=loss` stood there twice, once undecided and once without a gain."""
    on_plain = Rung("compile", {"scope": "loss"}, parse_recipe("compile=loss"), PLAIN, "no gain")
    found = replace(ladder(), rungs=(on_plain, on_plain, replace(on_plain, below=BF16)))
    names = ["compile=loss", "compile=loss, again", "compile=loss on precision=bf16"]
    for table in (impact_table(found), reasons_table(found)):
        assert [row[0] for row in table.rows] == names
    found = replace(found, rungs=(*ladder().rungs, *found.rungs))
    assert all(f">{name}<" in str(ladder_chart(found)) for name in names)


def test_the_impact_table_shows_no_speed_up_over_a_red_gate():
    table = impact_table(ladder())
    shown = [dict(zip([c.name for c in table.columns], row, strict=True)) for row in table.rows]
    assert shown[0]["speed-up"] == "2.00x (1.92 to 2.08)" and "warm" not in shown[0]
    assert shown[0]["gained"] == 5.0 and shown[0]["ceiling"] == 6.0
    assert shown[1]["gate"] == "red" and shown[1]["speed-up"] == shown[1]["gained"] == "-"
    assert shown[2]["gate"] == "not reached"
    assert "at batch 1" in table.note


@pytest.mark.parametrize("objective", ["time", "memory"])
@pytest.mark.parametrize("width", [80, 100])
def test_a_narrow_terminal_cuts_no_number_of_the_impact_table(objective, width):
    kept, wrong, broken = ladder().rungs
    kept = replace(kept, warm_seconds=123.4, seconds=1234.5)
    found = replace(ladder(), objective=objective, rungs=(kept, wrong, broken))
    table = fitted(impact_table(found), width)
    out = Console(file=io.StringIO(), width=width)
    _draw(table, out)
    lines = out.file.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    names = [column.name for column in table.columns]
    assert {"rung", "outcome", "gate", "speed-up", "gained"} <= set(names)
    assert ("step" if objective == "time" else "peak memory") in names
    whole = {cell_text(cell, c.digits) for c, cell in zip(table.columns, table.rows[0], strict=True)
             if isinstance(cell, float)}  # fmt: skip
    assert whole <= set(" ".join(lines).split())


def test_the_impact_table_tells_the_waits_of_a_green_rung():
    kept, wrong, broken = ladder().rungs
    waiting = [replace(rung, waits=18) for rung in (kept, wrong, broken)]
    once = replace(kept, waits=1)
    gates = [row[2] for row in impact_table(replace(ladder(), rungs=(*waiting, once, kept))).rows]
    said = ["green, waits 18 times", "red", "not reached", "green, waits 1 time", "green"]
    assert gates == said


def test_the_other_tables_and_the_last_line():
    assert [row[0] for row in reasons_table(ladder(), all_rungs=False).rows] == [
        "optimizer=fused",
        "impl.attention=math",
    ]
    assert untried_table(ladder()).rows == (("compile=whole", "needs more"),)
    assert ("optimizer=fused", "gradients", "RED", "w.weight: far off") in gate_table(ladder()).rows
    assert "2.00x (1.92 to 2.08), 10 ms to 5 ms" in total_line(ladder())
    assert "stays" in total_line(replace(ladder(), total=None, winner=PLAIN))
    unsure = Change(-0.05, -0.2, 0.1, 0.95, 0.2)
    assert "no longer distinguishable" in total_line(replace(ladder(), total=unsure))


def test_the_recipe_is_a_file_that_reads_back(tmp_path):
    recipe = parse_recipe("precision=bf16,compile=whole,compile.optimizer=true,impl.attention=math")
    write_recipe(recipe, tmp_path / "new" / "recipe.toml", ["two\nlines", "1.5x"])
    assert read_recipe_file(tmp_path / "new" / "recipe.toml") == recipe
    assert parse_recipe(str(tmp_path / "new" / "recipe.toml")) == recipe
    write_recipe(PLAIN, tmp_path / "plain.toml")
    assert read_recipe_file(tmp_path / "plain.toml") == Recipe()


def test_the_page_has_all_its_parts_and_is_deaf_to_names(tmp_path):
    tables = {"impact": impact_table(ladder()), "gate": gate_table(ladder())}
    tables |= {"why": reasons_table(ladder()), "untried": untried_table(ladder())}
    path = tmp_path / "page.html"
    write_ladder_page(
        ladder(), tables, '[precision]\ndtype = "bf16"', run_of(), analysis_of(), (), path
    )
    page = Page(path.read_text(encoding="utf-8"))
    keys = ["ladder", "impact", "recipe", "why", "headroom", "roofline", "findings", "budget"]
    assert [key for key in page.ids() if key in keys] == [k for k in keys if k in page.ids()]
    assert {"ladder", "impact", "recipe", "headroom", "gate", "untried"} <= set(page.ids())
    text = page.text()
    assert "2.00x the speed" in text and "precision=bf16" in text and "Not tried" in text
    assert "10.00x" not in text, "the red rung's gain"
    assert EVIL not in path.read_text(encoding="utf-8")


def test_a_ladder_travels_through_its_file(tmp_path):
    folder = LadderFolder(tmp_path / "ladder")
    folder.save(ladder())
    assert folder.load() == ladder()
    (tmp_path / "ladder" / "ladder.json").write_text("{")
    with pytest.raises(UserError, match=r"is not JSON.*begin anew"):
        folder.load()


def test_only_an_unfinished_ladder_of_the_same_step_and_gate_is_taken_up(tmp_path):
    def opened(spec=SPEC, environment=ENVIRONMENT, **options):
        return open_ladder(Store(tmp_path), spec, environment, TuneOptions(**options))

    folder, first = opened()
    assert opened()[1].id == first.id
    assert opened(environment=replace(ENVIRONMENT, git="another"))[1].id == first.id
    others = (
        {"objective": "memory"},
        {"spec": replace(SPEC, batch=5)},
        {"spec": replace(SPEC, source="another file")},
        {"environment": replace(ENVIRONMENT, steplab="another version")},
        {"also_batch": 2},
        {"memory_limit": 2},
    )
    for other in others:
        assert opened(**other)[1].id != first.id, other
    folder.save(replace(first, finished=True))
    assert opened()[1].id != first.id


def test_an_interval_of_any_width_is_not_spelled_out():
    assert interval(Change(-0.5, -0.6, -0.4, 0.95, None)) == "1.67 to 2.50"
    assert interval(Change(-0.5, -1 + 1e-6, 400.0, 0.95, None)) == "0.00 to more than 100"


def cells(found, rung):
    table = impact_table(found)
    names = [column.name for column in table.columns]
    row = next(row for row in table.rows if row[0] == rung)
    return dict(zip(names, row, strict=True))


def test_an_interval_that_leaves_everything_open_shows_no_gain():
    kept, *others = ladder().rungs
    open_ = replace(kept, outcome="cannot tell", gain=Change(2.5, -1 + 1e-6, 4e6, 0.99, None))
    shown = cells(replace(ladder(), rungs=(open_, *others)), "precision=bf16")
    assert shown["speed-up"] == "cannot tell" and "gained" not in shown, "nobody gained anything"
    total = total_line(replace(ladder(), total=open_.gain))
    assert "nobody can tell" in total and "x (" not in total
    wide = replace(open_, gain=Change(0.67, -0.24, 2.68, 0.99, None))
    shown = cells(replace(ladder(), rungs=(wide, *others)), "precision=bf16")
    assert shown["speed-up"] == "0.60x (0.27 to 1.32)" and shown["gained"] == -6.7


def test_a_rung_without_turns_has_the_ceiling_of_the_nearest_ones():
    """It was profiled at 13 ms in a busy minute; in turns the recipe below takes 5 ms."""
    *others, broken = ladder().rungs
    broken = replace(broken, ceiling=5.2, ceiling_share=0.4)
    assert cells(replace(ladder(), rungs=(*others, broken)), broken.label)["ceiling"] == 2.0
    alone = replace(ladder(), rungs=(broken,))
    assert cells(alone, broken.label)["ceiling"] == 5.2, "there is nothing better"


def test_the_note_explains_the_columns_that_there_are():
    note = impact_table(ladder()).note
    assert "cold: first step" in note and "warm: " not in note and "took: " not in note
    plain = replace(ladder(), rungs=(replace(ladder().rungs[0], cold_seconds=None, seconds=3.0),))
    note = impact_table(plain).note
    assert "cold: " not in note and "took: trying it" in note


def test_outliers_of_the_last_turns_are_told():
    assert outlier_lines(ladder()) == []
    after = Samples((5.0,) * 5 + (999.0,), "ms", {"5": "slow, captured the CUDA graph"})
    assert outlier_lines(replace(ladder(), after=after)) == [
        "winner, outliers: 1 of 6 steps took far longer than 5.000 ms: "
        "999.0 ms (captured the CUDA graph)"
    ]


def test_padding_is_told_with_what_packing_could_gain():
    """A quarter of the batch: a third more tokens a second, and a quarter of the step."""
    padded = replace(ladder(), padding=0.25, after=Samples((80.0,) * 3, "ms"))
    line = padding_line(replace(padded, padding_told_by="lengths"))
    assert "25.0 % of the batch is padding, by its lengths; packing several sequences" in line
    assert "at most 1.33x the tokens/s, 20.00 ms of 80.00 ms a step" in line
    unmeasured = padding_line(replace(padded, after=None, before=None))
    assert "1.33x the tokens/s. No recipe" in unmeasured


def test_a_contended_machine_is_named_under_the_table():
    busy = replace(ladder(), contention="contended: threads waited 40 % of the time for a core")
    assert f"{busy.contention}, so gains are less certain" in impact_table(busy).note
    assert "less certain" not in impact_table(ladder()).note
