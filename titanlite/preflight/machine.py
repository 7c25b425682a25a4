"""Say what a run is planned for, and how fast that is: the GPUs of this host, others that are named, or a CPU.

No torch here but for the GPUs of this host: a name that is not known is refused at once.
"""

from dataclasses import dataclass, replace

from titanlite.byte_size import GIB, byte_size
from titanlite.errors import ConfigError
from titanlite.forecast.device_specs import DEVICES, Rates, measured_rates
from titanlite.preflight.host_memory import memory_of_host, shows_gpus

CPU = "cpu"
_FLOPS = ("matmul_alone", "matmul_beside_collectives", "float8_fast", "float8_split")
_BYTES, _LINKS = ("memory", "optimizer"), ("tensor_parallel", "fsdp")
_SAME = 0.05  # share by which the memory that a person names may differ from what torch sees: 80 GB are 79.1 GiB


@dataclass(frozen=True)
class DataSheet:
    """The rates and memory that the data sheet of a GPU gives.

    Attributes:
        board: the name that its driver gives.
        gib: memory that torch sees of one.
        flops: dense bf16, TFLOP/s.
        memory: GB/s.
        links: GB/s of NVLink, both directions together.
    """

    board: str
    gib: float
    flops: float
    memory: float
    links: float


_MEASURED = DataSheet("NVIDIA H100 80GB HBM3", 79.1, 989, 3350, 900)  # what the others are held against
DATA_SHEETS = {
    "a100": DataSheet("NVIDIA A100-SXM4-80GB", 79.1, 312, 2039, 600),
    "a100-40gb": DataSheet("NVIDIA A100-SXM4-40GB", 39.4, 312, 1555, 600),
    "b200": DataSheet("NVIDIA B200", 178.4, 2250, 8000, 1800),
}
"""GPUs that were not measured, for a rough guess. Source: NVIDIA's data sheets of A100 SXM and DGX B200."""

GPU_NAMES = (*DEVICES, *DATA_SHEETS, CPU)
"""The names that `titanlite new --gpu` takes."""


@dataclass(frozen=True)
class Machine:
    """The devices of a run.

    Attributes:
        name: of each device.
        world: their number; of a CPU, that of processes.
        gib: memory of each; of a CPU, of the host.
        rates: what a GPU does in a second; None of a CPU.
        is_measured: whether that was measured on such a GPU, or follows from those of another by its data sheet.
    """

    name: str
    world: int
    gib: float
    rates: Rates | None
    is_measured: bool = True

    def __str__(self) -> str:
        if self.rates is None:
            processes = f"{self.world} process{'es' * (self.world > 1)} on a CPU"
            return f"{processes} with {byte_size(self.gib * GIB)} of memory"
        return f"{self.world} × {self.name} with {self.gib:.1f} GiB"

    @property
    def flags(self) -> str:
        """Return the flags that name it to `titanlite plan`."""
        if self.rates is None:
            return f"--world {self.world}"
        key = next((key for key in DEVICES if self.rates.device == measured_rates(key).device), None)
        memory = "" if key and self.gib == measured_rates(key).device_gib else f" --device-gib {self.gib:g}"
        return f"--world {self.world}" + (f" --device {key}" if key else "") + memory


def machine_here(world: int | None = None) -> Machine:
    """Look at the GPUs of this host, or where it has none at its memory.

    Args:
        world: number of GPUs or processes, if it is not that of all GPUs, or one process.

    Raises:
        ConfigError: nothing is known of the GPUs, or hosts of them do not divide the number.
    """
    if not shows_gpus():
        return Machine("CPU", world or 1, memory_of_host() / GIB, None)
    import torch

    if not torch.cuda.is_available():
        return Machine("CPU", world or 1, memory_of_host() / GIB, None)
    properties = torch.cuda.get_device_properties(0)
    return _divided(_gpus(properties.name, properties.total_memory / GIB, world or torch.cuda.device_count()))


