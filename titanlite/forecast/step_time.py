"""How long a step takes, by class of work, from shapes and measured rates (`device_specs.py`); no GPU and no torch.

    matmul           the three products of each linear layer, forward and backward: 2·M·N·K each
    attention        forward 2·M·H·E·S, the causal half of two products; to a window of W tokens W·(2·S − W) / S in the
                     place of S; backward two and a half times that
    elementwise      bytes of norms, RoPE, SwiGLU, the loss and casts to float8, each read and written once a pass
    recomputation    what the save-list does not keep, once more
    tokens           collectives of tensor parallelism: all of a plain one; of one that is fused with its matmul, what
                     both take beyond that matmul
    weights          casts and copies around FSDP's collectives
    fsdp             collectives in the open: the first gathers, the last reduction, and in each block what is longer
                     than its compute
    optimizer        AdamW with clipping, once a step

Rates, no simulation: kernels are as fast in a small shape as in a large one, and nothing waits for the host.
Held against measured runs in `tests/unit/forecast/test_step_time.py`. Axes as in `models/llama3.py`.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from titanlite.activation_checkpoint.operations import CLASSES, FUSED
from titanlite.forecast.activation_bytes import HEAD, Activation, activations, token_bytes
from titanlite.forecast.block_price import BlockPrice
from titanlite.forecast.choose_save_list import Times, dear
from titanlite.forecast.comm_volume import Unit, units
from titanlite.forecast.device_specs import Rates
from titanlite.forecast.memory import MemoryModel
from titanlite.sharding.sent_bytes import sent_bytes

_PRODUCTS = ("output", "grad_input", "grad_weight")
_T, _G = 1e12, 1e9


@dataclass(frozen=True)
class StepTime:
    """Milliseconds of one step on one rank, by class of work: see this module's docstring."""

    matmul: float
    attention: float
    elementwise: float
    recomputation: float
    tokens: float
    weights: float
    fsdp: float
    optimizer: float

    @property
    def total(self) -> float:
        """All of them."""
        return sum(self.categories().values())

    def categories(self) -> dict[str, float]:
        """Give the milliseconds by class."""
        return asdict(self)


@dataclass(frozen=True)
class _Linear:
    """One rank's part of a linear layer, [M, K] @ [K, N]: `gathers` its input's tokens, or `scatters` its output's."""

    name: str
    K: int
    N: int
    gathers: bool
    is_float8: bool
    is_fused: bool


