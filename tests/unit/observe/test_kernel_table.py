import re

import pytest

from titanlite.observe.kernel_table import kernel_class, kernel_table


def kernel(name, start, end, stream=7, cat="kernel"):
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": end - start, "tid": stream, "args": {}}


def ms(table, name):
    """The first number of the row that ends with `name`."""
    (row,) = [line for line in table.splitlines() if line.endswith(name)]
    return float(row.split()[0])


def test_classes_gaps_idle_and_exposed_communication():
    start = 1.7e15  # real traces count microseconds since 1970
    events = [
        kernel("nvjet_tst_128x256", start, start + 4000),
        kernel("ncclDevKernel_AllGather", start + 3000, start + 6000, stream=20),  # 2000 of 3000 in the open
        kernel("triton_poi_fused_mul", start + 7000, start + 8000),  # after a gap of 1000
        kernel("flash_fwd_kernel", start + 8500, start + 10_000),  # after a gap of 500
        kernel("Memcpy", start + 100, start + 300, stream=21, cat="gpu_memcpy"),
        kernel("Memset", start + 300, start + 400, stream=21, cat="gpu_memset"),
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": start, "dur": 9999, "tid": 1},
        {"ph": "X", "cat": "gpu_user_annotation", "name": "ProfilerStep#1", "ts": start, "dur": 10_000, "tid": 7},
        {"ph": "M", "name": "process_name"},
    ]
    table = kernel_table({"traceEvents": events[::-1]}, steps=2)
    assert table.startswith("2 steps, wall time per step 5.000 ms\n")
    assert ms(table, "  matmul") == 2.0
    assert ms(table, "  communication") == 1.5
    assert ms(table, "  attention") == 0.75
    assert ms(table, "  idle") == 0.75
    assert ms(table, "that nothing hides") == 1.0
    gaps = table.split("the longest gaps\n")[1].split("\n\n")[0].splitlines()
    assert [re.sub(" +", " ", gap.strip()) for gap in gaps] == [
        "1000.0 ncclDevKernel_AllGather -> triton_poi_fused_mul",
        "500.0 triton_poi_fused_mul -> flash_fwd_kernel",
    ]
    rows = table.rsplit(" kernel\n", 1)[1].splitlines()
    assert [row.split()[-1] for row in rows] == [
        "nvjet_tst_128x256",
        "ncclDevKernel_AllGather",
        "flash_fwd_kernel",
        "triton_poi_fused_mul",
        "Memcpy",
        "Memset",
    ]
    assert rows[0].split() == ["2.000", "0.5", "40.0%", "matmul", "nvjet_tst_128x256"]


def test_operators_of_a_cpu_count_their_self_time():
    events = [
        kernel("aten::linear", 0, 100, cat="cpu_op"),
        kernel("aten::t", 0, 10, cat="cpu_op"),
        kernel("aten::addmm", 10, 90, cat="cpu_op"),
        kernel("aten::copy_", 20, 30, cat="cpu_op"),
        kernel("aten::mm", 50, 150, stream=8, cat="cpu_op"),  # backward runs in a thread of its own
    ]
    step = kernel("ProfilerStep#1", 0, 200, cat="user_annotation")
    table = kernel_table({"traceEvents": [step, *reversed(events)]}, steps=1)
    assert table.startswith("1 steps, wall time per step 0.150 ms\n")
    assert ms(table, "aten::linear") == 0.010
    assert ms(table, "aten::addmm") == 0.070
    assert ms(table, "aten::mm") == 0.100
    assert ms(table, "  idle") == 0.0


def test_an_operator_does_not_hide_the_communication_that_it_calls():
    events = [
        kernel("step", 0, 1000, cat="cpu_op"),
        kernel("c10d::allreduce_", 100, 500, cat="cpu_op"),
        kernel("aten::mm", 300, 400, stream=8, cat="cpu_op"),  # in another thread
    ]
    table = kernel_table({"traceEvents": events}, steps=1)
    assert ms(table, "that nothing hides") == 0.3
    assert ms(table, "  step") == 0.6
    assert ms(table, "  idle") == 0.0


def test_forty_rows_and_names_that_fit():
    events = [kernel(f"k{i}" + "<float>" * 100, i, i + 1) for i in range(60)]
    table = kernel_table({"traceEvents": events}, steps=1)
    assert len(table.rsplit(" kernel\n", 1)[1].splitlines()) == 40
    assert max(map(len, table.splitlines())) < 170
    table = kernel_table(
        {"traceEvents": [kernel("void at::native::(anonymous namespace)::fill<float>", 0, 1)]}, steps=1
    )
    assert table.endswith("other         fill<float>\n")


def test_an_empty_trace_says_so():
    assert "no kernels" in kernel_table({"traceEvents": []}, steps=1)


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
        ("_norm_rope", "triton"),
        ("_norm_rope_grad", "triton"),
        ("_rotated_heads_grad", "triton"),
        ("_rms_norm_grad", "triton"),
        ("_add_parts", "triton"),
        ("_route", "triton"),
        ("_expert_places", "triton"),
        ("_combine_rows", "triton"),
        ("_expert_gate_grad", "triton"),
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
        ("_attention_of_documents", "attention"),
        ("_attention_grad_of_keys", "attention"),
        ("_attention_row_dots", "attention"),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "communication"),
        ("gloo:all_gather", "communication"),
        ("meet", "communication"),
        ("_meet", "communication"),
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
