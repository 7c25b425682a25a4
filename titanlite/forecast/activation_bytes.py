"""What a block computes: the bytes of each of its activations, and what it costs to compute it again.

Formulas of shapes, for one rank and one forward pass. What a save-list keeps of them is in `block_price.py`; tests hold
both against what a block really keeps (`tests/unit/forecast/test_activation_bytes.py`). Elementwise results have no
price: no list may keep them, so that they are always computed again.

    t ranks share a layer, M tokens, e bytes an element   wqkv  [M, (H + 2K)·E/t]     w13  [M, 2F/t], w1 [M, F/t]
    attention  [M, H·E/t] and 4 bytes a head and token    wo    [M, D], [M/t, D] once scattered; w2 the same

What differs among architectures is in `config/architectures.py`, and of a model of the user's own in its recipe. A
trace would know it too; but it needs torch, a process group and the compiler, a second for each list and layout.

Axes as in `models/llama3.py`. Nothing here needs torch.
"""

from dataclasses import dataclass, field

from titanlite.activation_checkpoint import operations as ops
from titanlite.config.architectures import block_of, unpriced
from titanlite.config.build import show
from titanlite.config.recipe_schema import BLOCKS, Block, Float8Recipe, Granularity, ModelDims, twice_attended
from titanlite.config.schema import Config
from titanlite.errors import Problem
from titanlite.float8.scope import is_by_blocks_of_128, joins_feed_forward, left_alone, obstacle

HEAD = "output"
"""The linear layer behind the blocks."""


@dataclass(frozen=True)
class Layout:
    """How one rank runs a model.

    Attributes:
        dims: the model's dimensions.
        tokens: M, of a micro-step of this data-parallel rank.
        seq_len: S.
        tensor_parallel: t.
        itemsize: e, bytes of an element of the compute dtype.
        compiled: whether blocks are compiled.
        fused: whether the collectives of tensor parallelism are fused into matmuls where they can be.
        float8: the arithmetic of the layers in `converted`.
        converted: linear layers that compute in float8, of one block at least, and `HEAD` if it does.
        by_block: those of each block, if blocks differ in that.
        block: what blocks are made of.
        unpriced: why blocks have no price, or None: `block` is not theirs, or they do not compute alike.
    """

    dims: ModelDims
    tokens: int
    seq_len: int
    tensor_parallel: int = 1
    itemsize: int = 2
    compiled: bool = True
    fused: bool = False
    float8: Float8Recipe | None = None
    converted: tuple[str, ...] = ()
    by_block: tuple[tuple[str, ...], ...] = ()
    block: Block = field(default_factory=Block)
    unpriced: Problem | None = None

    @property
    def block_input(self) -> int:
        """Bytes of the residual stream, [M/t, D], which every checkpointed block keeps."""
        return self.itemsize * self.tokens // self.tensor_parallel * self.dims.dim

    def is_windowed(self, window: int) -> bool:
        """Whether attention is to a window that is shorter than the sequence."""
        return 0 < window < self.seq_len

    def recipe_of(self, layer: str) -> Float8Recipe | None:
        """The arithmetic of a layer, None if it is not converted."""
        return self.float8 if layer in self.converted else None

    def is_float8(self, layer: str) -> bool:
        """Whether the output of a layer is a product in float8."""
        recipe = self.recipe_of(layer)
        return recipe is not None and recipe.input.output != "none"

    def is_own(self, layer: str) -> bool:
        """Whether titanlite's own products carry a layer out in float8, not torchao."""
        recipe = self.recipe_of(layer)
        return recipe is not None and obstacle(recipe) is None

    def casts_anew(self, layer: str) -> bool:
        """Whether torchao casts the input of a layer once more for the gradient of its weight."""
        recipe, is_torchaos = self.recipe_of(layer), not (self.is_own(layer) or self.is_by_blocks(layer))
        return recipe is not None and is_torchaos and recipe.input.grad_weight != "none"

    def is_by_blocks(self, layer: str) -> bool:
        """Whether a layer's operands are cast by blocks; GPUs without such products keep more."""
        recipe = self.recipe_of(layer)
        return recipe is not None and is_by_blocks_of_128(recipe)

    def is_emulated(self, layer: str) -> bool:
        """Whether a layer's products are emulated on every device, in float32."""
        recipe = self.recipe_of(layer)
        return recipe is not None and recipe.has_blocks and not is_by_blocks_of_128(recipe)

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
        if self.float8 is None or self.block.gate != "swiglu" or self.block.biases:
            return False
        if layer not in both or not all(self.is_own(name) for name in both):
            return False
        is_split = self.tensor_parallel > 1
        return (self.fused or not is_split) and joins_feed_forward(self.float8, is_split)


