"""Find what a run is planned for, and its rates: GPUs of this host, GPUs that are named, or a CPU.

torch is imported only to look at the GPUs of this host, so that an unknown name is refused at once.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from titanlite.byte_size import GIB, byte_size
from titanlite.errors import ConfigError
from titanlite.forecast.device_specs import DEVICES, Rates, measured_rates
from titanlite.forecast.network import DEFAULT_NETWORK, GPUS_OF_A_HOST, networks
from titanlite.preflight.host_memory import memory_of_host, shows_gpus

CPU, NETWORK = "cpu", "--network"
_FLOPS = ("matmul_alone", "matmul_beside_collectives", "float8_fast", "float8_split")
_BYTES, _LINKS = ("memory", "optimizer"), ("tensor_parallel", "fsdp")
_SAME = 0.05  # relative difference allowed between a given memory size and the one that torch sees (80 GB: 79.1 GiB)


class DataSheet(NamedTuple):
    """Rates and memory of a GPU by its data sheet."""

    board: str  # name of the GPU as its driver gives it
    gib: float  # memory as torch sees it, GiB
    flops: float  # TFLOP/s, dense bf16
    memory: float  # bandwidth, GB/s
    links: float  # GB/s of NVLink, both directions together


_MEASURED = DataSheet("NVIDIA H100 80GB HBM3", 79.1, 989, 3350, 900)  # the GPU to which others are compared
DATA_SHEETS = {
    "a100": DataSheet("NVIDIA A100-SXM4-80GB", 79.1, 312, 2039, 600),
    "a100-40gb": DataSheet("NVIDIA A100-SXM4-40GB", 39.4, 312, 1555, 600),
    "b200": DataSheet("NVIDIA B200", 178.4, 2250, 8000, 1800),
}
"""GPUs without measured rates, for a rough estimate. Source: NVIDIA's data sheets of A100 SXM and DGX B200."""

GPU_NAMES = (*DEVICES, *DATA_SHEETS, CPU)
"""The names that `titanlite new --gpu` takes."""


@dataclass(frozen=True)
class Machine:
    """The GPUs or the CPU that a run is planned for."""

    name: str  # of each GPU, or "CPU"
    world: int  # number of GPUs, or of processes on a CPU
    gib: float  # memory of each GPU, or of a CPU's host
    rates: Rates | None  # None for a CPU
    is_measured: bool = True  # rates were measured on this GPU; else they are scaled from an H100's

    def __str__(self) -> str:
        if self.rates is None:
            processes = f"{self.world} process{'es' * (self.world > 1)} on a CPU"
            return f"{processes} with {byte_size(self.gib * GIB)} of memory"
        host, network = self.rates.host, self.rates.network.name
        linked = f", hosts of {host} linked by {network}" if self.world > host else ""
        return f"{self.world} × {self.name} with {self.gib:.1f} GiB{linked}"

    @property
    def flags(self) -> str:
        """Return the flags of `titanlite plan` for this machine."""
        if self.rates is None:
            return f"--world {self.world}"
        key = next((key for key in DEVICES if self.rates.device == measured_rates(key).device), None)
        memory = "" if key and self.gib == measured_rates(key).device_gib else f" --device-gib {self.gib:g}"
        network = self.rates.network.key
        between = "" if network == DEFAULT_NETWORK else f" {NETWORK} {network}"
        return f"--world {self.world}" + (f" --device {key}" if key else "") + memory + between


def network_of(given: Mapping[str, str], world: int | None) -> str | None:
    """Return the network between hosts that `--network` names in `given`; None: the default.

    Raises:
        ConfigError: the network is unknown, or the run is on one host.
    """
    if NETWORK not in given:
        return None
    key = given[NETWORK].lower()
    if key not in networks():
        want = f"{', '.join(networks())}: of others no bandwidth is known"
        raise ConfigError.of("command line", NETWORK, given[NETWORK], want, f"the nearest, as {NETWORK} eth100")
    if world is None or world <= GPUS_OF_A_HOST:
        want = f"--world of more than {GPUS_OF_A_HOST} as well: the GPUs of one host need no network"
        raise ConfigError.of("command line", NETWORK, key, want, f"{NETWORK} {key} --world 16, or remove it")
    return key


