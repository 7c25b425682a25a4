"""The price list of a block: what each of its activations weighs, and what it costs to compute it again.

Formulas of shapes, for one rank and one forward pass. `titanlite plan` shows them, and tests hold them against what a
block really keeps (`tests/parallel/test_activation_bytes.py`). Elementwise results have no price: no list may keep
them, so that they are always computed again.

    t ranks share a layer, M tokens, e bytes an element   wqkv  [M, (H + 2K)·E/t]     w13  [M, 2F/t], w1 [M, F/t]
    attention  [M, H·E/t] and 4 bytes a head and token    wo    [M, D], [M/t, D] once scattered; w2 the same

What differs among architectures is in `config/architectures.py`, and of a model of the user's own in its recipe. A
trace would know it too; but it needs torch, a process group and the compiler, a second for each list and layout.

Not every result that a list keeps is kept by the compiler: it drops what backward has no use for. Eager mode keeps it,
and computes again whatever stands before the last result that backward needs.

Axes as in `models/llama3.py`. Nothing here needs torch.
"""

from dataclasses import dataclass, field

from titanlite.config.architectures import block_of, unpriced
from titanlite.config.build import show
from titanlite.config.problems import Problems
from titanlite.config.recipe_schema import (
    BLOCKS,
    Block,
    Float8Recipe,
    Granularity,
    ModelRecipe,
    SaveList,
    twice_attended,
)
from titanlite.config.schema import Config
from titanlite.errors import Problem, RecipeError, describe
from titanlite.float8.scope import is_by_blocks_of_128, is_cast_from_bytes, joins_feed_forward, left_alone, obstacle
from titanlite.parallel.save_rules import (
    BLOCK,
    CLASSES,
    OPERATIONS,
    BlockRules,
    Decision,
    add_unknown_layers,
    is_whole,
    kernels,
)

HEAD = "output"
"""The linear layer behind the blocks."""

_WINDOW = "titanlite.window_attention.default"
_ATTENTION, _MATMUL = CLASSES["attention"][0], CLASSES["matmul"][0]
_SCALED_MATMUL = "titanlite.scaled_matmul.default"
_BLOCK_MATMUL = "titanlite.block_scaled_matmul.default"
_PLAIN = (_MATMUL, _SCALED_MATMUL, _BLOCK_MATMUL)  # with no collective in it
_GATHER, _SCATTER = CLASSES["communication"]
_MEAN, _AMAX, _MAX, _MAX_OF_RANKS = CLASSES["statistics"]
_CAST, _SWIGLU_CAST, _CAST_BLOCKS = CLASSES["cast"]
_GATHER_MATMUL, _MATMUL_SCATTER = "titanlite.all_gather_matmul.default", "titanlite.matmul_reduce_scatter.default"


