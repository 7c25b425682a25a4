import pytest

from titanlite.observe.kernel_classes import cpu_work, kernel_class


def operator(name, start, end, thread=7):
    return {"ph": "X", "cat": "cpu_op", "name": name, "ts": start, "dur": end - start, "tid": thread}


def test_an_operator_of_a_cpu_has_the_times_of_none_of_its_callees():
    events = [
        operator("aten::linear", 0, 100),
        operator("aten::t", 0, 10),
        operator("aten::addmm", 10, 90),
        operator("aten::copy_", 20, 30),
        operator("aten::mm", 50, 150, thread=8),  # backward runs in a thread of its own
    ]
    step = operator("ProfilerStep#1", 0, 200) | {"cat": "user_annotation"}
    found = {work.name: work for work in cpu_work({"traceEvents": [step, *reversed(events)]})}
    totals = {name: sum(end - start for start, end in work.times) for name, work in found.items()}
    assert totals == {"aten::linear": 10, "aten::t": 10, "aten::addmm": 70, "aten::copy_": 10, "aten::mm": 100}
    assert (found["aten::copy_"].caller, found["aten::mm"].caller) == ("aten::addmm", "")
    assert cpu_work({"traceEvents": []}) == []


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64", "matmul"),
        ("void cutlass::device_kernel<...GemmUniversal...>", "matmul"),
        ("aten::mm", "matmul"),
        ("aten::_scaled_mm", "matmul"),
        ("aten::comm", "other"),
        ("triton_red_fused_abs_amax_scaled_matmul_silu_0", "triton"),
        ("_swiglu_grad_rows", "triton"),
        ("_cross_entropy_statistics", "triton"),
        ("_norm_rope", "triton"),
        ("_norm_rope_grad", "triton"),
        ("_expert_gate_grad", "triton"),
        ("_rotated_heads_grad", "triton"),
        ("_rms_norm_grad", "triton"),
        ("_add_parts", "triton"),
        ("_route", "triton"),
        ("_expert_places", "triton"),
        ("_combine_rows", "triton"),
        ("_aligned_rows", "triton"),
        ("_grouped_matmul", "matmul"),
        ("_grouped_weight_gradient", "matmul"),
        ("_cast_transpose", "triton"),
        ("_cast_blocks", "triton"),
        ("_adamw", "optimizer"),
        ("gather_matmul", "matmul"),
        ("void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<cutlass::bfloat16_t>", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", "attention"),
        ("void cudnn::fusion::compute_dot_do_o_specialized<true, 128>(void const*)", "attention"),
        ("_attention_grad_of_keys", "attention"),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication"),
        ("gloo:all_gather", "communication"),
        ("_meet", "communication"),
        ("meet", "communication"),
        ("_add_shards", "communication"),
        ("Memcpy PtoP (Device -> Device)", "communication"),
        ("all_gather_matmul_kernel", "matmul"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor>", "optimizer"),
        ("triton_red_fused_add_mean_3", "triton"),
        ("_add_rms_norm_kernel", "triton"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor>", "other"),
        ("Memcpy HtoD (Pinned -> Device)", "other"),
    ],
)
def test_classes_by_name(name, kind):
    assert kernel_class(name) == kind
