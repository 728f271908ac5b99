"""Names as they stand in traces of real runs."""

import json

import pytest

from steplab.trace.categories import CATEGORIES, kernel_category, op_category

BF16 = json.dumps(["c10::BFloat16", "c10::BFloat16"])
FP32 = json.dumps(["float", "float"])
AUTOCAST_ADDMM = json.dumps(["float", "c10::BFloat16", "c10::BFloat16", "Scalar", "Scalar"])
VECTOR = "void at::native::vectorized_elementwise_kernel<4, at::native::"

BY_NAME = {
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_cublas": "matmul bf16",
    "sm80_xmma_gemm_f32f32_tf32f32_f32_tn_n_tilesize64x64x8_kernel__5x_cublas": "matmul tf32",
    "ampere_sgemm_128x64_nn": "matmul fp32 simt",
    "volta_scudnn_128x64_stridedB_splitK_xregs_large_nn_v1": "matmul fp32 simt",
    "volta_scudnn_winograd_128x128_ldg1_ldg4_relu_tile148t_nt_v1": "matmul other",
    "void dpsk::ep::internode::combine<false, 8, __nv_bfloat16>(int4*, float*)": "communication",
    "void deep_ep::intranode::dispatch<8, 768, 8192>(int4*, float*)": "communication",
    "void at::native::(anonymous namespace)::max_pool_backward_nchw<float, float>": "reduction",
    "void fbgemm_gpu::permute_2D_data_kernel<false, int, int>(int)": "sort and index",
    "void (anonymous namespace)::store_kvcache<2048l, 4>(StoreKVCacheParams)": "copy",
    "nvjet_tst_192x192_64x4_1x1_h_bz_coopB_TNN": "matmul bf16",
    "nvjet_sm100_hsh_64x32_64x16_2x1_2cta_v_bz_TNT": "matmul fp16",
    "nvjet_qqtst_128x256_128x6_2x1_2cta_v_bz_TNT": "matmul fp8",
    "nvjet_sss_128x256_32x4_TNT": "matmul other",
    "triton_tem_fused_mm_0": "matmul other",
    "void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<cutlass::gemm::kernel"
    "::GemmUniversal<cutlass::gemm::GroupProblemShape, cutlass::bfloat16_t>>>": "matmul bf16",
    "void pytorch_flash::flash_bwd_kernel<Flash_bwd_kernel_traits<64>>(Params)": "attention flash",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7": "attention cudnn",
    "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(Params)": "attention efficient",
    "triton_tem_fused_flex_attention_0": "attention triton",
    "_attn_fwd": "attention triton",
    "fmhaSm100aKernel_QkvE4m3OBfloat16H64PagedKvCausal": "attention other",
    "void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<float>": "normalization",
    "void at::native::(anonymous namespace)::cuComputeGradGammaBeta<float>": "normalization",
    "triton_per_fused__fused_rms_norm_add_3": "normalization",
    "triton_red_fused_add_mean_mul_pow_rsqrt_0": "normalization",
    "void (anonymous namespace)::softmax_warp_forward<c10::BFloat16, float, 3>": "softmax",
    "void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, float>": "softmax",
    "void at::native::(anonymous namespace)::nll_loss_forward_reduce_cuda_kernel_2d": "softmax",
    "triton_red_fused__log_softmax_nll_loss_forward_12": "softmax",
    VECTOR + "BinaryFunctor<float, float, float, MulFunctor<float>>>": "elementwise",
    VECTOR + "masked_fill_kernel(TensorIterator&)::{lambda()#1}>": "elementwise",
    "void at::native::(anonymous namespace)::elementwise_kernel_with_index<int>": "elementwise",
    "void fbgemm_gpu::split_embedding_codegen_forward_unweighted_kernel<float>": "embedding",
    "_kernel_quantize_fp8_row fbgemm_gpu": "elementwise",
    "void cutlass::Kernel2<fbgemm_gpu::bf16_gemm_tn>": "matmul bf16",
    "void cudnn::detail::dgrad_engine<float, 512, 6, 5, 3, 3, 3, false>(int, int)": "matmul other",
    "void vllm::rotary_embedding_kernel<c10::BFloat16, true>(long const*)": "elementwise",
    "triton_poi_fused_add_gelu_3": "elementwise",
    "triton_poi_fused_0": "elementwise",
    "void at::native::reduce_kernel<512, 1, ReduceOp<float, MeanOps<float>>>": "reduction",
    "triton_red_fused_sum_1": "reduction",
    "void at::native::multi_tensor_apply_kernel<TensorListMetadata<1>, LpNormFunctor<float>>":
    "reduction",
    "void at::native::elementwise_kernel<128, 4, gpu_kernel_impl_nocast<direct_copy_kernel_cuda>":
    "copy",
    "void at::native::(anonymous namespace)::CatArrayBatchedCopy<OpaqueType<2u>>": "copy",
    "triton_poi_fused_clone_transpose_2": "copy",
    "triton_poi_fused__to_copy_1": "copy",
    "Memcpy HtoD (Pinned -> Device)": "copy",
    "Memset (Device)": "memset",
    VECTOR + "FillFunctor<float>, std::array<char*, 1ul>>": "memset",
    "void at::native::multi_tensor_apply_kernel<FusedOptimizerTensorListMetadata<4>, "
    "FusedAdamMathFunctor<float, 4, ADAMW>>": "optimizer",
    "triton_for_fused_7": "optimizer",
    "void at::native::(anonymous namespace)::indexSelectLargeIndex<float, long>": "embedding",
    "void at::native::(anonymous namespace)::embedding_backward_feature_kernel<float>": "embedding",
    "void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<Policy>": "sort and index",
    "void at::native::(anonymous namespace)::indexing_backward_kernel<long>": "sort and index",
    "void at::native::vectorized_gather_kernel<16, long>(char*)": "sort and index",
    "void at::native::_scatter_gather_elementwise_kernel<128, 8>": "sort and index",
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "communication",
    "activation_backward_kernel": "elementwise",
    "adamw_kernel": "optimizer",
    "small_adamw_kernel": "optimizer",
    "add_segments_kernel": "reduction",
    "attention_dkdv_kernel": "attention triton",
    "ema_outputs_kernel": "reduction",
    "find_segments_kernel": "sort and index",
    "gather_sum_kernel": "sort and index",
    "gradient_tiles_kernel": "softmax",
    "loss_rows_kernel": "softmax",
    "rms_norm_backward_kernel": "normalization",
    "stream_rms_norm_rows_kernel": "normalization",
    "rotary_kernel": "elementwise",
    "router_softmax_kernel": "softmax",
    "routing_place_kernel": "sort and index",
    "some_kernel_of_nobody": "other",
    "": "other",
}  # fmt: skip