@dataclass(frozen=True)
class Layout:
    """How one rank runs a model.

    Attributes:
        sizes: the model's dimensions.
        tokens: M, of a micro-step of this data-parallel rank.
        seq_len: S.
        tensor_parallel: t.
        itemsize: e, bytes of an element of the compute dtype.
        compiled: whether blocks are compiled.
        fused: whether the collectives of tensor parallelism are fused into matmuls where they can be.
        float8: the arithmetic of the layers in `converted`.
        converted: linear layers that compute in float8, of one block at least, and `HEAD` if it does.
        block: what blocks are made of.
        unpriced: why blocks have no price, or None: `block` is not theirs, or they do not compute alike.
    """

    sizes: ModelRecipe
    tokens: int
    seq_len: int
    tensor_parallel: int = 1
    itemsize: int = 2
    compiled: bool = True
    fused: bool = False
    float8: Float8Recipe | None = None
    converted: tuple[str, ...] = ()
    block: Block = field(default_factory=Block)
    unpriced: Problem | None = None

    @property
    def block_input(self) -> int:
        """Bytes of the residual stream, [M/t, D], which every checkpointed block keeps."""
        return self.itemsize * self.tokens // self.tensor_parallel * self.sizes.dim

    def is_windowed(self, window: int) -> bool:
        """Whether attention is to a window that is shorter than the sequence."""
        return 0 < window < self.seq_len

    def is_float8(self, layer: str) -> bool:
        """Whether the output of a layer is a product in float8."""
        return self.float8 is not None and layer in self.converted and self.float8.input.output != "none"

    def is_own(self, layer: str) -> bool:
        """Whether titanlite's own products carry a layer out in float8, not torchao."""
        return self.float8 is not None and layer in self.converted and obstacle(self.float8) is None

    def casts_anew(self, layer: str) -> bool:
        """Whether torchao casts the input of a layer once more for the gradient of its weight."""
        if self.float8 is None or layer not in self.converted or self.is_own(layer) or self.is_by_blocks(layer):
            return False
        return self.float8.input.grad_weight != "none"

    def is_by_blocks(self, layer: str) -> bool:
        """Whether a layer's operands are cast by blocks; GPUs without such products keep more."""
        return self.float8 is not None and layer in self.converted and is_by_blocks_of_128(self.float8)

    def is_emulated(self, layer: str) -> bool:
        """Whether a layer's products are emulated on every device, in float32."""
        if self.float8 is None or layer not in self.converted:
            return False
        return self.float8.has_blocks and not is_by_blocks_of_128(self.float8)

    def is_fused(self, layer: str) -> bool:
        """Whether the collective of a layer and its matmul are one operation."""
        return self.fused and (layer not in self.converted or self.is_own(layer))

    def reduces_amax(self, layer: str) -> bool:
        """Whether the maximum of a layer's input is reduced over the tensor-parallel ranks."""
        if self.float8 is None or not self.float8.reduce_amax or self.tensor_parallel == 1 or layer == HEAD:
            return False
        return self.is_float8(layer) and (self.is_fused(layer) or layer in self.block.layers[1::2])

    def is_only_added(self, layer: str) -> bool:
        """Whether a layer's output is a last one that is only added to the stream: backward has no use for it."""
        return layer == self.block.layers[-1] and not self.block.post_norms

    def is_joined(self, layer: str) -> bool:
        """Whether a layer is part of a feed-forward whose inside exists in float8 alone."""
        both = self.block.layers[2:]
        if self.float8 is None or self.block.gate != "swiglu":
            return False
        if layer not in both or not all(self.is_own(name) for name in both):
            return False
        is_split = self.tensor_parallel > 1
        return (self.fused or not is_split) and joins_feed_forward(self.float8, is_split)


def layout_of(config: Config, sizes: ModelRecipe, float8: Float8Recipe | None) -> Layout:
    """Return how one rank would run a checked config.

    Args:
        config: the config.
        sizes: the model's dimensions.
        float8: its recipe, or None.
    """
    tokens, t = config.training.local_batch_size * config.training.seq_len, config.parallelism.tensor_parallel_degree
    block = block_of(config.model, sizes) or Block()
    filtered = config.float8.filter_fqns
    by_block = {
        tuple(
            name
            for name, shape in block.weights(sizes, t).items()
            if float8 and left_alone(f"layers.{n}.{name}", shape, tokens, float8, filtered) is None
        )
        for n in range(sizes.n_layers)
    }
    converted = tuple(name for name in block.layers if any(name in names for names in by_block))
    no_price = unpriced(config.model, sizes)
    if len(by_block) > 1:
        want = "the same layers of every block, for a prediction: formulas are of blocks that compute alike"
        fix = "train a few steps and read memory_gib"
        no_price = no_price or Problem("float8.filter_fqns", show(filtered), want, fix)
    head = sizes.vocab_size // t, sizes.dim
    if float8 and left_alone(HEAD, head, tokens, float8, filtered) is None:
        converted += (HEAD,)
    return Layout(
        sizes=sizes,
        tokens=tokens,
        seq_len=config.training.seq_len,
        tensor_parallel=t,
        itemsize={"bfloat16": 2, "float32": 4}[config.training.mixed_precision_param],
        compiled=config.compile.enable,
        fused=config.parallelism.async_tensor_parallel,
        float8=float8,
        converted=converted,
        block=block,
        unpriced=no_price,
    )


