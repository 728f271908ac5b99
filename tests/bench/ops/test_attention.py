import pytest

from steplab.bench.ops.attention import BENCH
from steplab.core import RunSpec
from steplab.core.errors import UserError


def cells(**changes):
    asked = {"batch": [1], "heads": [2], "context": [64], "head_width": [16]}
    asked |= {"dtype": ["fp32"], "causal": [True], "impl": ["flash"]}
    template = RunSpec("attention", device="cpu", steps=7)
    return BENCH.cells({**asked, **changes}, template, 0.5)


def test_a_cell_for_every_combination_and_tile():
    found = cells(
        context=[128, 512], dtype=["fp32", "bf16"], impl=["flash", "triton_flash"],
        tiles=["64x32x4x2"],
    )  # fmt: skip
    assert len(found) == 2 * 2 * 3
    variants = [BENCH.variant_text(spec.config) for spec in found[:3]]
    assert variants == ["flash", "triton_flash", "triton_flash 64x32x4x2"]
    assert {spec.steps for spec in found} == {7} and found[0].config["seconds"] == 0.5
    told = "batch 1, heads 2, context 128, head width 16, causal, fp32"
    assert BENCH.shape_text(found[0].config) == told


def test_the_flagships_work():
    """4 x pairs x width forward; at 0.957 ms that is cuDNN's 431 TFLOP/s on an H200."""
    config = {"batch": 16, "heads": 12, "context": 4096, "head_width": 64, "causal": True}
    forward, backward = BENCH.flops(config)
    assert forward / 0.957e-3 / 1e12 == pytest.approx(431, abs=0.5)
    assert backward == 2.5 * forward


@pytest.mark.parametrize(("context", "count"), [(128, 6), (1024, 7), (4096, 8), (65536, 8)])
def test_all_tiles_are_those_of_the_context(context, count):
    specs = cells(context=[context], dtype=["bf16"], impl=["triton_flash"], tiles=["all"])
    found = [spec.config["tiles"] for spec in specs]
    assert found[0] == "" and len(found) == count + 1
    assert all(tile.count("x") == 3 for tile in found[1:])


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"context": [8]}, "--context must be at least 16"),
        ({"batch": [0]}, "--batch must be at least 1"),
        ({"impl": ["flahs"]}, "Did you mean 'flash'"),
        ({"impl": ["compiled-nothing"]}, "no implementation 'nothing'"),
        ({"tiles": ["64x64x4x2"]}, "--tiles belongs to triton_flash"),
        ({"tiles": ["64x64"], "impl": ["triton_flash"]}, "is not a tile"),
        ({"tiles": ["60x64x4x2"], "impl": ["triton_flash"]}, "powers of two"),
        ({"tiles": ["8x64x4x2"], "impl": ["triton_flash"]}, "at least 16 rows"),
    ],
)
def test_slips(changes, told):
    with pytest.raises(UserError, match=told):
        cells(**changes)


def test_compiled_and_flex_are_known():
    assert len(cells(impl=["compiled-reference", "flex", "math"])) == 3
