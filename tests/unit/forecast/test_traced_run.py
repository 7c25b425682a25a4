"""Traces of blocks that no shipped model has: what a file of one's own is predicted by, without a word of its own."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.support.held_for_backward import held_eager, stream
from tests.support.measured import MEASURED_CONFIGS
from titanlite import recipes
from titanlite.config.recipe_schema import ModelDims
from titanlite.config.schema import Compile, Config, Data, Float8, Model, Training
from titanlite.forecast.activation_cost import activations, held_without_checkpointing
from titanlite.forecast.choose_save_list import expensive
from titanlite.forecast.memory import MemoryModel
from titanlite.forecast.search import LEAST
from titanlite.forecast.traced_run import traced_run
from titanlite.models.find import build_model
from titanlite.preflight.checked_run import checked_run
from titanlite.training.assemble import assembled

S, DIMS = 48, ModelDims("", 2, 64, 4, 4, 256, vocab_size=32, rope_theta=1e4, norm_eps=1e-5)
PARALLEL = '''
"""Attention and feed-forward beside each other, with one matmul in front of both and one behind."""
import torch
import torch.nn.functional as F
from torch import nn
from titanlite.models.layers import CausalAttention, Embedding, Linear, RMSNorm


class Block(nn.Module):
    def __init__(self, dims):
        super().__init__()
        self.heads, self.dim, self.ffn = dims.n_heads, dims.dim, dims.ffn_dim
        self.norm = RMSNorm(dims.dim, dims.norm_eps)
        self.into = Linear(dims.dim, {"into": 3 * dims.dim + dims.ffn_dim}, std=0.02)
        self.attend = CausalAttention()
        self.out = Linear(dims.dim + dims.ffn_dim, {"out": dims.dim}, std=0.02)

    def forward(self, x, cos, sin):
        *qkv, up = self.into(self.norm(x)).split([self.dim] * 3 + [self.ffn], dim=1)
        q, k, v = (t.unflatten(0, (-1, len(cos))).unflatten(2, (self.heads, -1)).transpose(1, 2) for t in qkv)
        attended = self.attend(q, k, v).transpose(1, 2).flatten(2).flatten(0, 1)
        return x + self.out(torch.cat((attended, F.relu(up)), dim=1))


class Mine(nn.Module):
    def __init__(self, dims, seq_len):
        super().__init__()
        self.tok_embeddings = Embedding(dims.vocab_size, dims.dim, 0.02)
        self.layers = nn.ModuleList(Block(dims) for _ in range(dims.n_layers))
        self.norm = RMSNorm(dims.dim, dims.norm_eps)
        self.output = Linear(dims.dim, {"output": dims.vocab_size}, std=0.02)
        self.register_buffer("cos", torch.empty(seq_len, 8), persistent=False)
        self.register_buffer("sin", torch.empty(seq_len, 8), persistent=False)

    def fill_buffers(self):
        self.cos, self.sin = torch.ones_like(self.cos), torch.zeros_like(self.sin)

    def forward(self, tokens):
        x = self.tok_embeddings(tokens)
        for block in self.layers:
            x = block(x, self.cos, self.sin)
        return self.output(self.norm(x))
'''


@pytest.fixture
def config(tmp_path: Path) -> Config:
    mine = tmp_path / f"{tmp_path.name}.py"
    mine.write_text(PARALLEL)
    training = Training(seq_len=S, local_batch_size=2, mixed_precision_param="float32")
    data = Data(document_mask=False)  # its forward takes no `sequences`
    return Config(model=Model(file=str(mine)), data=data, training=training, compile=Compile(False))


def test_a_parallel_block_holds_what_is_predicted(config: Config) -> None:
    """Every byte of it, in eager mode on a CPU; and its parts are found, in the order in which they run."""
    run = traced_run(config, DIMS, None)
    assert [(a.op.split(".")[1], a.layer) for a in activations(run.blocks[0])] == [
        ("mean", "into"),
        ("mm", "into"),
        ("_scaled_dot_product_cudnn_attention", ""),
        ("mm", "out"),
    ]
    model = build_model(config.model, DIMS, S)
    model.to_empty(device="cpu")
    model.fill_buffers()
    model.layers[0].attention = nn.Module()  # where the helper looks for a window
    model.layers[0].attention.attend = model.layers[0].attend
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.02)
    x: Tensor = stream(2 * S, DIMS.dim, torch.float32)
    assert held_eager(model, x).bytes == held_without_checkpointing(run.blocks[0], compiled=False)


def test_it_has_prices_a_peak_and_groups_for_auto(config: Config) -> None:
    memory = MemoryModel(config, DIMS, None, recipes.load("optimizer", "adamw"), 2)
    D, F = DIMS.dim, DIMS.ffn_dim
    of_block = D * (3 * D + F) + (D + F) * D + D
    assert memory.parameters == 2 * of_block + 2 * 32 * D + D
    assert memory.peak_under(LEAST).total > 12 * memory.parameters // 2
    assert [(rule.op, rule.module) for rule in expensive(memory.run)] == [
        ("matmul", ("into",)),
        ("attention", ()),
        ("matmul", ("out",)),
    ]


def test_float8_of_some_blocks_makes_two_kinds(config: Config) -> None:
    half = replace(config, float8=Float8("rowwise", filter_fqns=("layers.0", "output")), compile=Compile(True))
    plain, converted = traced_run(half, DIMS, recipes.load("float8", "rowwise")).blocks
    assert "titanlite.scaled_matmul.default" not in {a.op for a in activations(plain)}
    assert "titanlite.scaled_matmul.default" in {a.op for a in activations(converted)}


def test_a_trace_is_that_of_the_attention_of_its_device() -> None:
    """Between two traces of an unknown device, one of an H100: the cache tells them apart."""
    asked = checked_run(["--config", str(MEASURED_CONFIGS / "llama3_8b.toml"), "--data.document_mask", "false"])
    of_torch = "aten._scaled_dot_product_flash_attention_for_cpu"
    for gpu, kernel in (None, of_torch), ("h100", "titanlite.attention"), (None, of_torch):
        with assembled(asked, 4, gpu) as made:
            for run in made.memory.run, traced_run(asked.config, asked.dims, asked.float8):
                assert f"{kernel}.default" in [operation.op for operation in run.blocks[0].forward]
