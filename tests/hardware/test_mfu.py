import pytest

from steplab.core import Work
from steplab.hardware.mfu import utilization

WORK = Work(tokens=65_536, model=9.284e13, palm=1.0e14, hardware=1.1e14)


def test_the_three_figures_are_kept_apart():
    figures = utilization(WORK, 251.0, "NVIDIA H200", "bf16")
    assert figures.mfu == pytest.approx(9.284e13 / (0.251 * 989.4e12))
    assert figures.mfu_palm == pytest.approx(1.0e14 / (0.251 * 989.4e12))
    assert figures.hfu == pytest.approx(1.1e14 / (0.251 * 989.4e12))
    assert "H200" in figures.peak_source and not figures.warning


def test_peak_follows_the_dtype_that_ran():
    assert utilization(WORK, 1.0, "NVIDIA H200", "fp32").peak_tflops == 66.9
    assert utilization(WORK, 1.0, "NVIDIA H200", "tf32").peak_tflops == 494.7


def test_unknown_card_gives_unknown():
    figures = utilization(WORK, 251.0, "Mystery 9000", "bf16")
    assert (figures.mfu, figures.peak_tflops) == (None, None)
    assert "Mystery 9000" in figures.peak_source


def test_card_without_the_units_gives_unknown():
    assert utilization(WORK, 251.0, "Tesla T4", "bf16").mfu is None


def test_sparse_peak_is_replaced_with_a_warning():
    figures = utilization(WORK, 251.0, "NVIDIA H100 80GB HBM3", "bf16", asked_tflops=1979)
    assert figures.peak_tflops == 989.4
    assert "sparse" in figures.warning


def test_sparse_tf32_peak_is_replaced_too():
    figures = utilization(WORK, 1000.0, "NVIDIA H100 80GB HBM3", "tf32", asked_tflops=989.4)
    assert figures.peak_tflops == 494.7 and "sparse tf32" in figures.warning


@pytest.mark.parametrize("tflops", [1979, 989.4, 494.7])
def test_tensor_core_peak_for_fp32_products_warns(tflops):
    figures = utilization(WORK, 9000.0, "NVIDIA H200", "fp32", asked_tflops=tflops)
    assert figures.peak_tflops == tflops and "ran in fp32" in figures.warning


def test_the_cards_own_dense_peak_never_warns():
    for dtype, tflops in (("fp32", 66.9), ("tf32", 494.7), ("bf16", 989.4), ("fp8", 1979)):
        assert not utilization(WORK, 9000.0, "NVIDIA H200", dtype, asked_tflops=tflops).warning


def test_own_peak_is_taken():
    assert utilization(WORK, 251.0, "Mystery", "bf16", asked_tflops=500).peak_tflops == 500


def test_above_the_peak_is_a_measurement_error():
    figures = utilization(WORK, 10.0, "NVIDIA H200", "bf16")
    assert figures.mfu > 1 and "measurement error" in figures.warning
