"""The dtype of the products: by the traced ops, else by the kernels' names."""

from steplab.hardware.product_dtypes import most_products, product_dtypes
from steplab.record import Ran

NVJET = "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_bias_TNT"


def test_ops_tell_before_kernels():
    assert product_dtypes(None) == product_dtypes(Ran()) == {}
    mixed = Ran(matmul_dtypes={"float": 4, "c10::BFloat16": 219}, kernels={"sgemm": 3})
    assert product_dtypes(mixed) == {"fp32": 4, "bf16": 219}
    assert product_dtypes(Ran(matmul_dtypes={"float": 4}, matmul_precision="high")) == {"tf32": 4}
    assert product_dtypes(Ran(kernels={NVJET: 5, "triton_poi_fused_gelu_0": 9})) == {"bf16": 5}


def test_a_model_may_multiply_in_another_dtype_than_the_recipe_says():
    """A model of somebody's own may be in bf16 although no technique made it so."""
    assert most_products(Ran(matmul_dtypes={"float": 4, "c10::BFloat16": 219}), "fp32") == "bf16"
    assert most_products(Ran(), "tf32") == "tf32"