@dataclass(frozen=True)
class Activation:
    """The result of one operation.

    Attributes:
        op: that makes it, as torch spells it.
        layer: linear layer that it belongs to, "" for attention.
        bytes: that it holds.
        flops: of computing it again.
        moved: bytes that computing it again reads, writes, and receives from other ranks.
        for_product: of `bytes`, those that the layer's product alone reads.
    """

    op: str
    layer: str
    bytes: int
    flops: int
    moved: int
    for_product: int = 0


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


def activations(layout: Layout, window: int = 0) -> list[Activation]:
    """List what a block computes besides elementwise results, in the order in which it runs.

    Args:
        layout: of a rank.
        window: tokens that its attention sees; 0: all.
    """
    sizes, M, t, D = layout.sizes, layout.tokens, layout.tensor_parallel, layout.sizes.dim
    H, K, F, E = sizes.n_heads, sizes.n_kv_heads, sizes.ffn_dim, sizes.head_width
    block, (wqkv, wo, w13, w2) = layout.block, layout.block.layers
    # What runs behind a layer's matmul and is not the layer's own prepares the next, and behind the last the first.
    post_norms = [_norm(layer, M // t, D, layout) if block.post_norms else [] for layer in (w13, wqkv)]
    return [
        *_column_parallel(wqkv, D, (H + 2 * K) * E, layout),
        _attention(layout, window),
        *_row_parallel(wo, H * E, D, layout),
        *post_norms[0],
        *_column_parallel(w13, D, block.gate_width * F, layout),
        *_row_parallel(w2, F, D, layout),
        *post_norms[1],
    ]


def _attention(layout: Layout, window: int) -> Activation:
    """What attention keeps is its output and its softmax statistics; both of its products are computed again."""
    sizes, M, t, e = layout.sizes, layout.tokens, layout.tensor_parallel, layout.itemsize
    H, KE, HE = sizes.n_heads, sizes.n_kv_heads * sizes.head_width, sizes.n_heads * sizes.head_width
    size = M * (e * HE + 4 * H) // t
    moved = size + e * M * (HE + 2 * KE) // t
    flops = 2 * M * HE * twice_attended(window, layout.seq_len) // t
    return Activation(_WINDOW if layout.is_windowed(window) else _ATTENTION, "", size, flops, moved)


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
    decided = [(a, rules.decide(kernel if a.op == _ATTENTION else a.op, to_float8=a.op == _CAST)) for a in listed]
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
    for active, window in zip(save_list.active(layout.sizes.n_layers), layout.sizes.windows, strict=True):
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
    sizes, M, t, e = layout.sizes, layout.tokens, layout.tensor_parallel, layout.itemsize
    D, F, HE, block, rows = sizes.dim, sizes.ffn_dim, sizes.n_heads * sizes.head_width, layout.block, M // t
    attention = _attention_inside(layout) + _attention(layout, 0).bytes
    gate = e * M * block.gate_width * F // t  # its input
    inputs = sum(_kept_input(*of, layout) for of in zip(block.layers, (D, HE // t, D, F // t), strict=True))
    root_mean_squares = 4 * block.norms * rows
    if layout.compiled:
        # The stream, and what each sublayer adds to it where backward has a use for that.
        streams = layout.block_input * (3 if block.post_norms else 2)
        means = 4 * block.norms * rows if block.layer_norms else 0
        return streams + root_mean_squares + means + attention + gate + inputs
    norms = root_mean_squares + 2 * 4 * block.norms * rows * D
    if block.gate == "geglu":  # `swiglu` has a gradient of its own
        gate = 3 * 4 * M * F // t
    return norms + attention + gate + inputs


def _attention_inside(layout: Layout) -> int:
    """Bytes of attention's operands, and of the output of `wqkv` behind them, that a block without rules holds."""
    sizes, M, t, e = layout.sizes, layout.tokens, layout.tensor_parallel, layout.itemsize
    H, K, E = sizes.n_heads, sizes.n_kv_heads, sizes.head_width
    # v is a part of that output, and q and k once rotated are not.
    return e * M * (H + 2 * K) * E // t + (e * M * (H + K) * E // t if layout.block.is_rotary else 0)


def _kept_input(layer: str, K: int, layout: Layout) -> int:
    """Bytes of a layer's input [M, K] that a block without rules holds for the gradient of its weight."""
    _, wo, _, w2 = layout.block.layers
    if _is_kept_cast(layer, layout):
        return layout.tokens * K + _units(layout.tokens, layout)
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


def in_blocks(R: int, C: int, of: Granularity) -> int:
    """Bytes of a matrix [R, C] in float8 by blocks, and of their units."""
    if of == "none":
        return 0
    rows, columns = BLOCKS[of]
    return R * C + 4 * R * C // rows // columns


def _units(rows: int, layout: Layout) -> int:
    """Bytes of what one unit of an activation in float8 is worth: of each row, or of all."""
    return 4 * rows if layout.float8 is not None and layout.float8.input.output == "row" else 4


def _column_parallel(layer: str, K: int, N: int, layout: Layout) -> list[Activation]:
    """A norm, and a layer [M/t, K] → [M, N/t]."""
    M, t, e = layout.tokens, layout.tensor_parallel, layout.itemsize
    rows, received = M // t, e * M * K * (t - 1) // t
    found = _norm(layer, rows, K, layout)
    matmul = _matmul(layer, K, N // t, layout)
    if layout.is_fused(layer):  # cast before it is gathered
        gathered, received = _gathered(layer, K, layout), received * (1 if layout.is_float8(layer) else e) // e
        fused = Activation(_GATHER_MATMUL, layer, gathered + matmul.bytes, matmul.flops, matmul.moved + received)
        return [*found, *_operands(layer, rows, K, layout), fused]
    if t > 1:
        found.append(Activation(_GATHER, layer, _gathered(layer, K, layout), 0, received))
    return [*found, *_operands(layer, M, K, layout), matmul]


def _norm(layer: str, rows: int, width: int, layout: Layout) -> list[Activation]:
    """A norm's statistics of [rows, width]: mean squares, and before them the means of a LayerNorm."""
    mean = Activation(_MEAN, layer, 4 * rows, 2 * rows * width, layout.itemsize * rows * width)
    return [mean] * (2 if layout.block.layer_norms else 1)


def _gathered(layer: str, K: int, layout: Layout) -> int:
    """Bytes of the gathered tokens."""
    float8 = layout.float8 if layout.is_fused(layer) and layout.is_float8(layer) else None
    return token_bytes(layout.tokens, K, layout.itemsize, float8)


def token_bytes(tokens: int, width: int, itemsize: int, float8: Float8Recipe | None = None) -> int:
    """Bytes of tokens [M, K] on their way.

    Args:
        tokens: M.
        width: K.
        itemsize: of an element in the compute dtype.
        float8: the arithmetic, where they are gathered inside a float8 product: with a scale for each, or one for all.
    """
    if float8 is None:
        return itemsize * tokens * width
    return tokens * width + (0 if float8.reduce_amax else 4 * tokens)


def _row_parallel(layer: str, K: int, N: int, layout: Layout) -> list[Activation]:
    """A layer [M, K/t] → [M/t, N]."""
    M, t, e = layout.tokens, layout.tensor_parallel, layout.itemsize
    scattered, received = e * M // t * N, e * M * N * (t - 1) // t
    matmul = _matmul(layer, K // t, N, layout)
    operands = _operands(layer, M, K // t, layout)
    if layout.is_fused(layer):
        return [*operands, Activation(_MATMUL_SCATTER, layer, scattered, matmul.flops, matmul.moved + received)]
    scatter = [Activation(_SCATTER, layer, scattered, 0, received)] if t > 1 else []
    return [*operands, matmul, *scatter]


def _matmul(layer: str, K: int, N: int, layout: Layout) -> Activation:
    """[M, K] @ [K, N]; operands in float8 have a byte an element."""
    M, e = layout.tokens, layout.itemsize
    operand = 1 if layout.is_float8(layer) else e
    own = _BLOCK_MATMUL if layout.is_by_blocks(layer) and layout.is_float8(layer) else _MATMUL
    op = _SCALED_MATMUL if layout.is_own(layer) else own
    result = 4 if layout.is_emulated(layer) else e
    return Activation(op, layer, result * M * N, 2 * M * K * N, operand * (M * K + K * N) + e * M * N)


def _operands(layer: str, M: int, K: int, layout: Layout) -> list[Activation]:
    """Of a layer's input [M, K] in float8: its maxima and its cast."""
    e, float8 = layout.itemsize, layout.float8
    if float8 is not None and layout.is_by_blocks(layer):  # along its rows and those of its transpose, of one reading
        straight, turned = in_blocks(M, K, float8.input.output), in_blocks(M, K, float8.input.grad_weight)
        both = straight + turned
        cast = Activation(_CAST_BLOCKS, layer, both, M * K, both + e * M * K, for_product=straight)
        return [cast] if both else []
    if float8 is None or not layout.is_float8(layer):
        return []
    if layer == layout.block.layers[-1] and layout.is_joined(layer):  # gate and cast in one, of [M, 2K]
        return [Activation(_SWIGLU_CAST, layer, M * K + _units(M, layout), M * K, (2 * e + 1) * M * K)]
    of = float8.input.output
    op = _MAX if of == "tensor" and not layout.is_own(layer) else _AMAX
    rows, columns = (M, K) if of == "tensor" else BLOCKS.get(of, (1, K))
    maxima = [Activation(op, layer, e * (M // rows) * (K // columns), M * K, e * M * K)]
    if layout.reduces_amax(layer):
        maxima.append(Activation(_MAX_OF_RANKS, layer, e, 0, e))
    return [*maxima, Activation(_CAST, layer, M * K, M * K, (e + 1) * M * K)]


def _is_used(activation: Activation, kept: set[tuple[str, str]], layout: Layout) -> bool:
    """Whether backward has a use for a result if it has those that are kept."""
    op, layer = activation.op, activation.layer
    wqkv, _, w13, _ = layout.block.layers
    if layout.is_only_added(layer) and op in (*_PLAIN, _SCATTER, _MATMUL_SCATTER):
        return False
    if op in _PLAIN:
        return (_SCATTER, layer) not in kept
    if op == _CAST_BLOCKS and not layout.is_float8(layer):
        return False  # forward has no use for it, so that a compiler casts in backward
    if op == _CAST_BLOCKS and activation.bytes > activation.for_product:
        return True
    if op in (_AMAX, _MAX, _MAX_OF_RANKS, _CAST, _CAST_BLOCKS, _SWIGLU_CAST):
        is_gathered = layer in (wqkv, w13) and layout.is_fused(layer)  # what is kept is what was gathered
        if _is_kept_cast(layer, layout) and not is_gathered:
            return True
        return _product_runs_again(layer, kept, layout)
    return True


def _product_runs_again(layer: str, kept: set[tuple[str, str]], layout: Layout) -> bool:
    """Whether the output of a layer is computed once more."""
    products = {(product, layer) for product in (_MATMUL, _BLOCK_MATMUL, _SCATTER, _GATHER_MATMUL, _MATMUL_SCATTER)}
    return not (layout.is_only_added(layer) or kept & products)


def _is_tail(activation: Activation, layout: Layout) -> bool:
    """Whether eager mode ends recomputation before it: a matmul of torch's own hands its operands on as it begins."""
    is_plain = activation.layer not in layout.converted
    ends = activation.op == _SCATTER or (activation.op == _MATMUL and is_plain)
    return ends and layout.is_only_added(activation.layer)
