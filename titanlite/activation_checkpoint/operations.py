"""The operations of blocks, except elementwise ones, and the classes that rules name."""

ATTENTION = "aten._scaled_dot_product_cudnn_attention.default"  # one of several kernels; torch chooses
PIECE_ATTENTION = "titanlite.attention.default"
CONTEXT_ATTENTION = "titanlite.context_attention.default"
CONTEXT_ATTENTION_GRAD = "titanlite.context_attention_grad.default"  # in backward
OWN_ATTENTION = (PIECE_ATTENTION, CONTEXT_ATTENTION)
"""titanlite's attention operators. Their last two arguments are the tokens of a sample, and the attention window."""
MATMUL = "aten.mm.default"
SCALED_MATMUL = "titanlite.scaled_matmul.default"
BLOCK_SCALED_MATMUL = "titanlite.block_scaled_matmul.default"
GATHER = "_c10d_functional.all_gather_into_tensor.default"
SCATTER = "_c10d_functional.reduce_scatter_tensor.default"
GATHER_FROM_RANKS = "titanlite.gather_from_ranks.default"
WINDOWS = ("titanlite.combine_windows_at_owners.default", "titanlite.window_gradients_at_owners.default")
"""Operations that compute the rows of experts beyond the first window: of forward, and of backward."""
RESULTS_TO_OWNERS = ("titanlite.combine_at_owners.default", WINDOWS[0])
TO_OWNERS = (*RESULTS_TO_OWNERS, "titanlite.gradients_at_owners.default", WINDOWS[1])  # the last two in backward
GATHER_MATMUL = "titanlite.all_gather_matmul.default"
MATMUL_SCATTER = "titanlite.matmul_reduce_scatter.default"
MEAN, AMAX, MAX = "aten.mean.dim", "aten.amax.default", "aten.max.default"
MAX_OF_RANKS = "_c10d_functional.all_reduce.default"
CAST = "aten._to_copy.default"
GROUPED_MATMUL, SCALED_GROUPED_MATMUL = "titanlite.grouped_matmul.default", "titanlite.scaled_grouped_matmul.default"
GATHER_ROWS, SPREAD_ROWS = "titanlite.gather_rows.default", "titanlite.spread_rows.default"
SWIGLU_CAST, CAST_BLOCKS = "titanlite.swiglu_cast.default", "titanlite.cast_blocks.default"
EXPERT_GATE_CAST = "titanlite.expert_gate_cast.default"
COUNT_CHOICES = "titanlite.count_choices.default"
EXPERT_ROWS = ("titanlite.expert_rows.default", "titanlite.expert_rows_for_host.default")

CLASSES: dict[str, tuple[str, ...]] = {
    "attention": (
        ATTENTION,
        "aten._scaled_dot_product_flash_attention.default",
        "aten._scaled_dot_product_efficient_attention.default",
        "aten._scaled_dot_product_fused_attention_overrideable.default",
        "aten._scaled_dot_product_attention_math.default",
        "aten._scaled_dot_product_flash_attention_for_cpu.default",
        *OWN_ATTENTION,
    ),
    "matmul": (
        *(MATMUL, "aten.addmm.default", "aten._scaled_mm.default", "aten._scaled_mm_v2.default"),
        *(SCALED_MATMUL, BLOCK_SCALED_MATMUL),
    ),
    "communication": (GATHER, SCATTER),
    "statistics": (MEAN, AMAX, MAX, MAX_OF_RANKS),
    "cast": (CAST, SWIGLU_CAST, CAST_BLOCKS, EXPERT_GATE_CAST),
    "experts": (GROUPED_MATMUL, SCALED_GROUPED_MATMUL),
    "dispatch": (GATHER_ROWS, SPREAD_ROWS, GATHER_FROM_RANKS, *RESULTS_TO_OWNERS),
    "route": (
        *("titanlite.router_logits.default", "titanlite.route.default", *EXPERT_ROWS),
        *(COUNT_CHOICES, "titanlite.count_routing.default"),
    ),
}
"""The operations of each class. "statistics" are mean squares of norms, and maxima for float8 scales, also over ranks.
"cast" is a cast to float8. "dispatch" sends tokens to experts and results back, also among ranks. Operations that are
not listed are recomputed unless a rule names them."""

ALWAYS_KEPT = "route"
"""The class whose results are always kept, so that tokens are routed and counted only once."""

WIDER = {"experts": "matmul"}
"""Class → a wider class whose rules include it. The first rule that names one of the two decides."""

EXCHANGES = (GATHER_FROM_RANKS, *TO_OWNERS)
"""Collectives of expert parallelism: they send tokens to experts, and rows back to the owners of tokens."""

MAKE_ROWS = (
    *(GROUPED_MATMUL, SCALED_GROUPED_MATMUL, GATHER_ROWS, EXPERT_GATE_CAST),
    *(f"titanlite.{name}.default" for name in ("expert_gate", "expert_gate_grad", "expert_gate_grad_cast")),
)
"""Operations whose results are rows of experts."""

GRADIENTS_OF_EXPERTS = ("titanlite.grouped_weight_gradient.default", "titanlite.scaled_grouped_gradient.default")
"""Operations of backward that compute the weight gradients of experts; rules do not apply to them. The first takes R
rows, [R, N] and [R, K]; the second takes transposed operands."""

FUSED = {GATHER_MATMUL: ("communication", "matmul"), MATMUL_SCATTER: ("matmul", "communication")}
"""The two classes of each fused operation, in the order in which they run. Rules for either apply. The result is kept
if a rule keeps one of the two, except that a kept gather does not keep the product."""

CLASS_OF = {op: name for name, ops in CLASSES.items() for op in ops}
"""The class of each operation in `CLASSES`."""

OPERATIONS = (*CLASS_OF, *FUSED)
"""All operations that have a class or are fused."""