def layout_of(config: Config, dims: ModelDims, float8: Float8Recipe | None) -> Layout:
    """Return how one rank would run a checked config.

    Args:
        config: the config.
        dims: the model's dimensions.
        float8: its recipe, or None.
    """
    tokens, t = config.training.local_batch_size * config.training.seq_len, config.parallelism.tensor_parallel_degree
    block = block_of(config.model, dims) or Block()
    filtered = config.float8.filter_fqns
    by_block = tuple(
        tuple(
            name
            for name, shape in block.weights(dims, t).items()
            if float8 and left_alone(f"layers.{n}.{name}", shape, tokens, float8, filtered) is None
        )
        for n in range(dims.n_layers)
    )
    converted = tuple(name for name in block.layers if any(name in names for names in by_block))
    no_price, is_alike = unpriced(config.model, dims), len({*by_block}) <= 1
    if not is_alike:
        want = "the same layers of every block, for a prediction: formulas are of blocks that compute alike"
        fix = "train a few steps and read memory_gib"
        no_price = no_price or Problem("float8.filter_fqns", show(filtered), want, fix)
    head = dims.vocab_size // t, dims.dim
    if float8 and left_alone(HEAD, head, tokens, float8, filtered) is None:
        converted += (HEAD,)
    return Layout(
        dims=dims,
        tokens=tokens,
        seq_len=config.training.seq_len,
        tensor_parallel=t,
        itemsize={"bfloat16": 2, "float32": 4}[config.training.mixed_precision_param],
        compiled=config.compile.enable,
        fused=config.parallelism.async_tensor_parallel,
        float8=float8,
        converted=converted,
        by_block=() if is_alike else by_block,
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


def activations(layout: Layout, window: int = 0) -> list[Activation]:
    """List what a block computes besides elementwise results, in the order in which it runs.

    Args:
        layout: of a rank.
        window: tokens that its attention sees; 0: all.
    """
    dims, M, t, D = layout.dims, layout.tokens, layout.tensor_parallel, layout.dims.dim
    H, K, F, E = dims.n_heads, dims.n_kv_heads, dims.ffn_dim, dims.head_width
    block, (wqkv, wo, w13, w2) = layout.block, layout.block.layers
    # What runs behind a layer's matmul and is not the layer's own prepares the next, and behind the last the first.
    post_norms = [_norm(layer, M // t, D, layout) if block.post_norms else [] for layer in (w13, wqkv)]
    return [
        *_column_parallel(wqkv, D, (H + 2 * K) * E, layout),
        attention(layout, window),
        *_row_parallel(wo, H * E, D, layout),
        *post_norms[0],
        *_column_parallel(w13, D, block.gate_width * F, layout),
        *_row_parallel(w2, F, D, layout),
        *post_norms[1],
    ]


def attention(layout: Layout, window: int = 0) -> Activation:
    """What attention keeps is its output and its softmax statistics; both of its products are computed again."""
    dims, M, t, e = layout.dims, layout.tokens, layout.tensor_parallel, layout.itemsize
    H, KE, HE = dims.n_heads, dims.n_kv_heads * dims.head_width, dims.n_heads * dims.head_width
    size = M * (e * HE + 4 * H) // t
    moved = size + e * M * (HE + 2 * KE) // t
    flops = 2 * M * HE * twice_attended(window, layout.seq_len) // t
    return Activation(ops.WINDOW_ATTENTION if layout.is_windowed(window) else ops.ATTENTION, "", size, flops, moved)


def in_blocks(R: int, C: int, of: Granularity) -> int:
    """Bytes of a matrix [R, C] in float8 by blocks, and of their units."""
    if of == "none":
        return 0
    rows, columns = BLOCKS[of]
    return R * C + 4 * R * C // rows // columns


def unit_bytes(rows: int, layout: Layout) -> int:
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
        fused = Activation(ops.GATHER_MATMUL, layer, gathered + matmul.bytes, matmul.flops, matmul.moved + received)
        return [*found, *_operands(layer, rows, K, layout), fused]
    if t > 1:
        found.append(Activation(ops.GATHER, layer, _gathered(layer, K, layout), 0, received))
    return [*found, *_operands(layer, M, K, layout), matmul]


def _norm(layer: str, rows: int, width: int, layout: Layout) -> list[Activation]:
    """A norm's statistics of [rows, width]: mean squares, and before them the means of a LayerNorm."""
    mean = Activation(ops.MEAN, layer, 4 * rows, 2 * rows * width, layout.itemsize * rows * width)
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
        return [*operands, Activation(ops.MATMUL_SCATTER, layer, scattered, matmul.flops, matmul.moved + received)]
    scatter = [Activation(ops.SCATTER, layer, scattered, 0, received)] if t > 1 else []
    return [*operands, matmul, *scatter]


def _matmul(layer: str, K: int, N: int, layout: Layout) -> Activation:
    """[M, K] @ [K, N]; operands in float8 have a byte an element."""
    M, e = layout.tokens, layout.itemsize
    operand = 1 if layout.is_float8(layer) else e
    own = ops.BLOCK_SCALED_MATMUL if layout.is_by_blocks(layer) and layout.is_float8(layer) else ops.MATMUL
    op = ops.SCALED_MATMUL if layout.is_own(layer) else own
    result = 4 if layout.is_emulated(layer) else e
    return Activation(op, layer, result * M * N, 2 * M * K * N, operand * (M * K + K * N) + e * M * N)


def _operands(layer: str, M: int, K: int, layout: Layout) -> list[Activation]:
    """Of a layer's input [M, K] in float8: its maxima and its cast."""
    e, float8 = layout.itemsize, layout.float8
    if float8 is not None and layout.is_by_blocks(layer):  # along its rows and those of its transpose, of one reading
        straight, turned = in_blocks(M, K, float8.input.output), in_blocks(M, K, float8.input.grad_weight)
        both = straight + turned
        cast = Activation(ops.CAST_BLOCKS, layer, both, M * K, both + e * M * K, for_product=straight)
        return [cast] if both else []
    if float8 is None or not layout.is_float8(layer):
        return []
    if layer == layout.block.layers[-1] and layout.is_joined(layer):  # gate and cast in one, of [M, 2K]
        return [Activation(ops.SWIGLU_CAST, layer, M * K + unit_bytes(M, layout), M * K, (2 * e + 1) * M * K)]
    of = float8.input.output
    op = ops.MAX if of == "tensor" and not layout.is_own(layer) else ops.AMAX
    rows, columns = (M, K) if of == "tensor" else BLOCKS.get(of, (1, K))
    maxima = [Activation(op, layer, e * (M // rows) * (K // columns), M * K, e * M * K)]
    if layout.reduces_amax(layer):
        maxima.append(Activation(ops.MAX_OF_RANKS, layer, e, 0, e))
    return [*maxima, Activation(ops.CAST, layer, M * K, M * K, (e + 1) * M * K)]