@pytest.mark.parametrize("name", BY_NAME)
def test_a_kernels_name_tells_its_category(name):
    assert kernel_category(name) == BY_NAME[name]


@pytest.mark.parametrize(
    ("kernel", "op", "dtypes", "category"),
    [
        ("nvjet_tst_192x192_TNN", "aten::mm", BF16, "matmul bf16"),
        ("nvjet_sss_128x256_TNT", "aten::mm", FP32, "matmul tf32"),
        ("nvjet_tst_64x8_TNT", "aten::addmm", AUTOCAST_ADDMM, "matmul bf16"),
        ("triton_tem_fused_mm_0", "triton_tem_fused_mm_0", BF16, "matmul bf16"),
        ("triton_tem_fused_mm_0", "triton_tem_fused_mm_0", FP32, "matmul other"),
        ("void gemv2T_kernel_val<int, int, float, float, float>", "aten::mv", FP32,
         "matmul fp32 simt"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>", "aten::mm", BF16,
         "matmul bf16"),
        ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", "aten::mm", FP32,
         "matmul other"),
        # Somebody's operator may cast its inputs: the kernel's own name counts.
        ("bmm_MxE4m3_MxE2m1MxE4m3_Fp32_t128x16x256", "vllm::moe_forward", BF16, "matmul fp8"),
        ("attn_fwd", "aten::_flash_attention_forward", BF16, "attention flash"),
        ("unknown_kernel", "aten::_softmax", BF16, "softmax"),
        # What FSDP does before an all-gather of its parameters.
        ("void multi_tensor_apply_kernel<at::native::Copy<float, float>>", "aten::_foreach_copy_",
         "", "copy"),
        ("unknown_kernel", "aten::bmm", BF16, "matmul bf16"),
    ],
)  # fmt: skip
def test_the_operator_tells_what_the_name_hides(kernel, op, dtypes, category):
    assert kernel_category(kernel, op, dtypes) == category


@pytest.mark.parametrize(
    ("op", "dtypes", "category"),
    [
        ("aten::mm", FP32, "matmul fp32 simt"),
        ("aten::bmm", BF16, "matmul bf16"),
        ("aten::addmm", AUTOCAST_ADDMM, "matmul bf16"),
        ("mkldnn::_linear_pointwise", FP32, "matmul fp32 simt"),
        ("aten::mm", "", "matmul other"),
        ("aten::mm", json.dumps(["double", "double"]), "matmul other"),
        ("aten::linear", FP32, "other"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu", FP32, "attention flash"),
        ("aten::_scaled_dot_product_flash_attention_for_cpu_backward", FP32, "attention flash"),
        ("aten::native_layer_norm_backward", FP32, "normalization"),
        ("aten::_log_softmax", FP32, "softmax"),
        ("aten::add_", FP32, "elementwise"),
        ("aten::threshold_backward", FP32, "elementwise"),
        ("aten::sum", FP32, "reduction"),
        ("aten::copy_", FP32, "copy"),
        ("aten::_fused_adamw_", "", "optimizer"),
        ("aten::_foreach_addcdiv_", "", "optimizer"),
        ("aten::_foreach_norm", "", "reduction"),
        ("aten::embedding_dense_backward", "", "embedding"),
        ("aten::index_put_", "", "sort and index"),
        ("c10d::allreduce_", "", "communication"),
        ("cpp_fused_add_mul_0", "", "elementwise"),
        ("aten::view", "", "other"),
        ("autograd::engine::evaluate_function: MmBackward0", "", "other"),
    ],
)
def test_operators_of_a_cpu(op, dtypes, category):
    assert op_category(op, dtypes) == category


def test_every_answer_is_a_known_category():
    assert set(BY_NAME.values()) == set(CATEGORIES)
    assert len(set(CATEGORIES)) == len(CATEGORIES) == 22
