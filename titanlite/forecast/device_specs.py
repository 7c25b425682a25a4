"""Read the measured rates of a GPU (`devices/*.toml`), and find the runs for which they do not hold."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli

from titanlite.errors import Problem
from titanlite.forecast.network import DEFAULT_NETWORK, Network, networks

if TYPE_CHECKING:
    from titanlite.forecast.memory import MemoryModel


@dataclass(frozen=True)
class Rates:
    """The measured rates of a GPU.

    `devices/h200.toml` gives the unit, source and meaning of each attribute. A pair is (forward, backward); of products
    of experts, (rows, weight gradients); of `exchange`, (tokens to experts, results back). The keys of a mapping are
    widths of a head, mean numbers of rows of an expert, or lengths of the shorter side of a matrix. `network` is
    between hosts of `host` GPUs.
    """

    device: str
    device_gib: float
    matmul_alone: float
    matmul_beside_collectives: float
    float8_fast: float
    float8_split: float
    grouped: Mapping[int, tuple[float, float]]
    grouped_fast: Mapping[int, tuple[float, float]]
    grouped_split: Mapping[int, tuple[float, float]]
    orthogonalise: Mapping[int, float]
    attention_by: str
    attention: Mapping[int, tuple[float, float]]
    attention_long: tuple[float, float]
    attention_documents: Mapping[int, tuple[float, float]]
    attention_window: tuple[float, float]
    window: int
    memory: float
    optimizer: float
    tensor_parallel: float
    exchange: tuple[float, float]
    fsdp: float
    slowed_by_collectives: float
    fused: float
    host: int
    network: Network

    def attention_of(self, width: int, tokens: int) -> tuple[float, float]:
        """Return TFLOP/s of attention to `tokens` tokens, forward and backward, at the next measured head width."""
        forward, backward = (
            rate * _by_size({8192: 1.0, 131072: longer}, max(tokens, 8192))
            for rate, longer in zip(_as_wide(self.attention, width), self.attention_long, strict=True)
        )
        return forward, backward

    def grouped_of(self, rows: float, is_gradient: bool, fast: bool | None) -> float:
        """Return TFLOP/s of products of experts with `rows` rows each; `fast`: float8 accumulation, None: no float8."""
        table = self.grouped if fast is None else self.grouped_fast if fast else self.grouped_split
        return _by_size({n: of[is_gradient] for n, of in table.items()}, max(rows, 1.0))

    def orthogonalise_of(self, side: int) -> float:
        """Return TFLOP/s of orthogonalising matrices whose shorter side has length `side`."""
        return _by_size(self.orthogonalise, side)

    def documents_of(self, width: int) -> tuple[float, float]:
        """Return the shares of `attention_of` that attention within documents reaches, forward and backward."""
        return _as_wide(self.attention_documents, width)


def _by_size(rates: Mapping[int, float], size: float) -> float:
    """Return the rate at `size` from two measured ones: the time of a FLOP is a constant plus a share of 1 / size."""
    (small, slow), (large, quick) = min(rates.items()), max(rates.items())
    of_an_end = (1 / slow - 1 / quick) / (1 / small - 1 / large)
    return 1 / (1 / quick + of_an_end * (1 / size - 1 / large))


def _as_wide(rates: Mapping[int, tuple[float, float]], width: int) -> tuple[float, float]:
    as_wide = [E for E in rates if width <= E]
    return rates[min(as_wide, default=max(rates))]


_FOLDER = Path(__file__).with_name("devices")
DEVICES = sorted(file.stem for file in _FOLDER.glob("*.toml"))
"""Names of the devices whose rates come with titanlite, for `titanlite plan --device`."""
DEFAULT_DEVICE = "h200"


def measured_rates(device: str = DEFAULT_DEVICE, network: str | None = None) -> Rates:
    """Read the rates of one of `DEVICES`, and one of `networks()`; None: the default."""
    read = tomli.loads((_FOLDER / f"{device}.toml").read_text(encoding="utf-8"))
    if basis := read.pop("extends", None):
        read = tomli.loads((_FOLDER / f"{basis}.toml").read_text(encoding="utf-8")) | read
    return Rates(
        **{name: _typed(value) for name, value in read.items()}, network=networks()[network or DEFAULT_NETWORK]
    )


def _typed(value: Any) -> Any:
    """Convert a value from TOML: lists to tuples, and the keys of tables to integers."""
    if isinstance(value, dict):
        return {int(by): _typed(rates) for by, rates in value.items()}
    return tuple(value) if isinstance(value, list) else value


def no_rates_reason(memory: "MemoryModel") -> Problem | None:
    """Return the reason why the measured rates do not hold for a run, or None."""
    config, dims, run = memory.config, memory.dims, memory.run
    if run.float8 is not None and run.float8.has_blocks:
        want = "a recipe whose scales are by tensor or row: there are no rates of another"
        fix = "measure it, layer by layer: scripts/bench/float8_layers.py"
        return Problem("float8.recipe", f'"{config.float8.recipe}"', want, fix)
    if run.float8 is not None and run.float8.reduce_amax and run.tensor_parallel > 1:
        want = "a recipe without reduce_amax: there are no rates of reductions of one number"
        return Problem("float8.recipe", f'"{config.float8.recipe}"', want, "measure it")
    aligned = 8 * run.tensor_parallel  # each rank's part a multiple of 16 bytes in bfloat16
    if dims.vocab_size % aligned:
        want = f"a multiple of {aligned}: there are no rates of products without an aligned kernel"
        return Problem("model.vocab_size", str(dims.vocab_size), want, "titanlite validate names one")
    if config.training.mixed_precision_param != "bfloat16":
        want = "bfloat16: there are no rates of another"
        return Problem("training.mixed_precision_param", config.training.mixed_precision_param, want, "bfloat16")
    if not config.compile.enable:
        return Problem("compile.enable", "false", "true: the rates are those of compiled blocks", "measure it")
    return None
