"""The dtype of the products: by the traced ops, else by the kernels' names."""

from dataclasses import replace

from steplab.core import Ran
from steplab.hardware.kernel_names import main_matmul_dtype, matmul_dtypes

NVJET = "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_bias_TNT"


def test_ops_tell_before_kernels():
    assert matmul_dtypes(None) == matmul_dtypes(Ran()) == {}
    mixed = Ran(matmul_dtypes={"float": 4, "c10::BFloat16": 219}, kernels={"sgemm": 3})
    assert matmul_dtypes(mixed) == {"fp32": 4, "bf16": 219}
    assert matmul_dtypes(Ran(matmul_dtypes={"float": 4}, matmul_precision="high")) == {"tf32": 4}
    assert matmul_dtypes(Ran(kernels={NVJET: 5, "triton_poi_fused_gelu_0": 9})) == {"bf16": 5}


def test_what_a_graph_replays_is_told_by_its_kernels():
    """Inductor's graphs hold all products but those of what it did not compile."""
    outside = Ran(matmul_dtypes={"float": 4, "c10::BFloat16": 3}, kernels={NVJET: 216})
    assert matmul_dtypes(outside) == {"fp32": 4, "bf16": 3}
    assert matmul_dtypes(replace(outside, graph_launches=24)) == {"bf16": 216}
    captured = Ran(matmul_dtypes={"c10::BFloat16": 219}, kernels={"sgemm": 9}, graph_launches=1)
    assert matmul_dtypes(captured) == {"bf16": 219}


def test_a_model_may_multiply_in_another_dtype_than_the_recipe_says():
    """A model of somebody's own may be in bf16 although no technique made it so."""
    assert (
        main_matmul_dtype(Ran(matmul_dtypes={"float": 4, "c10::BFloat16": 219}), "fp32") == "bf16"
    )
    assert main_matmul_dtype(Ran(), "tf32") == "tf32"
