"""What a run is planned for: GPUs that are here, and GPUs that are named."""

from types import SimpleNamespace

import pytest

from titanlite.errors import ConfigError
from titanlite.forecast.device_specs import measured_rates
from titanlite.observe.peak_flops import dense_bf16_flops
from titanlite.preflight.machine import DATA_SHEETS, GPU_NAMES, machine_here, machine_named


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
    assert machine_here(16).flags == machine_here(16, "ib400").flags == "--world 16 --device h100"
    assert machine_here(16, "eth200").flags == "--world 16 --device h100 --network eth200"


def test_speeds_that_were_not_measured_are_scaled_by_what_limits_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """An A100 of 40 GB has a third of an H100's FLOPs, half of its bandwidth of memory, two thirds of its links."""
    here(monkeypatch, "NVIDIA A100-SXM4-40GB", 39.4, 4)
    machine, h100 = machine_here(), measured_rates("h100")
    assert not machine.is_measured
    assert (rates := machine.rates) is not None
    assert rates.device_gib == 39.4
    for name in ("matmul_alone", "matmul_beside_collectives", "float8_fast", "float8_split"):
        assert getattr(rates, name) == pytest.approx(getattr(h100, name) * 312 / 989)
    assert rates.attention[128] == pytest.approx([x * 312 / 989 for x in h100.attention[128]])
    assert rates.attention_window == pytest.approx([x * 312 / 989 for x in h100.attention_window])
    for name in ("memory", "optimizer"):
        assert getattr(rates, name) == pytest.approx(getattr(h100, name) * 1555 / 3350)
    for name in ("tensor_parallel", "fsdp"):
        assert getattr(rates, name) == pytest.approx(getattr(h100, name) * 600 / 900)
    assert (rates.fused, rates.host, rates.window) == (h100.fused, h100.host, h100.window)
    assert machine.flags == "--world 4 --device-gib 39.4"
    assert machine_named("a100-40gb", None, 4).rates == rates


def test_data_sheets_have_the_flops_that_mfu_counts_by() -> None:
    for sheet in DATA_SHEETS.values():
        assert dense_bf16_flops(sheet.board) == sheet.flops * 1e12


@pytest.mark.parametrize("name", ["NVIDIA H100 PCIe", "NVIDIA A100-PCIE-40GB", "NVIDIA L40S", "NVIDIA GB200"])
def test_a_gpu_here_whose_bandwidths_are_not_known_is_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    here(monkeypatch, name, 79.6, 1)
    with pytest.raises(ConfigError) as refused:
        machine_here()
    assert f"GPU = {name}" in str(refused.value)
    assert "want: one of h100, h200, a100, a100-40gb, b200, cpu: of others" in str(refused.value)
    assert "as --gpu h100 --device-gib 79.6: " in str(refused.value)


@pytest.mark.parametrize(("world", "fix"), [(9, "--world 8 or --world 16"), (20, "--world 16 or --world 24")])
def test_gpus_that_are_no_whole_hosts_are_refused(monkeypatch: pytest.MonkeyPatch, world: int, fix: str) -> None:
    here(monkeypatch, "NVIDIA H200", 139.8, 8)
    for make in (
        lambda: machine_here(world),
        *(lambda gpu=gpu: machine_named(gpu, 80, world) for gpu in ("", "h100", "a100")),
    ):
        with pytest.raises(ConfigError, match=fix):
            make()
    assert machine_here(64).world == machine_named("a100", None, 64).world == 64
    assert machine_named("h100", None, 6).world == 6
    assert machine_named("cpu", 8, 20).world == 20


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


@pytest.mark.parametrize("gib", [None, 40])
def test_what_is_said_of_a_gpu_of_which_nothing_is_known_is_taken(gib: float | None) -> None:
    with pytest.raises(ConfigError) as refused:
        machine_named("Voodoo", gib, 1)
    assert f"want: one of {', '.join(GPU_NAMES)}: " in str(refused.value)
    assert f"fix:  the nearest, as --gpu h100 --device-gib {gib or 80}: " in str(refused.value)
    assert machine_named("h100", gib or 80, 1).gib == (gib or 79.1)
    for name in GPU_NAMES:
        assert machine_named(name, None, 1).gib > 0