class StepTimeModel:
    """Predicts the time of a step under any save-list.

    Args:
        memory: of a run that `unrated` has nothing against.
        rates: of the device.
    """

    def __init__(self, memory: MemoryModel, rates: Rates) -> None:
        self.memory, self.rates, self.layout = memory, rates, memory.layout
        dims, t, converted = memory.dims, self.layout.tensor_parallel, self.layout.converted
        self._block = [
            _Linear(name, K, N, n % 2 == 0, is_float8=name in converted, is_fused=self.layout.is_fused(name))
            for n, (name, (N, K)) in enumerate(self.layout.block.weights(dims, t).items())
        ]
        V = dims.vocab_size // t
        self._head = _Linear(HEAD, dims.dim, V, True, is_float8=HEAD in converted, is_fused=self.layout.is_fused(HEAD))

    def times(self) -> Times:
        """Predict how long it takes to compute parts of a block again, for `choose_save_list.choose`."""
        found: dict[Activation, float] = {}
        for window in set(self.memory.dims.windows):
            listed = [a for rule in dear(self.layout, window).values() for a in rule]
            found |= {a: self._again(a, window) for a in listed}
        return Times(found, self._elementwise()[0] / self.rates.memory / _G)

    def _again(self, activation: Activation, window: int) -> float:
        """Seconds to compute a part of a block again."""
        op = activation.op
        if op in CLASSES["attention"]:
            return activation.flops / self._attention_rates(window)[0] / _T
        layer = next(layer for layer in self._block if layer.name == activation.layer)
        product, wire = self._seconds(layer, "output"), self._wire(layer, backward=False)
        if op in FUSED:
            return self.rates.fused * max(product, wire)
        return wire if op in CLASSES["communication"] else product

    def step(self, blocks: Sequence[BlockPrice]) -> StepTime:
        """Predict the time of a step.

        Args:
            blocks: what each keeps and computes again, in the order in which they run.
        """
        n, layout, memory, rates = len(blocks), self.layout, self.memory, self.rates
        times = self.times()
        again = sum(times.again(block) for block in blocks)
        matmul = self._matmul([self._head]) + n * self._matmul(self._block)
        tokens = self._in_the_open([self._head]) + n * self._in_the_open(self._block)
        of_embedding = token_bytes(layout.tokens, memory.dims.dim, layout.itemsize)
        tokens += self._on_the_wire("reduce_scatter", of_embedding) + self._on_the_wire("all_gather", of_embedding)
        forward, backward = self._elementwise()
        loss = 3 * layout.itemsize * layout.tokens * memory.dims.vocab_size // layout.tensor_parallel
        seconds = {
            "matmul": matmul,
            "attention": sum(self._attention(window) for window in memory.dims.windows),
            "elementwise": (n * (forward + backward) + loss) / rates.memory / _G,
            "recomputation": again,
            "tokens": tokens,
            "weights": self._copied() / rates.memory / _G,
        }
        seconds["fsdp"] = self._fsdp(n, sum(seconds.values()) / max(n, 1))
        of_step = {name: 1e3 * memory.micro_steps * value for name, value in seconds.items()}
        updated = self.memory.optimizer.moved * memory.parameters / memory.shards
        return StepTime(**of_step, optimizer=1e3 * updated / rates.optimizer / _G)

    def tokens_per_second(self, time: StepTime) -> float:
        """Tokens that a step of that time trains on in a second, by GPU."""
        tokens = self.layout.tokens * self.memory.micro_steps / self.layout.tensor_parallel
        return tokens / time.total * 1e3

    def _attention(self, window: int) -> float:
        """Seconds of attention's forward and backward in a block with that window."""
        listed = activations(self.layout, window)
        flops = sum(a.flops for a in listed if a.op in CLASSES["attention"])
        forward, backward = self._attention_rates(window)
        return flops / _T * (1 / forward + 2.5 / backward)

    def _attention_rates(self, window: int) -> tuple[float, float]:
        """TFLOP/s of forward and backward in a block with that window."""
        if self.layout.is_windowed(window):
            return self.rates.attention_window
        return self.rates.attention_of(self.memory.dims.head_width)

    def _seconds(self, layer: _Linear, product: str) -> float:
        """Of one of the three products of a layer, alone."""
        rates = self.rates
        rate = rates.matmul_alone if self.memory.shards == 1 else rates.matmul_beside_collectives
        if layer.is_float8 and self.layout.float8 and "none" not in self.layout.float8.operands(product):
            fast = getattr(self.layout.float8.accumulation, product) == "fast"
            rate = rates.float8_fast if fast else rates.float8_split
        return 2 * self.layout.tokens * layer.K * layer.N / rate / _T

    def _matmul(self, layers: Sequence[_Linear]) -> float:
        return sum(self._seconds(layer, product) for layer in layers for product in _PRODUCTS)

    def _on_the_wire(self, kind: str, whole: int) -> float:
        """Seconds of a collective of tokens, of so many bytes."""
        return sent_bytes(kind, whole, self.layout.tensor_parallel) / self.rates.tensor_parallel / _G

    def _wire(self, layer: _Linear, backward: bool) -> float:
        """Seconds of the collective of a layer: one gathers and the other scatters, forward and backward."""
        layout, is_gather = self.layout, layer.gathers != backward
        float8 = layout.float8 if is_gather and layer.is_fused and layer.is_float8 else None
        size = token_bytes(layout.tokens, layer.K if layer.gathers else layer.N, layout.itemsize, float8)
        return self._on_the_wire("all_gather" if is_gather else "reduce_scatter", size)

    def _in_the_open(self, layers: Sequence[_Linear]) -> float:
        """Seconds that collectives add to their matmuls."""
        if self.layout.tensor_parallel == 1:
            return 0.0
        found = 0.0
        for layer in layers:
            for product, backward in (("output", False), ("grad_input", True)):
                wire, matmul = self._wire(layer, backward), self._seconds(layer, product)
                found += self.rates.fused * max(wire, matmul) - matmul if layer.is_fused else wire
        return found

    def _elementwise(self) -> tuple[float, float]:
        """Bytes that a block's forward and backward read and write outside of matmuls and attention."""
        layout, dims, block = self.layout, self.memory.dims, self.layout.block
        M, t, e, E, D = layout.tokens, layout.tensor_parallel, layout.itemsize, dims.head_width, dims.dim
        # Stream and branch in, their sum and its norm out, for each sublayer; a branch in and its norm out behind it.
        norms = (2 * 4 + (2 * 2 if block.post_norms else 0)) * e * M // t * D
        rotated, gated = e * M * (dims.n_heads + dims.n_kv_heads) * E // t, e * M * dims.ffn_dim // t
        rotary = 2 * rotated if block.is_rotary else 0  # norms of heads in the same pass, backward with their input
        forward = norms + rotary + (block.gate_width + 1) * gated
        backward = norms + rotary + (rotated if block.qk_norms else 0) + 2 * (block.gate_width + 1) * gated
        if block.biases:  # added in passes that there are, but for that of attention; the gradient of each is a sum
            forward += 2 * e * M * self._block[0].N
            backward += sum(e * M * layer.N // (1 if layer.gathers else t) for layer in self._block)
        for layer in self._block:
            if layer.is_float8:
                forward += self._casts(layer.K, layer.gathers and layer.is_fused)
                backward += self._casts(layer.N, not layer.gathers and layer.is_fused)
        return forward, backward

    def _casts(self, width: int, is_gathered: bool) -> float:
        """Bytes of bringing [M, width] to float8: cast, on its own rank if the bytes are gathered, and later turned.

        The second is for the weight's gradient, which sums over tokens.
        """
        M, t, e = self.layout.tokens, self.layout.tensor_parallel, self.layout.itemsize
        return (e + 1) * M * width // (t if is_gathered else 1) + 2 * M * width

    def _copied(self) -> float:
        """Bytes of casting shards, copying gathered weights out and gradients in, in a micro-step."""
        memory, fsdp_units = self.memory, units(self.memory)
        gathered = sum(unit.gathers * unit.gathered_bytes for unit in fsdp_units)
        cast = (4 * sum(unit.gathers * unit.elements for unit in fsdp_units) + gathered) / memory.shards
        copied = 2 * gathered if memory.shards > 1 else 0
        return cast + copied + (self.layout.itemsize + memory.reduced) * memory.parameters

    def _fsdp(self, n: int, compute: float) -> float:
        """Seconds of FSDP's collectives that nothing hides, beside so many seconds of compute a block."""
        memory, rate = self.memory, self.rates.fsdp * _G
        embedding, block = units(memory)[:2]

        def gather(unit: Unit) -> float:
            return sent_bytes("all_gather", unit.gathered_bytes, memory.shards) / rate

        def reduction(unit: Unit) -> float:
            sums = memory.reduced * unit.elements // memory.shards
            scattered = sent_bytes("reduce_scatter", unit.reduced * unit.elements, memory.shards)
            return (scattered + sent_bytes("all_reduce", sums, memory.replicas)) / rate

        of_block = block.gathers * gather(block) + reduction(block)
        return gather(embedding) + gather(block) + reduction(embedding) + n * max(0.0, of_block - compute)
