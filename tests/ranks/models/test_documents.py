"""Packed documents are what each is by itself: logits, loss and gradients, in float64, on every layout.

What models form in float32 is formed in float64 here (`Tensor.float`), and so are weights, their gradients and sums
over ranks: what is left is the rounding of sums in another order.
"""

import json
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.documents import sequences_of
from tests.support.needs import slow
from tests.support.own_model import mine
from tests.support.ranks import run_ranks
from tests.support.short_run import assemble, batches_of, checked, whole
from titanlite.config.schema import Config
from titanlite.data.batches import Batch
from titanlite.data.document_starts import document_starts, mask_documents
from titanlite.device import device_of
from titanlite.kernels.ignore_index import IGNORE_INDEX
from titanlite.models import own_model
from titanlite.models.find import build_model
from titanlite.models.layers import Sequences
from titanlite.parallel.initialise import fill_buffers, initialise
from titanlite.training import build
from titanlite.training.attention import torch_order
from titanlite.training.state import take_first_weights
from titanlite.training.step import train_step

ARCHITECTURES = ["llama3", "qwen3", "gemma3", "gpt2", "mine"]
B, S = 4, 48  # longer than gemma3's window of 32
SEPARATOR = 0

OWN = """
class Reversed(CausalAttention):
    def forward(self, q, k, v, sequences=None):
        return super().forward(q, k, -v, sequences)


INIT_STD"""


class Documents(NamedTuple):
    """B samples of random documents."""

    tokens: np.ndarray  # [B, S]
    targets: np.ndarray
    starts: np.ndarray


