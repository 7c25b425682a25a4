"""`Sequences` reach every block; who does not use the documents among them is refused."""

from pathlib import Path

import pytest
import torch

from tests.support.documents import sequences_of
from tests.support.own_model import Change, mine
from tests.support.short_run import train
from titanlite import recipes
from titanlite.config.schema import Model
from titanlite.data import batches
from titanlite.errors import ConfigError
from titanlite.models.find import build_model
from titanlite.models.layers import Sequences
from titanlite.parallel.initialise import fill_buffers, initialise

S = 64
HALVES = torch.arange(S, dtype=torch.int32) // (S // 2) * (S // 2)  # where two documents of S/2 tokens start
FULL = ["--activation_checkpoint.recipe", "full"]
TP_2 = ["--parallelism.tensor_parallel_degree", "2"]


@pytest.mark.parametrize("name", ["llama3", "qwen3", "gemma3", "gpt2"])
def test_tokens_attend_to_their_own_sequence(name: str) -> None:
    model = build_model(Model(name=name), recipes.load("model", f"{name}-debug"), S)
    model.to_empty(device="cpu")
    fill_buffers(model)
    initialise(model, 0)
    tokens = torch.arange(2 * S)
    changed = torch.cat((tokens[: S // 2] + 1, tokens[S // 2 :]))
    whole, halves = (model(changed, given) == model(tokens, given) for given in (None, Sequences(S // 2)))
    assert whole.all(dim=1).tolist() == [False] * S + [True] * S
    assert halves.all(dim=1).tolist() == [False] * (S // 2) + [True] * (2 * S - S // 2)
    assert torch.equal(model(tokens), model(tokens, Sequences(S)))
    documents = model(tokens[:S], sequences_of(S, HALVES))
    assert (documents - model(tokens[:S], Sequences(S // 2))).abs().max() <= 1e-5 * documents.abs().max()
    with pytest.raises(ConfigError, match=r"^attention: 1 problem\n  sequences.rows = called with documents\n"):
        sequences_of(S, HALVES).rows(tokens[:S])


DOCUMENTS = """
def of_one_document(q, k, v, sequences):
    places = torch.arange(len(q), device=q.device)
    starts = places - places % sequences.longest if sequences.starts is None else sequences.starts
    mask = (starts[:, None] <= places) & (places[:, None] >= places)
    q, k, v = (t.transpose(0, 1) for t in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(0, 1)


INIT_STD"""
USES_DOCUMENTS: list[Change] = [
    ("\nINIT_STD", DOCUMENTS),
    ("self.attend(*heads, sequences)", "of_one_document(*heads, sequences)"),
]
TAKES_TOKENS: list[Change] = [
    ("tokens: Tensor, sequences: Sequences | None = None", "tokens: Tensor"),
    ("sequences = sequences or Sequences(self.seq_len)", "sequences = Sequences(self.seq_len)"),
]


@pytest.mark.slow
def test_documents_reach_the_attention_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents of S/2 tokens are sequences of S/2."""
    whole = train(tmp_path, 1, steps=2)
    monkeypatch.setattr(batches, "Sequences", lambda *_: Sequences(S // 2))
    halves = train(tmp_path, 1, steps=2)
    flags = mine(tmp_path, *USES_DOCUMENTS)
    monkeypatch.setattr(batches, "Sequences", lambda *_: sequences_of(S, HALVES))
    for ranks, more in ((1, []), (1, FULL), (2, []), (2, [*FULL, *TP_2])):
        got = train(tmp_path, ranks, [*flags, *more], steps=2)
        assert ((got.losses - halves.losses) / halves.losses).abs().max() <= 1e-5
        assert ((got.norms - halves.norms) / halves.norms).abs().max() <= 1e-5
    assert ((halves.norms - whole.norms) / whole.norms).abs().min() > 1e-3


def test_documents_compile(tmp_path: Path) -> None:
    mine(tmp_path, *USES_DOCUMENTS)
    model = build_model(Model(file=str(tmp_path / "mine.py")), recipes.load("model", "llama3-debug"), S)
    model.to_empty(device="cpu")
    fill_buffers(model)
    initialise(model, 0)
    tokens, documents = torch.arange(S), sequences_of(S, HALVES)
    truth = model(tokens, sequences=documents)
    for block in model.layers:
        block.compile(fullgraph=True, dynamic=False, backend="aot_eager")
    assert (model(tokens, sequences=documents) - truth).abs().max() <= 1e-5 * truth.abs().max()


def test_a_model_of_tokens_alone_trains_but_not_on_documents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = mine(tmp_path, *TAKES_TOKENS)
    assert torch.equal(train(tmp_path, 1, flags, steps=1).losses, train(tmp_path, 1, steps=1).losses)
    monkeypatch.setattr(batches, "Sequences", lambda *_: sequences_of(S, HALVES))
    said = r"mine.py: 1 problem\n  line \d+  Mine.forward = takes no `sequences`, and samples hold several documents\n"
    with pytest.raises(AssertionError, match=rf"ConfigError: .*{said}"):
        train(tmp_path, 1, flags, steps=1)
    monkeypatch.undo()
    split = [*flags, "--parallelism.context_parallel_degree", "2", "--training.seq_len", "256"]
    said = "takes no `sequences`, and context-parallel ranks have a part of each"
    with pytest.raises(AssertionError, match=f"Mine.forward = {said}"):
        train(tmp_path, 2, split, steps=1)
