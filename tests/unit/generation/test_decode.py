"""A model continues prompts as transformers does, with keys kept and without."""

import dataclasses
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.ranks.models.test_architectures import CASES, exported, fill
from titanlite.config.schema import Model
from titanlite.errors import CheckpointError, ConfigError
from titanlite.generation import decode, kept_keys
from titanlite.generation.decode import Decoder, Sampling, choose_tokens
from titanlite.models.experts import has_experts
from titanlite.models.find import model_class

GOLDEN = Path(__file__).with_name("transformers_tokens.json")
"""Of transformers 5.24: `generate` of each exported folder, one prompt after the other, greedy, float32."""
GREEDY = Sampling()
LENGTHS, LIMIT, CAPACITY = (1, 9, 3, 30, 5, 17, 2, 12), 64, 96


@pytest.fixture(autouse=True)
def room_for_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    name, dims = CASES["gpt2"]
    monkeypatch.setitem(CASES, "gpt2", (name, dataclasses.replace(dims, max_seq_len=CAPACITY)))


def model_of(case: str) -> nn.Module:
    name, dims = CASES[case]
    model = model_class(Model(name=name))(dims, CAPACITY).eval()
    fill(model)
    return model


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(1, 48, (n,), generator=generator).tolist() for n in LENGTHS]


def continued(model: nn.Module, limit: int = LIMIT, sampling: Sampling = GREEDY, **given: object) -> list[list[int]]:
    decoder = Decoder(model, torch.device("cpu"), None, CAPACITY, **given)  # type: ignore[arg-type]
    return [list(row) for row in zip(*decoder.continue_prompts(prompts(), limit, sampling), strict=True)]


@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_are_those_of_transformers(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where prompts are read in parts, of which some prompts have none."""
    truth, model = json.loads(GOLDEN.read_text())[case], model_of(case)
    assert continued(model) == truth
    monkeypatch.setattr(decode, "_PROMPT_TOKENS", 8 * 7)
    assert continued(model, limit=8) == [row[:8] for row in truth]


@pytest.mark.parametrize("case", ["llama3", "gemma3", "gpt2", "olmoe"])
def test_kept_keys_change_nothing(case: str) -> None:
    model = model_of(case)
    assert continued(model, 6, keeps_keys=False) == continued(model, 6, row_unit=3)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("default")  # transformers' own
def test_golden_tokens_are_what_transformers_generates(case: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(exported(case, model_of(case), tmp_path))
    given = {"max_new_tokens": LIMIT, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    for prompt, truth in zip(prompts(), json.loads(GOLDEN.read_text())[case], strict=True):
        ids = torch.tensor([prompt])
        assert theirs.generate(ids, attention_mask=torch.ones_like(ids), **given)[0, len(prompt) :].tolist() == truth


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_recorded_passes_change_nothing(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in several ranges of positions, each with a graph of its own, and while another thread pins memory."""
    monkeypatch.setattr(kept_keys, "_BUCKET", 32)
    replayed, replay = list[object](), torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: (replayed.append(graph), replay(graph)))
    device, model, is_done = torch.device("cuda"), model_of(case).to("cuda"), threading.Event()

    def pin() -> None:
        torch.cuda.set_device(0)
        pinned = list[Tensor]()
        while not is_done.is_set():
            pinned.append(torch.empty(2**18).pin_memory())

    with ThreadPoolExecutor(1) as thread:
        pinning = thread.submit(pin)
        try:
            plain, recorded = (
                [*Decoder(model, device, None, CAPACITY, records=records).continue_prompts(prompts(), LIMIT, GREEDY)]
                for records in (False, True)
            )
        finally:
            is_done.set()
        pinning.result()
    assert recorded == plain
    assert len(replayed) == (0 if has_experts(model) else LIMIT - 1)  # in float32 experts have no grouped kernel
    assert len(set(replayed)) in (0, 3)


def test_sampling_repeats_with_its_seed() -> None:
    model, sampling = model_of("llama3"), Sampling(temperature=1.0)
    first = continued(model, 8, sampling)
    assert continued(model, 8, sampling) == first
    assert continued(model, 8, dataclasses.replace(sampling, seed=1)) != first


def test_a_token_is_chosen_as_often_as_is_likely() -> None:
    p = torch.tensor([0.5, 0.3, 0.15, 0.05])
    logits = p.log().expand(20_000, 4)

    def shares(**given: float) -> Tensor:
        chosen = choose_tokens(logits, Sampling(**given), torch.Generator().manual_seed(0))  # type: ignore[arg-type]
        return torch.bincount(chosen, minlength=4) / len(chosen)

    for given, truth in (
        ({"temperature": 0.0}, torch.tensor([1.0, 0, 0, 0])),
        ({"temperature": 1.0}, p),
        ({"temperature": 0.5}, p**2 / (p**2).sum()),
        ({"temperature": 1.0, "top_k": 2}, torch.tensor([0.625, 0.375, 0, 0])),
        ({"temperature": 1.0, "top_p": 0.6}, torch.tensor([0.625, 0.375, 0, 0])),  # the second begins below 0.6
        ({"temperature": 1.0, "top_p": 0.01}, torch.tensor([1.0, 0, 0, 0])),
    ):
        assert (shares(**given) - truth).abs().max() < 0.015, given


def test_ids_beyond_the_tokenizer_are_never_chosen() -> None:
    assert max(max(row) for row in continued(model_of("llama3"), 8, Sampling(temperature=3.0), vocab_size=7)) < 7


@pytest.mark.parametrize("given", [{"temperature": -1}, {"top_p": 0}, {"top_k": -1}, {"seed": 2**63}])
def test_numbers_out_of_range_are_refused(given: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=f"  {next(iter(given))} = "):
        Sampling(**given)  # type: ignore[arg-type]


def test_weights_that_are_no_numbers_are_refused() -> None:
    model = model_of("llama3")
    model.norm.weight.data.fill_(torch.nan)  # type: ignore[union-attr]
    with pytest.raises(CheckpointError, match="logits that are no numbers"):
        continued(model, 2, requires_finite=True)
    assert len(continued(model, 2)[0]) == 2
