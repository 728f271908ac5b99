import io
import json
import math
import re
from dataclasses import replace

import pytest

pytest.importorskip("rich")

from steplab.core import Budget, Category, Profile, StepBudget
from steplab.core.budget import COMPUTED_AGAIN, TERMS
from steplab.core.codec import decode, encode
from steplab.report.budget import budget_table, print_budget
from steplab.report.export import to_csv, to_json, to_markdown
from steplab.report.pages.budget import budget_html
from steplab.trace.analysis import run_budget
from tests.compare.sides import run_of
from tests.report.analyses import analysis_of

CATEGORIES = (
    Category("matmul bf16", 4.0, 120, ideal_ms=2.5, modeled_ms=3.5),
    Category("elementwise", 2.0, 300, ideal_ms=1.0, modeled_ms=2.0),
    Category("sort and index", 0.95, 7),
    Category("reduction", 0.03, 2, ideal_ms=0.01, modeled_ms=0.03),
    Category("memset", 0.02, 1),
)


def step(number=4, wall=10.0, **terms) -> StepBudget:
    given = {"kernels": 7.0, "launch": 2.0, "synchronization": 0.75, **terms}
    ordered = {term: given.get(term.replace(" ", "_"), given.get(term, 0.0)) for term in TERMS}
    return StepBudget(number, wall, ordered, CATEGORIES)


def budget(*steps, **options) -> Budget:
    return Budget(steps or (step(),), **{"on_device": True, **options})


def printed(shown: Budget) -> str:
    out = io.StringIO()
    print_budget(shown, out)
    return out.getvalue()


def row(text: str, name: str) -> list[str]:
    """The numbers of the row that begins with a name."""
    line = next(line for line in text.splitlines() if line.strip().startswith(name))
    return re.findall(r"-?[\d,]+\.?\d*|(?<= )-(?= )", line.split(name, 1)[1])


def test_a_residual_in_any_step_is_told():
    steps = step(1, launch=2.25), step(2, launch=1.25), step(3, launch=2.25)
    text = " ".join(printed(budget(*steps)).split())
    assert "does not close in 1 of 3 steps: no event explains 10.0 % of step 2" in text
    assert "does not close" not in printed(budget(steps[0], steps[2]))
    unmarked = printed(budget(marked=False))
    assert "a recording in which nothing marks steps" in unmarked


def test_terms_categories_and_residual_add_up_on_screen():
    text = printed(budget())
    assert "Time budget: 10.00 ms (one profiled step)" in text
    names = ("kernels", "launch", "synchronization", "residual")
    shown = {name: float(row(text, name)[0]) for name in names}
    assert sum(shown.values()) == pytest.approx(float(row(text, "step")[0]))
    assert shown["residual"] == pytest.approx(0.25)
    assert row(text, "kernels")[:5] == ["7.000", "70.0", "430", "3.510", "2.020"]
    assert row(text, "matmul bf16")[:5] == ["4.000", "40.0", "120", "2.500", "1.000"]
    assert row(text, "sort and index")[:5] == ["0.950", "9.5", "7", "-", "-"]


def test_small_categories_are_one_row_and_empty_terms_none():
    text = printed(budget())
    assert row(text, "2 smaller")[:3] == ["0.050", "0.5", "3"]
    assert "memset" not in text and "data wait" not in text and "copies" not in text
    assert "memset" in to_csv(budget_table(budget()))


def test_the_median_step_is_shown():
    text = printed(budget(step(3, 9.9), step(4, 10.0), step(5, 50.0)))
    assert "10.00 ms (step 4, the median of 3 profiled)" in text


def test_what_the_numbers_were_measured_under():
    peaks = {"bf16": "989.4 TFLOP/s dense, H200 SXM"}
    shown = budget(unprofiled_ms=8.0, peaks=peaks, notes=("430 launch calls",))
    text = printed(shown)
    assert "profiled 10.00 ms, unprofiled 8.000 ms: 1.25x" in text
    assert "bf16: 989.4 TFLOP/s dense" in text and "430 launch calls" in text
    assert "(79.0 % of the kernels)" in text  # 5.53 of 7 ms have a model


def test_an_open_budget_is_pointed_out():
    assert "does not close: no event explains 2.5 % of the step" in printed(budget())
    assert "does not close" not in printed(budget(step(launch=2.1)))


def test_dust_is_not_negative():
    shown = step(kernels=7.0, launch=2.25 + 1e-15)
    text = printed(budget(shown))
    assert shown.residual_ms <= 0 and row(text, "residual")[:2] == ["0.000", "0.0"]


def test_without_a_device_there_are_operators_and_no_ideal():
    plain = tuple(Category(c.name, c.ms, c.launches) for c in CATEGORIES)
    alone = StepBudget(0, 10.0, step().terms, plain)
    text = printed(budget(alone, on_device=False))
    assert "operators" in text and "host  Python and framework" in text and "calls" in text
    assert "ideal" not in text and "kernels" not in text


def test_simt_is_a_word_for_gpus():
    product = replace(step(), categories=(Category("matmul fp32 simt", 7.0, 3),))
    for words in (printed, budget_html):
        assert "matmul fp32 simt" in str(words(budget(product)))
        text = str(words(budget(product, on_device=False)))
        assert "matmul fp32" in text and "fp32 simt" not in text


def test_a_narrow_screen_and_plain_letters():
    class Ascii(io.StringIO):
        encoding = "ascii"

    out = Ascii()
    print_budget(budget(), out)
    out.getvalue().encode("ascii")


def test_a_step_without_length():
    empty = StepBudget(0, 0.0, dict.fromkeys(TERMS, 0.0))
    assert row(printed(budget(empty)), "step")[-1] == "0.0"


def test_the_table_for_files():
    table = budget_table(budget())
    times = {(r[0], r[1]): r[2] for r in table.rows}
    assert [term for term, category in times if not category] == [*TERMS, "residual", "step"]
    inside = sum(ms for (term, category), ms in times.items() if category)
    assert term_sum(times) == pytest.approx(10.0) and inside == pytest.approx(times["kernels", ""])
    assert all(not isinstance(c, float) or math.isfinite(c) for r in table.rows for c in r)
    assert decode(type(table), json.loads(to_json(table))) == table
    assert "| kernels | matmul bf16 | 4.000 |" in to_markdown(table)


def term_sum(times):
    return sum(ms for (term, category), ms in times.items() if not category and term != "step")


def test_a_budget_travels_as_json():
    shown = budget(unprofiled_ms=8.0)
    assert decode(Budget, json.loads(json.dumps(encode(shown)))) == shown


def test_a_stored_budget_that_its_trace_contradicts_is_replaced():
    analysis = analysis_of(steps=2)
    one, other = analysis.budget.steps
    later = replace(other, number=7)
    stored = replace(analysis.budget, steps=(one, other, later))
    run = run_of()

    def shown(budget):
        return run_budget(
            replace(run, profile=Profile((0, 1, 2, 2), ("t",), None, budget)), analysis
        )

    assert shown(stored) is stored, "it has the steps of all cycles"
    told = shown(replace(stored, steps=(replace(one, wall_ms=one.wall_ms + 1), other)))
    assert told.steps == analysis.budget.steps and told.notes[-1] == COMPUTED_AGAIN
    nearly = replace(one, wall_ms=one.wall_ms + 1e-9)
    assert COMPUTED_AGAIN not in shown(replace(stored, steps=(nearly, other))).notes
