"""How much of causal attention documents leave: counted pair by pair, and what a forecast makes of it."""

import json
from pathlib import Path

import numpy as np
import pytest

from titanlite.data.packing import open_packed
from titanlite.data.prepare import prepare
from titanlite.forecast.activation_cost import block_costs
from titanlite.forecast.attended import AttendedShare, attended_share
from titanlite.forecast.device_specs import measured_rates
from titanlite.forecast.memory import MemoryModel
from titanlite.forecast.outlook import large, token_flops
from titanlite.forecast.step_time import StepTimeModel
from titanlite.preflight.checked_run import CheckedRun, checked_run

CONFIGS = Path(__file__).parents[3] / "configs"


def run_of(folder: Path, *flags: str, file: str = "llama3_8b") -> CheckedRun:
    """A run on documents of 100 tokens."""
    if not (path := folder / "t.jsonl").exists():
        path.write_text("\n".join(json.dumps({"text": "x" * 99}) for _ in range(2000)))
    own = [f"--data.source={folder}/t.jsonl", f"--data.cache_dir={folder}/cache", "--training.global_batch_size=16"]
    return checked_run(["--config", str(CONFIGS / f"{file}.toml"), *own, *flags], 8)


def prepared(folder: Path, *flags: str) -> CheckedRun:
    asked = run_of(folder, *flags)
    prepare(asked.config.data.source, asked.config.data, asked.dims.vocab_size, progress=False)
    return run_of(folder, *flags)


def share_of(asked: CheckedRun) -> AttendedShare | None:
    return attended_share(asked.config, asked.table, asked.inputs.shards)


@pytest.mark.parametrize("window", [0, 30, 100, 5000])
def test_shares_are_those_of_the_pairs(window: int) -> None:
    S, lengths = 200, [[200], [50, 50, 60] + [1] * 40, [1] * 200, [199, 1]]

    def weight(n: int) -> float:
        """Pairs of a document; a token's own with itself counts by half, as MFU counts it."""
        return sum(sum(1 - (q == k) / 2 for k in range(q + 1) if not window or q - k < window) for q in range(n))

    wanted = sum(weight(n) for sample in lengths for n in sample) / (len(lengths) * weight(S))
    share = AttendedShare(S, len(lengths), 1.0, np.array([n for sample in lengths for n in sample]))
    # Of a window's W·(2·S − W) halves, as MFU counts them, those pairs lack less than 1 / W.
    assert share.of(window) == pytest.approx(wanted, rel=1e-12 if not 0 < window < S else 1 / window)


def test_what_is_not_prepared_is_not_known(tmp_path: Path) -> None:
    assert share_of(run_of(tmp_path)) is None


def test_samples_of_the_run_are_looked_at(tmp_path: Path) -> None:
    share = share_of(prepared(tmp_path, "--training.seq_len=200"))
    assert share is not None
    assert share.samples == 256
    assert share.of() == pytest.approx(0.5)  # two documents of 100 tokens in each sample


def test_packing_is_looked_at_once_it_is_done(tmp_path: Path) -> None:
    flags = ("--training.seq_len=250", "--data.packing=best_fit")
    asked = prepared(tmp_path, *flags)
    assert share_of(asked) is None
    open_packed(next(iter(asked.inputs.shards.values())), asked.config.data, 250, progress=False)
    share = share_of(run_of(tmp_path, *flags))
    assert share is not None
    assert share.of() == pytest.approx((2 * 100**2 + 50) / 250**2)
    assert share.mean == 100


def test_time_and_mfu_count_what_is_attended(tmp_path: Path) -> None:
    asked = prepared(tmp_path, "--training.seq_len=8000")
    share = share_of(asked)
    assert share is not None
    memory = MemoryModel(asked.config, asked.dims, asked.float8, asked.optimizer, 8)
    assert asked.save_list is not None
    blocks = block_costs(memory.run, asked.save_list)
    rates = measured_rates()
    plain, masked = (StepTimeModel(memory, rates, known).step(blocks) for known in (None, share))
    (forward, backward), of_dense = rates.attention[128], rates.attention_documents[128]
    slower = (1 / forward / of_dense[0] + 2.5 / backward / of_dense[1]) / (1 / forward + 2.5 / backward)
    assert 1 < slower < 1.5
    assert masked.attention == pytest.approx(plain.attention * share.of() * slower)
    assert masked.matmul == plain.matmul
    flops = [token_flops(asked.config, asked.dims, known) for known in (None, share)]
    of_attention = 6 * asked.dims.n_layers * 8000 * asked.dims.n_heads * asked.dims.head_width
    assert flops[0] - flops[1] == pytest.approx(of_attention * (1 - share.of()))


@pytest.mark.parametrize(
    ("n", "text"), [(999_700_000, "1 billion"), (999.4e6, "999 million"), (1e6, "1 million"), (999_400, "999,400")]
)
def test_a_large_number_has_three_digits(n: float, text: str) -> None:
    assert large(n) == text
