"""Training on whole documents: bins have the loss of their documents alone, and runs of any layout take the same."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.support.documents import sequences_of
from tests.support.launched import Desk
from titanlite import recipes
from titanlite.commands import main
from titanlite.config.schema import Data, Model
from titanlite.data.document_starts import document_starts
from titanlite.data.packing import open_packed
from titanlite.data.prepare import prepare
from titanlite.kernels.ignore_index import IGNORE_INDEX
from titanlite.models.find import build_model
from titanlite.models.layers import Sequences
from titanlite.parallel.initialise import fill_buffers, initialise

S = 64
LENGTHS = [1, 2, 5, 63, 64, 65, 20, 200, 31, 9, 128, 40, 3, 17, 63, 10]  # separators included


def texts(lengths: Sequence[int]) -> list[str]:
    letters = np.random.default_rng(0)
    return ["".join(map(chr, letters.integers(97, 123, n - 1))) for n in lengths]


def corpus(folder: Path, repeats: int = 1) -> str:
    path = folder / "documents.jsonl"
    path.write_text("\n".join(json.dumps({"text": text}) for text in texts(LENGTHS * repeats) if text))
    return str(path)


@pytest.mark.parametrize("name", ["llama3", "gpt2"])
def test_bins_have_the_loss_of_their_documents_alone(tmp_path: Path, name: str) -> None:
    model = build_model(Model(name=name), recipes.load("model", f"{name}-debug"), S)
    model.to_empty(device="cpu")
    fill_buffers(model)
    initialise(model, 0)
    model.double()
    data = Data(corpus(tmp_path), cache_dir=str(tmp_path / "c"), packing="best_fit")
    shards = prepare(data.source, data, 256, progress=False)
    samples = open_packed(shards, data, S, progress=False)
    pairs = np.stack([samples.read(i) for i in range(samples.n)], axis=1)  # [2, B, S]
    starts = torch.from_numpy(document_starts(pairs[0], np.zeros(samples.n, np.int64))).flatten()
    tokens, targets = torch.from_numpy(pairs).flatten(1)
    with torch.no_grad():
        logits = model(tokens, sequences_of(S, starts))
        packed = F.cross_entropy(logits, targets, ignore_index=IGNORE_INDEX, reduction="sum")
        alone, n_targets = torch.zeros((), dtype=torch.float64), 0
        for text in texts(LENGTHS):
            ids = torch.tensor([*text.encode(), 0])
            for at in range(0, len(ids), S):  # a longer one is read in pieces; each knows its next token
                piece, after = ids[at : at + S], ids[at + 1 : at + S + 1]
                if len(after):
                    loss = F.cross_entropy(model(piece, Sequences(len(piece)))[: len(after)], after, reduction="sum")
                    alone, n_targets = alone + loss, n_targets + len(after)
    assert n_targets == int((targets != IGNORE_INDEX).sum()) == sum(LENGTHS) - len(LENGTHS)
    assert abs(packed - alone) <= 1e-12 * alone


def test_a_run_on_packed_documents(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    flags = (f"--data.source={corpus(desk.folder, 10)}", "--data.packing=best_fit", "--training.steps=8")
    flags += ("--checkpoint.interval=4", "--job.stop_after=4")
    one, two = desk.run("one", 1, *flags), desk.run("two", 2, *flags, "--training.local_batch_size=1")
    assert one.losses() == pytest.approx(two.losses(), rel=1e-5)
    applied = one.receipt["data.packing"]["applied"]
    n, kept = (len(LENGTHS) - 1) * 10, (sum(LENGTHS) - 1) * 10  # the empty document is skipped
    assert applied == {
        "samples": (kept + applied["padded"]) // S,
        "documents": n,
        "cut": 3 * 10,
        "padded": applied["padded"],
    }
    assert 0 <= applied["padded"] < S
    other = desk.run("one", 1, *flags[:1], *flags[2:-1], ends=2)
    assert 'data.packing = "concat"' in other.output
    # With half the batch it goes on from step 5, and what was trained is shown as it was.
    assert main(["data", *desk.flags("one", *flags, "--training.global_batch_size=2"), "--sample=15"]) == 0
    assert "sample 15, of step 4: " in capsys.readouterr().out
    assert main(["data", *desk.flags("one", *flags, "--training.global_batch_size=2")]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["1", "0", "64", "4", "0.0004", "data.source"] in rows
    assert ["5", f"{4 * 4 * 64:,}", "64", "2", "0.002", "data.source"] in rows