def machine_named(gpu: str, gib: float | None, world: int) -> Machine:
    """Take GPUs that are not here, by their name or by their memory.

    Args:
        gpu: one of `GPU_NAMES`, or "" if only their memory is known.
        gib: memory of each, if it is not that of the device.
        world: their number.

    Raises:
        ConfigError: nothing is known of them, or hosts of them do not divide the number.
    """
    if gpu.lower() == CPU:
        return Machine("CPU", world, gib or memory_of_host() / GIB, None)
    known = {key: measured_rates(key) for key in DEVICES}
    if gpu.lower() in known:
        return _divided(Machine(gpu.upper(), world, *_with_memory(known[gpu.lower()], gib)))
    if gpu.lower() in DATA_SHEETS:
        rates = _rates_by_data_sheet(DATA_SHEETS[gpu.lower()])
        return _divided(Machine(gpu.upper(), world, *_with_memory(rates, gib), is_measured=False))
    if not gpu and gib:
        nearest = min(known, key=lambda key: abs(known[key].device_gib - gib))
        return _divided(Machine(f"GPU like {nearest.upper()}", world, *_with_memory(known[nearest], gib)))
    raise _unknown_gpu("command line", "--gpu", gpu, gib)


def _with_memory(rates: Rates, gib: float | None) -> tuple[float, Rates]:
    """Give the memory of a device and its rates, with the memory that is named where that is another."""
    if gib is None or abs(gib - rates.device_gib) <= _SAME * rates.device_gib:
        return rates.device_gib, rates
    return gib, replace(rates, device_gib=gib)


def _gpus(name: str, gib: float, world: int) -> Machine:
    """Take GPUs by the name that their driver gives: rates that were measured, or those of a data sheet."""
    from titanlite.observe.peak_flops import dense_bf16_flops  # imports torch

    for key in DEVICES:
        rates = measured_rates(key)
        if key in name.lower() and dense_bf16_flops(name) == dense_bf16_flops(rates.device):
            return Machine(name, world, *_with_memory(rates, gib))
    sheet = next((sheet for sheet in DATA_SHEETS.values() if sheet.board == name), None)
    if sheet is None:
        raise _unknown_gpu("this host", "GPU", name, gib)
    return Machine(name, world, *_with_memory(_rates_by_data_sheet(sheet), gib), is_measured=False)


def _rates_by_data_sheet(sheet: DataSheet) -> Rates:
    """Scale the rates of an H100: matmuls and attention by FLOPs, the rest by bandwidth of memory or links."""
    rates = measured_rates("h100")
    flops = sheet.flops / _MEASURED.flops
    shares = dict.fromkeys(_FLOPS, flops)
    shares |= dict.fromkeys(_BYTES, sheet.memory / _MEASURED.memory)
    shares |= dict.fromkeys(_LINKS, sheet.links / _MEASURED.links)
    scaled = {name: share * getattr(rates, name) for name, share in shares.items()}
    attention = {width: (flops * a, flops * b) for width, (a, b) in rates.attention.items()}
    window = flops * rates.attention_window[0], flops * rates.attention_window[1]
    of = {"device": sheet.board, "device_gib": sheet.gib, "attention": attention, "attention_window": window}
    return replace(rates, **scaled, **of)


def _divided(machine: Machine) -> Machine:
    """Refuse a number of GPUs that whole hosts do not have."""
    world, host = machine.world, machine.rates.host if machine.rates else 1
    if world > host and world % host:
        low = world - world % host
        want = f"at most {host}, or a multiple: GPUs are planned in whole hosts of {host}"
        raise ConfigError.of("command line", "--world", str(world), want, f"--world {low} or --world {low + host}")
    return machine


def _unknown_gpu(source: str, where: str, name: str, gib: float | None) -> ConfigError:
    want = f"one of {', '.join(GPU_NAMES)}: of others neither measurements nor bandwidths are known"
    memory = "" if gib is None else f" --device-gib {gib:g}"
    fix = f"the nearest, as --gpu h100{memory or ' --device-gib 80'}: memory is then yours, and speeds are an H100's"
    return ConfigError.of(source, where, name, want, fix)
