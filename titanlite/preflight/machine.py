"""Say what a run is planned for, and how fast that is: the GPUs of this host, others that are named, or a CPU."""

from dataclasses import dataclass, fields, replace

from titanlite.byte_size import byte_size
from titanlite.errors import ConfigError
from titanlite.forecast.device_specs import DEVICES, Rates, measured_rates
from titanlite.forecast.memory import GIB
from titanlite.observe.peak_flops import dense_bf16_flops
from titanlite.preflight.host_memory import memory_of_host, shows_gpus

CPU = "cpu"
_SPEEDS = ("matmul_alone", "matmul_beside_collectives", "float8_fast", "float8_split", "memory", "optimizer")
_SPEEDS += ("tensor_parallel", "fsdp")
_SAME = 0.05  # share by which the memory that a person names may differ from what torch sees: 80 GB are 79.1 GiB
_EXAMPLE = "--gpu h100 --world 8"


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
        """What names it to `titanlite plan`, behind the file."""
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
        ConfigError: nothing is known of the GPUs.
    """
    if not shows_gpus():
        return Machine("CPU", world or 1, memory_of_host() / GIB, None)
    import torch

    if not torch.cuda.is_available():
        return Machine("CPU", world or 1, memory_of_host() / GIB, None)
    properties = torch.cuda.get_device_properties(0)
    return _gpus(properties.name, properties.total_memory / GIB, world or torch.cuda.device_count())


def machine_named(gpu: str, gib: float | None, world: int) -> Machine:
    """Take GPUs that are not here, by their name or by their memory.

    Args:
        gpu: a device of `device_specs.DEVICES`, another's name, `cpu`, or "" if only their memory is known.
        gib: memory of each, if it is not that of the device.
        world: their number.

    Raises:
        ConfigError: nothing is known of them.
    """
    if gpu.lower() == CPU:
        return Machine("CPU", world, gib or memory_of_host() / GIB, None)
    known = {key: measured_rates(key) for key in DEVICES}
    if gpu.lower() in known:
        rates = known[gpu.lower()]
        return Machine(gpu.upper(), world, *_with_memory(rates, gib))
    if not gpu and gib:
        nearest = min(known, key=lambda key: abs(known[key].device_gib - gib))
        return Machine(f"GPU like {nearest.upper()}", world, *_with_memory(known[nearest], gib))
    if gib is None:
        want = f"{', '.join(DEVICES)} or {CPU}; of another GPU --device-gib as well"
        raise ConfigError.of("command line", "--gpu", gpu, want, f"--gpu {gpu or 'h100'} --device-gib 80")
    return _gpus(gpu, gib, world)


def _with_memory(rates: Rates, gib: float | None) -> tuple[float, Rates]:
    """Give the memory of a device and its rates, with the memory that is named where that is another."""
    if gib is None or abs(gib - rates.device_gib) <= _SAME * rates.device_gib:
        return rates.device_gib, rates
    return gib, replace(rates, device_gib=gib)


def _gpus(name: str, gib: float, world: int) -> Machine:
    """Take GPUs by the name that their driver gives; speeds that were not measured are scaled by their data sheet's."""
    key = next((key for key in DEVICES if key in name.lower()), DEVICES[0])
    rates = measured_rates(key)
    peak, measured = dense_bf16_flops(name), dense_bf16_flops(rates.device)
    if peak is None or measured is None:
        want = f"a GPU whose speed is known: {', '.join(DEVICES)}, or one whose data sheet is"
        raise ConfigError.of("GPU", name, "", want, f"name the one that is nearest: {_EXAMPLE} --device-gib {gib:.0f}")
    if key in name.lower() and peak == measured:
        return Machine(name, world, *_with_memory(rates, gib))
    share = peak / measured
    scaled = {f.name: share * getattr(rates, f.name) for f in fields(rates) if f.name in _SPEEDS}
    attention = {width: (share * a, share * b) for width, (a, b) in rates.attention.items()}
    window = share * rates.attention_window[0], share * rates.attention_window[1]
    rates = replace(rates, device=name, device_gib=gib, attention=attention, attention_window=window, **scaled)
    return Machine(name, world, gib, rates, is_measured=False)
