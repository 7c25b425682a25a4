"""What `titanlite data` shows is what training reads: tokens, targets and documents of each sample."""

import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from titanlite.commands.data_tables import run_tables
from titanlite.data.batches import TrainBatches
from titanlite.data.run_samples import RunSamples, open_sources, prepared_sources
from titanlite.data.stages import Past, stage_table
from titanlite.errors import DataError
from titanlite.preflight.checked_run import CheckedRun, checked_run

STAGES = """
[[data.stage]]
from_tokens = 512
seq_len = 16
global_batch_size = 8
weights = { web = 0.5, code = 0.5 }
[[data.stage]]
from_tokens = 1024
seq_len = 64
global_batch_size = 2
"""


def run_of(folder: Path, *flags: str, more: str = "") -> CheckedRun:
    for name, n in (("web", 90), ("code", 50)):
        texts = [f"{name} {i} " + "x" * (i * 7 % 90) for i in range(n)]
        (folder / f"{name}.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    mixture = "".join(
        f'[[data.mixture]]\nname = "{name}"\nsource = "{folder}/{name}.jsonl"\nweight = {weight}\n'
        for name, weight in (("web", 0.75), ("code", 0.25))
    )
    (folder / "run.toml").write_text(
        f"""
        [job]
        dump_folder = "{folder}/outputs"
        [model]
        flavor = "debug"
        [training]
        steps = 16
        seq_len = 32
        global_batch_size = 4
        [lr_scheduler]
        warmup_steps = 1
        [data]
        cache_dir = "{folder}/cache"
        {mixture}{more}
        """
    )
    return checked_run(["--config", str(folder / "run.toml"), *flags], 1)


@pytest.mark.parametrize(
    ("flags", "more"),
    [
        ((), ""),
        ((), STAGES),
        (("--data.packing=best_fit",), ""),
        (("--data.document_mask=false", "--data.packing=best_fit"), ""),
        (("--data.shuffle_window=256",), STAGES),
    ],
    ids=["mixture", "stages", "best_fit", "unmasked", "windows"],
)
def test_samples_are_those_of_training(tmp_path: Path, flags: tuple[str, ...], more: str) -> None:
    asked = run_of(tmp_path, *flags, more=more)
    config, table = asked.config, asked.table
    assert prepared_sources(config, asked.inputs.shards, asked.table.unit_len) is None
    sources = open_sources(config, asked.dims.vocab_size, progress=False, unit_len=asked.table.unit_len)
    run = RunSamples(config, table, sources)
    is_masked = config.data.document_mask
    separators = {name: source.shards.separator for name, source in sources.items() if is_masked}
    batches = TrainBatches(
        {name: source.samples for name, source in sources.items()},
        table,
        seed=config.training.seed,
        dp_rank=0,
        dp_size=1,
        device=torch.device("cpu"),
        window=config.data.shuffle_window,
        separators=separators,
    )
    n_seen = 0
    with closing(batches):
        for step in range(1, 17):
            micros = batches.next()
            tokens, targets = (torch.cat([getattr(m, name) for m in micros]).numpy() for name in ("tokens", "targets"))
            samples = [run.at(index) for index in run.of_step(step)]
            assert [sample.step for sample in samples] == [step] * len(samples)
            shown = np.concatenate([sample.tokens for sample in samples], axis=1)
            assert np.array_equal(shown, np.stack((tokens, targets)))
            if is_masked:
                starts = torch.cat([m.sequences.starts for m in micros if m.sequences.starts is not None])
                n_documents = sum(len(sample.documents) for sample in samples)
                padded = len(tokens) - sum(document.length for sample in samples for document in sample.documents)
                begun = int((starts == torch.arange(len(starts)) % len(micros[0].tokens)).sum())
                assert begun == n_documents + padded
            n_seen += len(samples)
    assert n_seen == table.samples(16)
    names = {source.name for source in (run.at(index).source for index in range(n_seen))}
    assert names == {"web", "code"}


def test_the_past_is_shown_as_it_was_trained(tmp_path: Path) -> None:
    """With other weights, and without a source that was there before."""
    before = run_of(tmp_path)
    trained = RunSamples(before.config, before.table, open_sources(before.config, 256, False, before.table.unit_len))
    past = Past(4, 16, before.table.rows)
    (web, _) = before.config.data.mixture
    config = replace(before.config, data=replace(before.config.data, mixture=(web,)))
    table = stage_table(config, 1, past)
    now = RunSamples(config, table, open_sources(config, 256, False, table.unit_len))
    assert [row.from_step for row in table.rows] == [0, 4]
    for index in range(16):
        was = trained.at(index)
        if was.source.name == "web":
            assert (now.at(index).sample, now.at(index).step) == (was.sample, was.step)
        else:
            with pytest.raises(DataError, match=f"data.mixture.code = no such source, and sample {index} is of it"):
                now.at(index)
    seen = {trained.at(index).sample for index in range(16) if trained.at(index).source.name == "web"}
    assert not seen & {now.at(index).sample for index in range(16, 30)}
    table_rows = (line.split() for line in run_tables(now, config).splitlines() if line.startswith("  "))
    rows = {words[0]: words[1:] for words in table_rows}
    assert rows["code"] == ["6.250%", "6.250%", "128", "0"]
    assert rows["web"][3:6] == ["93.750%", "93.750%", "1,920"]
