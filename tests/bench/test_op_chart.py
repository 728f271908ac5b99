import xml.etree.ElementTree as ElementTree

import pytest

from steplab.bench.op_tables import chart_of
from steplab.bench.ops.attention import BENCH
from steplab.core.errors import UserError
from steplab.report.charts.lines import chart_svg, write_line_chart
from steplab.report.charts.plot import check_plot
from tests.bench.op_runs import failed, measured, specs, wrong

SVG = "{http://www.w3.org/2000/svg}"


def sweep(contexts=(32, 64, 128)):
    cells = specs(["flash", "math", "tiled"], contexts)
    made = {"flash": measured, "math": lambda s: measured(s, both=s.config["context"] / 10)}
    return [made.get(spec.config["impl"], wrong)(spec) for spec in cells]


def drawn(chart):
    return ElementTree.fromstring(chart_svg(chart))


def test_a_line_per_variant_with_all_its_points():
    chart = chart_of(BENCH, sweep(), "both")
    root = drawn(chart)
    assert len(root.findall(f".//{SVG}polyline")) == 2
    assert len(root.findall(f".//{SVG}circle")) == 6
    tips = [title.text for title in root.iter(f"{SVG}title")]
    assert "math, context 128: 12.84" in tips
    words = " ".join(text.text for text in root.iter(f"{SVG}text"))
    assert "tiled at 64: wrong" in words and "context; both [ms]" in words


def test_one_x_makes_bars():
    root = drawn(chart_of(BENCH, sweep(contexts=(64,)), "forward"))
    assert not root.findall(f".//{SVG}polyline")
    assert len(root.findall(f".//{SVG}g/{SVG}rect")) == 2


def test_a_chart_without_a_right_row_is_drawn():
    runs = [failed(spec) for spec in specs(["flash"])]
    assert "flash at 64: oom" in chart_svg(chart_of(BENCH, runs, "both"))


def test_files(tmp_path):
    chart = chart_of(BENCH, sweep(), "memory")
    assert chart.y_name == "extra memory [MiB]" and set(chart.ys) == {1.0}
    write_line_chart(chart, tmp_path / "new" / "x.svg")
    ElementTree.parse(tmp_path / "new" / "x.svg")
    with pytest.raises(UserError, match="Cannot draw"):
        check_plot(tmp_path / "x.pdf")


@pytest.mark.parametrize("contexts", [(64,), (32, 64)])
def test_png(tmp_path, contexts):
    pytest.importorskip("matplotlib")
    write_line_chart(chart_of(BENCH, sweep(contexts), "both"), tmp_path / "x.png")
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")