def documents(seed: int) -> Documents:
    """Draw documents of 1 to S tokens, separators alone, and one that is longer than a sample."""
    random, row = np.random.default_rng(seed), list[np.ndarray]()
    lengths = [S + S // 2, 1, 1, *random.integers(1, S + 1, 4 * B).tolist(), 1]
    random.shuffle(lengths)
    for length in lengths:
        row.append(np.append(random.integers(1, 256, length - 1), SEPARATOR))
    long = int(np.argmax(lengths))
    row[0], row[long] = row[long], row[0]  # within the first B samples
    ids = np.concatenate(row)[: B * S + 1]
    pair = np.stack((ids[:-1], ids[1:])).reshape(2, B, S).copy()
    starts = mask_documents(pair, np.full(B, SEPARATOR))
    return Documents(*pair, starts)


def each_by_itself(model: nn.Module, given: Documents) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Run each document alone; return logits [B · S, V], the mean loss and gradients.

    Documents are found by reading on to the next separator, or to the sample's end.
    """
    found, total, count = [], torch.zeros(()), 0
    for sample in given.tokens.tolist():
        while sample:
            n = sample.index(SEPARATOR) + 1 if SEPARATOR in sample else len(sample)
            at = sum(map(len, found))
            own, sample = torch.tensor(sample[:n]), sample[n:]
            logits = model(own, sequences=Sequences(n))
            # A document's last token is a separator, whose next is not its own, or its next is in another sample.
            targets = torch.from_numpy(given.targets.ravel()[at : at + n]).clone()
            expected = [*own[1:].tolist(), IGNORE_INDEX if own[-1] == SEPARATOR else targets[-1].item()]
            assert targets.tolist() == expected
            total = total + F.cross_entropy(logits, targets, reduction="sum")
            count += int((targets != IGNORE_INDEX).sum())
            found.append(logits)
    (total / count).backward()
    return torch.cat(found).detach(), (total / count).detach(), gradients(model)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def packed(model: nn.Module, given: Documents) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Run them as they are packed."""
    tokens, targets, starts = (torch.from_numpy(t).flatten() for t in given)
    logits = model(tokens, sequences=sequences_of(S, starts))
    loss = F.cross_entropy(logits, targets)
    loss.backward()
    return logits.detach(), loss.detach(), gradients(model)


def flags_of(name: str, folder: Path) -> list[str]:
    if name != "mine":
        return [f"--model.name={name}", "--model.flavor=debug"]
    changes = [("\nINIT_STD", OWN), ("self.attend = CausalAttention()", "self.attend = Reversed()")]
    return mine(folder, *changes)


def in_float64(set_attribute: Callable[..., object]) -> None:
    set_attribute(Tensor, "float", Tensor.double)
    set_attribute(own_model, "_no_masters", lambda made: ())  # which refuses parameters that are not float32
    torch.set_default_dtype(torch.float64)


@pytest.fixture
def float64(monkeypatch: pytest.MonkeyPatch):
    in_float64(monkeypatch.setattr)
    yield
    torch.set_default_dtype(torch.float32)


def fresh(folder: Path, flags: list[str]) -> nn.Module:
    asked = checked(folder, 1, [*flags, f"--training.seq_len={S}"])
    model = build_model(asked.config.model, asked.dims, S)
    model.to_empty(device="cpu")  # which unties
    if asked.dims.tied_embeddings:
        model.output.weight = model.tok_embeddings.weight
    fill_buffers(model)
    initialise(model, 0)
    return model


def differences(ours: tuple[Tensor, Tensor, dict[str, Tensor]], theirs: tuple[Tensor, Tensor, dict[str, Tensor]]):
    """The largest of logits, of the loss and of gradients, each relative to the largest number of its tensor."""
    (logits, loss, grads), (true_logits, true_loss, true_grads) = ours, theirs
    assert grads.keys() == true_grads.keys()
    pairs = [(logits, true_logits), (loss, true_loss), *((grads[name], truth) for name, truth in true_grads.items())]
    return [((a - b).abs().max() / b.abs().max()).item() for a, b in pairs]


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", ["llama3", "gpt2", "mine", "qwen3_moe", *slow("qwen3", "gemma3", "olmoe", "mixtral")])
def test_documents_are_what_each_is_by_itself(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for rounding, 1.1e-16 of each of some thousand terms of a sum in two blocks; 1e-12 is ten times that.

    A boundary that is off by one, in one document of all, is far beyond it.
    """
    model, given = fresh(tmp_path, flags_of(name, tmp_path)), documents(seed=1)
    truth = each_by_itself(model, given)
    model.zero_grad()
    assert max(differences(packed(model, given), truth)) <= 1e-12
    right = given.starts.ravel()
    begins = next(at for at in right if at % S > 2 and (right == at).sum() > 2 and (right == right[at - 1]).sum() > 2)
    for moved in (1, -1):
        wrong = np.where(right == begins, begins + moved, right)
        wrong[begins if moved > 0 else begins - 1] = right[begins - 1] if moved > 0 else begins - 1
        model.zero_grad()
        assert min(differences(packed(model, given._replace(starts=wrong.reshape(B, S))), truth)) > 1e-9


def trained(folder: Path, ranks: int, flags: list[str]) -> dict[str, Tensor]:
    """Take one step over the documents, and return weights, gradients and the loss: whole, of all ranks."""
    asked = checked(folder, ranks, [*flags, f"--training.seq_len={S}", f"--training.global_batch_size={B}"])
    training = replace(asked.config.training, mixed_precision_param="float64")  # type: ignore[arg-type]
    asked = replace(asked, config=replace(asked.config, training=training))
    given = documents(seed=1)

    def reducing_in_float64(make: Callable[..., None]) -> Callable[..., None]:
        def with_config(model: nn.Module, config: Config, *others: Any) -> None:
            of_sums = replace(config.training, mixed_precision_reduce="float64")  # type: ignore[arg-type]
            make(model, replace(config, training=of_sums), *others)

        return with_config

    def body() -> None:
        in_float64(setattr)
        build.apply_fsdp, build.finalize = map(reducing_in_float64, (build.apply_fsdp, build.finalize))
        run = assemble(asked)
        named, found = dict(run.model.named_parameters()), dict[str, Tensor]()
        found |= {f"weight/{name}": whole(p) for name, p in named.items()}
        run.optimizer.step = lambda *_: found.update({f"gradient/{name}": whole(p.grad) for name, p in named.items()})
        local, rank, size = training.local_batch_size, run.mesh.dp_rank, run.mesh.dp_size
        micro_batches = []
        for first in range(rank * local, B, size * local):
            mine = slice(first, first + local)
            tokens, targets = (torch.from_numpy(t[mine]).flatten() for t in (given.tokens, given.targets))
            starts = document_starts(given.tokens[mine], np.full(local, SEPARATOR))
            micro_batches.append(Batch(tokens, targets, sequences_of(S, torch.from_numpy(starts).flatten())))
        found["loss"] = train_step(run, micro_batches, 0.0, False)["loss"]
        if dist.get_rank() == 0:
            torch.save(found, folder / "found.pt")

    run_ranks(body, folder, ranks, 120)
    return torch.load(folder / "found.pt")


TP_2 = "--parallelism.tensor_parallel_degree=2"
TWO, LAYOUTS = "--training.local_batch_size=2", {"fsdp2": (2, []), "tp2": (2, [TP_2]), "fsdp2-tp2": (4, [TP_2])}
SAVE_LISTS = ["none", "full", "attention", "balanced", "balanced_tight", "matmuls", "every_second_matmul"]
DEFAULT = {("mine", "fsdp2", "every_second_matmul")}
CASES = [
    pytest.param(name, layout, save_list, marks=[] if (name, layout, save_list) in DEFAULT else pytest.mark.slow)
    for name in ARCHITECTURES
    for layout in LAYOUTS
    for save_list in SAVE_LISTS
]


@pytest.mark.parametrize(("name", "layout", "save_list"), CASES)
def test_layouts_and_save_lists_compute_the_same(
    name: str, layout: str, save_list: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (ranks, split), own = LAYOUTS[layout], flags_of(name, tmp_path)
    found = trained(tmp_path, ranks, [*own, *split, TWO, f"--activation_checkpoint.recipe={save_list}"])
    in_float64(monkeypatch.setattr)
    try:
        model = fresh(tmp_path, own)
        model.load_state_dict({key[7:]: t for key, t in found.items() if key.startswith("weight/")}, strict=False)
        _, loss, grads = each_by_itself(model, documents(seed=1))
    finally:
        torch.set_default_dtype(torch.float32)
    assert grads.keys() == {key[9:] for key in found if key.startswith("gradient/")}
    errors = [((found[f"gradient/{key}"] - t).abs().max() / t.abs().max()).item() for key, t in grads.items()]
    assert max([abs(found["loss"] - loss).item(), *errors]) <= 1e-12


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores")
def test_steps_neither_wait_for_the_gpu_nor_compile_again(tmp_path: Path) -> None:
    """Over other documents in each: after the first steps torch raises where the host waits or a graph is compiled."""
    heads = ["--model.n_heads=4", "--model.n_kv_heads=2"]  # 64 wide
    shape = ["--training.seq_len=512", "--training.local_batch_size=2", "--compile.enable=true"]
    shape.append("--training.mixed_precision_param=bfloat16")  # of the kernel for Hopper
    source, lengths = (
        tmp_path / "short.jsonl",
        torch.randint(1, 600, (2000,), generator=torch.Generator().manual_seed(0)),
    )
    source.write_text("".join(json.dumps({"text": "x" * n}) + "\n" for n in lengths.tolist()))
    asked = checked(tmp_path, 1, [*heads, *shape, "--data.document_mask=true", f"--data.source={source}"])
    steps, documents_of_steps = 100, set[int]()
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)  # as the trainer's own process group does
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        run = build.build(asked, device_of(device))
        take_first_weights(run)
        with closing(batches_of(run)) as found, torch_order():
            for step in range(steps):
                micro_batches = found.next()
                documents_of_steps.add(sum(len(batch.sequences.starts.unique()) for batch in micro_batches))
                if step >= 3:
                    torch.cuda.set_sync_debug_mode("error")
                    torch._dynamo.config.error_on_recompile = True
                result = train_step(run, micro_batches, 1e-4, False)
                torch.cuda.set_sync_debug_mode("default")
        assert torch.isfinite(torch.stack([*result.values()])).all()
        assert len(documents_of_steps) > 3
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch._dynamo.config.error_on_recompile = False
        dist.destroy_process_group()
