"""Model files of one's own that would compute something else when they are split are refused before the first step."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import dropout

from tests.support.ranks import run_ranks
from titanlite import recipes
from titanlite.config.schema import Config, Job, Parallelism, Training
from titanlite.device import CPU
from titanlite.errors import ShardingError
from titanlite.models.layers import Sequences
from titanlite.models.llama3 import Attention, Block, FeedForward, Llama3
from titanlite.parallel.mesh import build_mesh
from titanlite.parallel.parity import require_parity
from titanlite.parallel.tensor import LayerPlan
from titanlite.sharding.layers import plan_layers

TOKENS, RANKS = 128, 2
DIMS = replace(recipes.load("model", "llama3-debug"), n_layers=3)
D, F = DIMS.dim, DIMS.ffn_dim  # 256, 768


class Mine(Llama3):
    """A model of one's own, whose parts do something of their own where one of the functions below says so."""

    through: Callable[["Mine", Tensor], Tensor]

    def forward(self, tokens: Tensor) -> Tensor:
        """[M] → [M, V]."""
        x = self.tok_embeddings(tokens)
        return self.through(self, x) if hasattr(self, "through") else self.rest(x)

    def rest(self, x: Tensor) -> Tensor:
        """[M, D] → [M, V]."""
        for block in self.layers:
            x = block(x, self.cos, self.sin, Sequences(self.seq_len))
        return self.output(self.norm(x))


class Mlp(FeedForward):
    """A feed-forward with a step of its own between its projections."""

    inside: Callable[[Tensor, FeedForward], Tensor]

    def forward(self, x: Tensor) -> Tensor:
        """[M, D] → [M, D]."""
        h = self.w13(x).unflatten(-1, (-1, 2, 128)).sum(-2).flatten(-2)  # [M, F]
        return self.w2(self.inside(h, self))


class Between(Block):
    """A block with a step of its own between its sublayers."""

    between: Callable[[Tensor, Block], Tensor]

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, sequences: Sequences) -> Tensor:
        """[M, D] → [M, D]."""
        h = x + self.attention(self.attention_norm(x), cos, sin, sequences)
        return h + self.feed_forward(self.between(h, self))


class WithBackward(torch.autograd.Function):
    """Twice a tensor; its gradient is what a function makes of it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, of_gradient: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.of_gradient = of_gradient
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.of_gradient(g, *ctx.saved_tensors), None


class Scaled(torch.autograd.Function):
    """Rows times a vector; the gradient of the vector is what a function makes of a rank's sum over its tokens."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, of_weight: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.of_weight = of_weight
        return x * w

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x, w = ctx.saved_tensors
        return g * w, ctx.of_weight((g * x).sum(0), w), None


def inside(step: Callable[[Tensor, FeedForward], Tensor]) -> Callable[[Mine], None]:
    """A step in the feed-forward of each block, where features are split."""

    def change(model: Mine) -> None:
        for block in model.layers:
            block.feed_forward.__class__ = Mlp
            block.feed_forward.inside = step  # type: ignore[assignment]

    return change


def between(step: Callable[[Tensor, Block], Tensor]) -> Callable[[Mine], None]:
    """A step between the sublayers of each block, where tokens are split."""

    def change(model: Mine) -> None:
        for block in model.layers:
            block.__class__ = Between
            block.between = step  # type: ignore[assignment]

    return change


def through(forward: Callable[[Mine, Tensor], Tensor]) -> Callable[[Mine], None]:
    """From the embeddings to the logits."""
    return lambda model: setattr(model, "through", forward)


def backward(step: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Mine], None]:
    return inside(lambda h, _: WithBackward.apply(h, step))


def of_weight(step: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Mine], None]:
    """The gradient of a norm's scale."""
    return between(lambda h, block: Scaled.apply(block.ffn_norm(h), block.ffn_norm.scale(), step))


def by_global_head(h: Tensor, _: FeedForward) -> Tensor:
    heads = h.unflatten(-1, (-1, 128))
    slopes = torch.arange(F // 128, device=h.device).to(h.dtype)  # of all heads
    return (heads * slopes[: heads.shape[1], None]).flatten(-2)


def between_blocks(self: Mine, x: Tensor) -> Tensor:
    for n, block in enumerate(self.layers):
        x = block(x if n == 0 or len(x) == TOKENS else x * 2, self.cos, self.sin, Sequences(self.seq_len))
    return self.output(self.norm(x))


def with_a_block_left_out(self: Mine, x: Tensor) -> Tensor:
    for n, block in enumerate(self.layers):
        x = block(x, self.cos, self.sin, Sequences(self.seq_len)) if n == 0 or len(x) == TOKENS else x
    return self.output(self.norm(x))


def scaled_logits(self: Mine, x: Tensor) -> Tensor:
    y = self.rest(x)
    return y / y.shape[-1]


def by_number(self: Mine, x: Tensor) -> Tensor:
    first = x
    for n in range(DIMS.n_layers):
        x = self.layers[n](x, sequences=Sequences(self.seq_len), sin=self.sin, cos=self.cos) + first * n
    return self.output(self.norm(x))


def of_another_kind(model: Mine) -> None:
    """The second block alone is wrong."""
    inside(lambda h, _: h / F)(model)
    model.layers[1].feed_forward.inside = lambda h, _: h / h.shape[-1]  # type: ignore[union-attr]


def by_heads(model: Mine) -> None:
    class Own(Attention):
        def forward(self, x: Tensor, cos: Tensor, sin: Tensor, sequences: Sequences) -> Tensor:
            return super().forward(x, cos, sin, sequences) / self.wqkv.weight.shape[0]

    for block in model.layers:
        block.attention.__class__ = Own


def in_bfloat16_alone(step: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Block], Tensor]:
    """A step of one dtype, as a kernel of one's own may be."""

    def only(h: Tensor, block: Block) -> Tensor:
        assert h.dtype == torch.bfloat16
        return step(block.ffn_norm(h))

    return only


