"""The price of a block under a save-list: the bytes that it keeps, and what backward computes again.

The activations are those of `activation_bytes.py`. Not every result that a list keeps is kept by the compiler: it drops
what backward has no use for. Eager mode keeps it, and computes again whatever stands before the last result that
backward needs. Nothing here needs torch.
"""

from dataclasses import dataclass

from titanlite.activation_checkpoint import operations as ops
from titanlite.activation_checkpoint.operations import CLASSES, OPERATIONS
from titanlite.activation_checkpoint.rules import BLOCK, BlockRules, Decision, add_unknown_layers, is_whole, kernels
from titanlite.config.problems import Problems
from titanlite.config.recipe_schema import SaveList
from titanlite.errors import Problem, RecipeError, describe
from titanlite.float8.scope import is_cast_from_bytes
from titanlite.forecast.activation_bytes import Activation, Layout, activations, attention, in_blocks, unit_bytes

_PRODUCTS = (ops.MATMUL, ops.SCALED_MATMUL, ops.BLOCK_SCALED_MATMUL)  # with no collective in them


@dataclass(frozen=True)
class Priced:
    """One activation under a save-list.

    Attributes:
        activation: what.
        decision: what the list says.
        held: bytes that stay until backward.
        again: whether backward computes it again.
    """

    activation: Activation
    decision: Decision
    held: int
    again: bool


@dataclass(frozen=True)
class BlockPrice:
    """What one block keeps and computes again in a micro-step.

    Attributes:
        whole: whether it runs without checkpointing.
        held: bytes that stay until backward, the block's input included.
        again: what backward computes again; nothing of a whole block.
    """

    whole: bool
    held: int
    again: tuple[Activation, ...]


def price(
    layout: Layout,
    save_list: SaveList,
    active: frozenset[int],
    window: int = 0,
    kernel: str | None = None,
) -> list[Priced]:
    """Apply a save-list to one block.

    Args:
        layout: of a rank.
        save_list: recomputes by default; `held_without_checkpointing` has what a block without rules holds.
        active: numbers of the rules that are for this block.
        window: tokens that its attention sees; 0: all.
        kernel: of attention that torch chooses on the device; None: the one that the list names.

    Raises:
        RecipeError: attention is kept without the matmuls that its q, k and v come from.
    """
    kernel = kernel or kernels(save_list)[0]
    rules, listed = BlockRules(save_list, active, layout.block.layers), activations(layout, window)
    decided = [(a, rules.decide(kernel if a.op == ops.ATTENTION else a.op, to_float8=a.op == ops.CAST)) for a in listed]
    kept = {(a.op, a.layer) for a, decision in decided if decision.action == "save"}
    priced: list[Priced] = []
    for activation, decision in decided:
        saved = decision.action == "save"
        if layout.compiled:
            used = _is_used(activation, kept, layout)
            unused = 0 if _product_runs_again(activation.layer, kept, layout) else activation.for_product
            held = (activation.bytes - unused) * (saved and used)
            priced.append(Priced(activation, decision, held, used and not saved))
        else:
            runs_again = not saved and not _is_tail(activation, layout)
            priced.append(Priced(activation, decision, activation.bytes * saved, runs_again))
    return priced


def without_price(save_list: SaveList) -> list[Problem]:
    """Why what a list keeps has no price; nothing if it has one.

    Args:
        save_list: the list.
    """
    problems: list[Problem] = []
    if save_list.default == "save" and save_list.rules:
        want = '"recompute": what is kept without being named depends on the compiler, and has no price'
        problems.append(Problem("default", '"save"', want, 'default = "recompute", and rules for what to keep'))
    for i, rule in enumerate(save_list.rules):
        if rule.action == "save" and rule.op not in (BLOCK, *CLASSES, *OPERATIONS):
            want = "a class, or an operation of one: what others make has no price"
            fix = f"name a class: {', '.join(CLASSES)}; or train a few steps and read memory_gib"
            problems.append(Problem(f"rules[{i}].op", f'"{rule.op}"', want, fix))
    return problems


def block_prices(layout: Layout, save_list: SaveList) -> list[BlockPrice]:
    """Price each block of a model under a save-list.

    Args:
        layout: of a rank.
        save_list: the list.

    Returns:
        One for each block, in the order in which they run.

    Raises:
        RecipeError: the list keeps what it does not name, what is not known of blocks, or attention without its q, k
            and v; it names a layer that blocks do not have; or nothing is known of the model's blocks.
    """
    if layout.unpriced:
        raise RecipeError(describe("config", [layout.unpriced]))
    problems = Problems(save_list.origin)
    for why in without_price(save_list):
        problems.add(why.where, why.saw, why.want, why.fix)
    add_unknown_layers(save_list, layout.block.layers, problems)
    problems.raise_all(RecipeError)
    priced: dict[tuple[frozenset[int], int], BlockPrice] = {}
    out: list[BlockPrice] = []
    for active, window in zip(save_list.active(layout.dims.n_layers), layout.dims.windows, strict=True):
        if (active, window) not in priced:
            priced[active, window] = _block_price(layout, save_list, active, window)
        out.append(priced[active, window])
    return out


def _block_price(layout: Layout, save_list: SaveList, active: frozenset[int], window: int) -> BlockPrice:
    if is_whole(save_list, active):
        return BlockPrice(True, held_without_checkpointing(layout), ())
    parts = price(layout, save_list, active, window)
    held = layout.block_input + sum(p.held for p in parts)
    return BlockPrice(False, held, tuple(p.activation for p in parts if p.again))


