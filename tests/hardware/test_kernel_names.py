"""Names as they stand in traces of real runs."""

from dataclasses import replace

import pytest

from steplab.core import Ran
from steplab.hardware.kernel_names import (
    attention_backend,
    main_matmul_dtype,
    matmul_class,
    matmul_dtypes,
)

TILE = "tn_n_tilesize64x64x8_stage3_warpsize1x4x1"
FLASH_TRAITS = "Flash_bwd_kernel_traits<(int)64, (int)64, (int)128, (int)8, cutlass::bfloat16_t>"
MATMULS = {
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_cublas": "bf16",
    "ampere_bf16_s16816gemm_bf16_256x128_ldg8_f2f_stages_32x3_tn": "bf16",
    "ampere_s16816gemm_bf16_64x64_sliced1x2_ldg8_stages_64x6_nn": "bf16",
    "void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_tn_align8>"
    "(cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128_32x3_tn_align8::Params)": "bf16",
    "cutlass_75_tensorop_bf16_s1688gemm_bf16_256x128_nn_align1": "bf16",
    "void cutlass::Kernel<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8>"
    "(cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8::Params)": "bf16",
    f"sm80_xmma_gemm_f16f16_f16f32_f32_{TILE}_tensor16x8x16_kernel": "fp16",
    f"sm80_xmma_gemm_f16f16_f16f16_f16_{TILE}_execute_kernel_trt": "fp16",
    "ampere_fp16_s16816gemm_fp16_64x64_sliced1x2_ldg8_relu_f2f_stages_64x6_tn": "fp16",
    "ampere_s1688gemm_fp16_128x128_ldg8_stages_32x1_nn": "fp16",
    "volta_h884gemm_256x128_ldg8_nn": "fp16",
    "cutlass_80_tensorop_s16816gemm_f16_256x128_32x3_nn_align8": "fp16",
    f"sm80_xmma_gemm_f32f32_tf32f32_f32_{TILE}_tensor16x8x8_execute_kernel__5x_cublas": "tf32",
    "void cutlass::Kernel2<cutlass_80_tensorop_s1688gemm_128x256_16x3_nn_align4>"
    "(cutlass_80_tensorop_s1688gemm_128x256_16x3_nn_align4::Params)": "tf32",
    f"sm80_xmma_gemm_f32f32_f32f32_f32_{TILE}_ffma_aligna4_alignc4_kernel__5x_cublas": "fp32",
    "nvjet_sm90_tst_192x192_64x4_2x1_v_bz_coopB_TNN": "bf16",
    "nvjet_sm90_tss_192x192_64x3_2x1_v_bz_coopB_splitK_NNN": "bf16",
    "nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NTT": "fp16",
    "ampere_sgemm_128x64_nn": "fp32",
    "volta_sgemm_128x128_nn": "fp32",
    "cudnn_infer_volta_scudnn_128x64_relu_medium_nn_v1": "fp32",
    "volta_h884cudnn_256x64_ldg8_relu_exp_small_nhwc_tn_v1": "fp16",
    "void cutlass::Kernel2<cutlass_80_simt_sgemm_256x128_8x4_nn_align1>"
    "(cutlass_80_simt_sgemm_256x128_8x4_nn_align1::Params)": "fp32",
}
ATTENTIONS = {
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1": "cudnn",
    "cudnn_generated_fort_native_sdpa_sm80_flash_fprop_wmma_f16_knob_3_64x64x128_4x1x1": "cudnn",
    "void cudnn::fusion::compute_dot_do_o_specialized<true, 128>(float*, int)": "cudnn",
    "void cudnn::fusion::convert_dq_to_16bits<true>(float*, int)": "cudnn",
    "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel<"
    "cutlass::bfloat16_t, cutlass::arch::Sm80, true, 64, 128, 128>::Params)": "efficient",
    "fmha_cutlassB_f32_aligned_64x64_k64_dropout_sm80(PyTorchMemEffAttention::Att...)": "efficient",
    f"void pytorch_flash::flash_bwd_convert_dq_kernel<{FLASH_TRAITS}>(pytorch_flash::Flas": "flash",
    f"void pytorch_flash::flash_fwd_splitkv_kernel<{FLASH_TRAITS}>": "flash",
    "void flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 128, 4, true>>(Params)": "flash",
    "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<"
    "flash::CollectiveMainloopFwdSm90<2, 128, cutlass::bfloat16_t, float>>>": "flash",
}
NEITHER = [
    "nvjet_qqtst_128x128_128x6_1x1_h_bz_TNN",
    "triton_tem_fused_mm_0",
    "triton_poi_fused_add_gelu_3",
    "sm89_xmma_gemm_e4m3bf16_e4m3f32_f32_tn_n_tilesize64x64x64_kernel__5x_cublas",
    "cutlass_80_tensorop_s1688bf16gemm_128x128_16x3_nn_align4",
    "void cublasLt::splitKreduce_kernel<(int)32, (int)16, int, float, __nv_bfloat16, float>",
    "void gemv2T_kernel_val<int, int, float, float, float, float, 128, 16, 4, 4, false>",
    "void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<cutlass::gemm::ker",
    "void cudnn::bn_fw_tr_1C11_kernel_NCHW<float, float, 512, true, 1, true>",
    "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<(unsigned long)4096>)",
    "Memcpy DtoD (Device -> Device)",
    "",
]


@pytest.mark.parametrize("name", MATMULS)
def test_matrix_products_tell_how_they_multiply(name):
    assert matmul_class(name) == MATMULS[name]
    assert attention_backend(name) is None


@pytest.mark.parametrize("name", ATTENTIONS)
def test_fused_attention_tells_its_backend(name):
    assert attention_backend(name) == ATTENTIONS[name]
    assert matmul_class(name) is None


@pytest.mark.parametrize("name", NEITHER)
def test_an_unclear_name_gives_none(name):
    assert matmul_class(name) is None and attention_backend(name) is None


NVJET = "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_bias_TNT"


def test_ops_tell_before_kernels():
    assert matmul_dtypes(None) == matmul_dtypes(Ran()) == {}
    mixed = Ran(matmul_dtypes={"float": 4, "c10::BFloat16": 219}, kernels={"sgemm": 3})
    assert matmul_dtypes(mixed) == {"fp32": 4, "bf16": 219}
    assert matmul_dtypes(Ran(matmul_dtypes={"float": 4}, matmul_precision="high")) == {"tf32": 4}
    assert matmul_dtypes(Ran(kernels={NVJET: 5, "triton_poi_fused_gelu_0": 9})) == {"bf16": 5}


def test_what_a_graph_replays_is_known_from_its_kernels():
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
