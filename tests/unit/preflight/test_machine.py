"""What a run is planned for: GPUs that are here, and GPUs that are named."""

from types import SimpleNamespace

import pytest

from titanlite.errors import ConfigError
from titanlite.forecast.device_specs import measured_rates
from titanlite.preflight.machine import machine_here, machine_named


def here(monkeypatch: pytest.MonkeyPatch, name: str, gib: float, count: int) -> None:
    monkeypatch.setattr("titanlite.preflight.machine.shows_gpus", lambda: True)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    properties = SimpleNamespace(name=name, total_memory=int(gib * 2**30))
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda n: properties)


def test_gpus_of_this_host_have_the_rates_measured_on_such(monkeypatch: pytest.MonkeyPatch) -> None:
    here(monkeypatch, "NVIDIA H100 80GB HBM3", 79.2, 8)
    machine = machine_here()
    assert (machine.world, machine.rates, machine.is_measured) == (8, measured_rates("h100"), True)
    assert str(machine) == "8 × NVIDIA H100 80GB HBM3 with 79.1 GiB"
    assert machine.flags == "--world 8 --device h100"
    assert machine_here(world=2).world == 2


def test_speeds_that_were_not_measured_are_scaled_by_the_data_sheet(monkeypatch: pytest.MonkeyPatch) -> None:
    here(monkeypatch, "NVIDIA A100-SXM4-40GB", 39.5, 4)
    machine, rates = machine_here(), measured_rates("h100")
    assert not machine.is_measured
    assert machine.rates is not None
    assert machine.rates.device_gib == 39.5
    assert machine.rates.matmul_alone == pytest.approx(rates.matmul_alone * 312 / 989)
    assert machine.rates.attention[128] == pytest.approx([x * 312 / 989 for x in rates.attention[128]])
    assert machine.flags == "--world 4 --device-gib 39.5"
    here(monkeypatch, "NVIDIA H100 PCIe", 79.6, 1)  # of the name, and slower
    assert not machine_here().is_measured


def test_without_gpus_it_is_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titanlite.preflight.machine.shows_gpus", lambda: False)
    monkeypatch.setattr("titanlite.preflight.machine.memory_of_host", lambda: 16 * 2**30)
    assert str(machine_here()) == "1 process on a CPU with 16.0 GiB of memory"
    assert str(machine_named("cpu", None, 2)) == "2 processes on a CPU with 16.0 GiB of memory"


@pytest.mark.parametrize(("gib", "device", "takes"), [(80, "h100", 79.1), (141, "h200", 139.8), (64, "h100", 64.0)])
def test_memory_alone_names_the_nearest_gpu(gib: float, device: str, takes: float) -> None:
    """80 GB are 79.1 GiB to torch; what is further from that is meant as it is said."""
    machine = machine_named("", gib, 4)
    assert machine.gib == takes
    assert machine.rates is not None
    assert machine.rates.device == measured_rates(device).device
    assert machine.rates.device_gib == takes


def test_a_gpu_of_which_nothing_is_known_is_refused() -> None:
    with pytest.raises(ConfigError, match="one whose data sheet is"):
        machine_named("Voodoo", 8, 1)