def held_without_checkpointing(layout: Layout) -> int:
    """Bytes that a block without rules holds for backward, its input included where it is kept.

    Eager mode holds what the gradient of each operation uses; the compiler computes elementwise results again.

    Args:
        layout: of a rank.
    """
    dims, M, t, e = layout.dims, layout.tokens, layout.tensor_parallel, layout.itemsize
    D, F, HE, block, rows = dims.dim, dims.ffn_dim, dims.n_heads * dims.head_width, layout.block, M // t
    attended = _attention_inside(layout) + attention(layout).bytes
    gate = e * M * block.gate_width * F // t  # its input
    inputs = sum(_kept_input(*of, layout) for of in zip(block.layers, (D, HE // t, D, F // t), strict=True))
    norm = 4 * rows + layout.block_input  # root mean squares, and what they are of
    if block.layer_norms:  # with the means; or, where nothing is computed again, two float32 tensors
        norm = 4 * rows + (4 * rows + layout.block_input if layout.compiled else 2 * 4 * rows * D)
    if block.gate == "geglu" and not layout.compiled:  # `swiglu` has a gradient of its own
        gate = 3 * 4 * M * F // t
    return block.norms * norm + attended + gate + inputs


def _attention_inside(layout: Layout) -> int:
    """Bytes of attention's operands, and of the output of `wqkv` behind them, that a block without rules holds."""
    dims, M, t, e = layout.dims, layout.tokens, layout.tensor_parallel, layout.itemsize
    H, K, E = dims.n_heads, dims.n_kv_heads, dims.head_width
    # v is a part of that output, and q and k once rotated are not.
    return e * M * (H + 2 * K) * E // t + (e * M * (H + K) * E // t if layout.block.is_rotary else 0)


def _kept_input(layer: str, K: int, layout: Layout) -> int:
    """Bytes of a layer's input [M, K] that a block without rules holds for the gradient of its weight."""
    _, wo, _, w2 = layout.block.layers
    if _is_kept_cast(layer, layout):
        return layout.tokens * K + unit_bytes(layout.tokens, layout)
    is_attentions = layer == wo  # attention's output, which it keeps itself
    if layout.float8 is not None and layout.is_by_blocks(layer) and layout.float8.input.grad_weight != "none":
        is_cast_later = layout.compiled and is_attentions and not layout.is_float8(layer)  # forward has no use for it
        return 0 if is_cast_later else in_blocks(layout.tokens, K, layout.float8.input.grad_weight)
    if is_attentions or (layer == w2 and layout.is_joined(w2)):
        return 0  # kept anyway; made anew of what w13 has made
    if layout.compiled and layout.casts_anew(layer):
        # What it is cast of is elementwise; but as SwiGLU's gradient is an operator, its result is not formed again,
        # and the cast by column is kept with its maxima.
        return (layout.tokens + layout.itemsize) * K if layer == w2 and layout.block.gate == "swiglu" else 0
    return layout.itemsize * layout.tokens * K


def _is_kept_cast(layer: str, layout: Layout) -> bool:
    """Whether the gradient of a layer's weight is made of the bytes that forward multiplied."""
    _, wo, _, w2 = layout.block.layers
    if layout.float8 is None or not layout.is_own(layer) or (layer == w2 and layout.is_joined(layer)):
        return False
    scatters = layer in (wo, w2)
    return is_cast_from_bytes(layout.float8, parallel=layout.is_fused(layer) and scatters)


def _is_used(activation: Activation, kept: set[tuple[str, str]], layout: Layout) -> bool:
    """Whether backward has a use for a result if it has those that are kept."""
    op, layer = activation.op, activation.layer
    wqkv, _, w13, _ = layout.block.layers
    if layout.is_only_added(layer) and op in (*_PRODUCTS, ops.SCATTER, ops.MATMUL_SCATTER):
        return False
    if op in _PRODUCTS:
        return (ops.SCATTER, layer) not in kept
    if op == ops.CAST_BLOCKS and not layout.is_float8(layer):
        return False  # forward has no use for it, so that a compiler casts in backward
    if op == ops.CAST_BLOCKS and activation.bytes > activation.for_product:
        return True
    if op in (ops.AMAX, ops.MAX, ops.MAX_OF_RANKS, ops.CAST, ops.CAST_BLOCKS, ops.SWIGLU_CAST):
        is_gathered = layer in (wqkv, w13) and layout.is_fused(layer)  # what is kept is what was gathered
        if _is_kept_cast(layer, layout) and not is_gathered:
            return True
        return _product_runs_again(layer, kept, layout)
    return True


def _product_runs_again(layer: str, kept: set[tuple[str, str]], layout: Layout) -> bool:
    """Whether the output of a layer is computed once more."""
    products = (ops.MATMUL, ops.BLOCK_SCALED_MATMUL, ops.SCATTER, ops.GATHER_MATMUL, ops.MATMUL_SCATTER)
    return not (layout.is_only_added(layer) or any((op, layer) in kept for op in products))


def _is_tail(activation: Activation, layout: Layout) -> bool:
    """Whether eager mode ends recomputation before it: a matmul of torch's own hands its operands on as it begins."""
    is_plain = activation.layer not in layout.converted
    ends = activation.op == ops.SCATTER or (activation.op == ops.MATMUL and is_plain)
    return ends and layout.is_only_added(activation.layer)