def machine_here(world: int | None = None, network: str | None = None) -> Machine:
    """Return the GPUs of this host, or its CPU if it has none. `world` is their number; None: all GPUs, or one process.

    `network` links hosts, if there are several; None: the default.

    Raises:
        ConfigError: the GPUs are unknown, or `world` GPUs need several hosts and do not fill them.
    """
    if shows_gpus():
        import torch

        if torch.cuda.is_available():
            properties = torch.cuda.get_device_properties(0)
            gib = properties.total_memory / GIB
            key = _key_of_board(properties.name, gib)
            return _gpus(properties.name, key, gib, world or torch.cuda.device_count(), network)
    return machine_named(CPU, None, world or 1, network)


def machine_named(gpu: str, gib: float | None, world: int, network: str | None = None) -> Machine:
    """Return `world` devices. `gpu` is one of `GPU_NAMES`, or "" for the GPU whose memory is nearest to `gib`.

    `gib` is the memory of each device; None: as much as this kind of device has. For `network` see `machine_here`.

    Raises:
        ConfigError: the GPU is unknown, or `world` GPUs need several hosts and do not fill them.
    """
    name, key = gpu.upper(), gpu.lower()
    if key == CPU:
        if network:
            want = "a GPU: the speed of CPUs is guessed without a network"
            raise ConfigError.of("command line", NETWORK, network, want, "remove it, or --gpu h100")
        return Machine("CPU", world, gib or memory_of_host() / GIB, None)
    if not gpu and gib:
        key = min(DEVICES, key=lambda key: abs(measured_rates(key).device_gib - gib))
        name = f"GPU like {key.upper()}"
    if key not in GPU_NAMES:
        raise _unknown_gpu("command line", "--gpu", gpu, gib)
    return _gpus(name, key, gib, world, network)


def _key_of_board(name: str, gib: float) -> str:
    """Return the entry of `GPU_NAMES` for a GPU with this name in its driver; raise ConfigError if there is none."""
    from titanlite.observe.peak_flops import dense_bf16_flops  # imports torch

    flops = {key: dense_bf16_flops(measured_rates(key).device) for key in DEVICES if key in name.lower()}
    same = [key for key in flops if flops[key] == dense_bf16_flops(name)]
    same += [key for key, sheet in DATA_SHEETS.items() if sheet.board == name]
    if not same:
        raise _unknown_gpu("this host", "GPU", name, gib)
    return same[0]


def _gpus(name: str, key: str, gib: float | None, world: int, network: str | None) -> Machine:
    """Return `world` GPUs with rates and memory. Refuse more GPUs than one host has if they do not fill whole hosts."""
    rates = measured_rates(key, network) if key in DEVICES else _rates_by_data_sheet(DATA_SHEETS[key], network)
    if gib is None or abs(gib - rates.device_gib) <= _SAME * rates.device_gib:
        gib = rates.device_gib
    if world > rates.host and (over := world % rates.host):
        want = f"at most {rates.host}, or a multiple: GPUs are planned in whole hosts of {rates.host}"
        fix = f"--world {world - over} or --world {world - over + rates.host}"
        raise ConfigError.of("command line", "--world", str(world), want, fix)
    return Machine(name, world, gib, replace(rates, device_gib=gib), key in DEVICES)


def _rates_by_data_sheet(sheet: DataSheet, network: str | None) -> Rates:
    """Scale the rates of an H100 to another GPU: matmuls and attention by FLOP/s, the rest by bandwidth."""
    rates = measured_rates("h100", network)
    flops = sheet.flops / _MEASURED.flops
    shares = dict.fromkeys(_FLOPS, flops)
    shares |= dict.fromkeys(_BYTES, sheet.memory / _MEASURED.memory)
    shares |= dict.fromkeys(_LINKS, sheet.links / _MEASURED.links)
    scaled = {name: share * getattr(rates, name) for name, share in shares.items()}
    attention = {width: (flops * a, flops * b) for width, (a, b) in rates.attention.items()}
    window = flops * rates.attention_window[0], flops * rates.attention_window[1]
    of = {"device": sheet.board, "device_gib": sheet.gib, "attention": attention, "attention_window": window}
    return replace(rates, **scaled, **of)


def _unknown_gpu(source: str, where: str, name: str, gib: float | None) -> ConfigError:
    want = f"one of {', '.join(GPU_NAMES)}: of others neither measurements nor bandwidths are known"
    memory = "" if gib is None else f" --device-gib {gib:g}"
    fix = f"the nearest, as --gpu h100{memory or ' --device-gib 80'}: memory is then yours, and speeds are an H100's"
    return ConfigError.of(source, where, name, want, fix)