def over_tokens_and_heads(g: Tensor, x: Tensor) -> Tensor:
    heads = g.unflatten(-1, (-1, 128))
    h = (heads * heads.softmax(-1) - heads.mean(-1, keepdim=True)).reshape(g.shape)
    return h.cumsum(0) + g * torch.sigmoid(x) + h.amax(0)


BLOCK, AROUND = "layers.0: ", "around the blocks: "
RETURNS, GIVEN = f"{BLOCK}what layers.0 returns = differs", f"{BLOCK}the gradient of what layers.0 is given = differs"
NORM = f"{BLOCK}the gradient of ffn_norm.weight = differs"

WRONG = {
    "a size read off a part": (inside(lambda h, _: h / h.shape[-1]), RETURNS),
    "of the weight": (by_heads, RETURNS),
    "a shape of the whole": (inside(lambda h, _: h.view(-1, F // 128, 128).flatten(-2)), "line "),
    "dropout of a part": (inside(lambda h, _: dropout(h, 0.1)), RETURNS),
    "only one kind of blocks": (of_another_kind, "layers.1: what layers.1 returns = differs"),
    "between blocks": (through(between_blocks), f"{AROUND}what layers.0 is given = differs"),
    "a block left out": (through(with_a_block_left_out), f"{AROUND}the calls of the blocks"),
    "logits by their number": (through(scaled_logits), f"{AROUND}the logits = differs"),
    "backward: a sum of features": (backward(lambda g, x: g - (g * x).sum(-1, keepdim=True)), GIVEN),
    "backward: a shape": (backward(lambda g, x: g.view(-1, F) * 2), "model.file = RuntimeError: Function WithBackward"),
    "in bfloat16 alone": (between(in_bfloat16_alone(lambda h: h * len(h))), RETURNS),
    "backward: of norm one": (of_weight(lambda g, w: g / g.norm()), NORM),
}
RIGHT = {
    "sizes of the model": (inside(lambda h, _: (h.view(-1, h.shape[1] // 128, 128) / F).flatten(-2))),
    "no dropout": inside(lambda h, mlp: dropout(dropout(h, 0.0), 0.1, not mlp.training)),
    "random for all": inside(lambda h, _: h * torch.rand((), device=h.device).to(h.dtype)),
    "blocks by their numbers": through(by_number),
    "backward: over tokens and heads": backward(over_tokens_and_heads),
    "in bfloat16 alone": between(in_bfloat16_alone(lambda h: h * D)),
    "backward: zero": of_weight(lambda g, w: torch.zeros_like(g)),
}


def changed(change: Callable[[Mine], None]) -> Mine:
    with torch.device("meta"):
        model = Mine(DIMS, TOKENS // 2)
    change(model)
    return model


def layers_of(model: Mine) -> dict[str, LayerPlan]:
    return dict(plan_layers(model, TOKENS, RANKS, torch.bfloat16).layers)


def said(change: Callable[[Mine], None], layers: Mapping[str, LayerPlan], strict: bool = True) -> str:
    """What is said of a model, or of what the receipt misses; else nothing."""
    model = changed(change)
    held = dict(model.named_parameters())
    config = Config(training=Training(seq_len=TOKENS // 2, local_batch_size=2), job=Job(strict=strict))
    mesh = build_mesh(Parallelism(tensor_parallel_degree=RANKS), CPU)
    try:
        entry = require_parity(model, layers, mesh, config)
    except ShardingError as error:
        return str(error)
    finally:  # the model is as it was
        assert all(held[name] is p and p.dtype == torch.float32 for name, p in model.named_parameters())
        assert not any("forward" in vars(module) for module in model.modules())
    assert entry.count > 0
    return "; ".join(f"{case.what} = {case.why}" for case in entry.missed)


@pytest.fixture(scope="module")
def plain() -> dict[str, LayerPlan]:
    """What the layers of all these models do: what is changed stands between layers."""
    return layers_of(changed(lambda model: None))


@pytest.fixture(scope="module")
def messages(plain: dict[str, LayerPlan], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What is said of all models; all ranks say the same."""

    def body() -> None:
        of_all = {f"wrong: {name}": said(change, plain) for name, (change, _) in WRONG.items()}
        of_all |= {name: said(change, plain) for name, change in RIGHT.items()}
        print(json.dumps(of_all | {"not strict": said(WRONG["a size read off a part"][0], plain, strict=False)}))

    outs = run_ranks(body, tmp_path_factory.mktemp("parity"), RANKS)
    first, second = (json.loads(out.splitlines()[-1]) for out in outs)
    assert first == second
    return first


@pytest.mark.parametrize("name", WRONG)
def test_what_differs_is_refused(name: str, messages: dict[str, str]) -> None:
    message = messages[f"wrong: {name}"]
    assert message.startswith(f"{__file__}: "), message
    assert f"\n  {WRONG[name][1]}" in message, message
    assert "\n      fix:  take sizes from the model's dimensions" in message


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_the_same_is_not(name: str, messages: dict[str, str]) -> None:
    assert messages[name] == ""


def test_the_receipt_says_what_differs_without_strict(messages: dict[str, str]) -> None:
    assert messages["not strict"].startswith("layers.0: what layers.0 returns = differs by ")


@pytest.mark.slow
def test_a_buffer_by_global_head_is_refused_by_the_plan() -> None:
    model = changed(inside(by_global_head))
    with pytest.raises(ShardingError, match=r"of layers\.0\.feed_forward \[6, 1\] = R, needed as S\(0\) by mul"):
        plan_layers(model, TOKENS, RANKS)
