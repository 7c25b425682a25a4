"""A mixture of experts trains to the same numbers whatever ranks have its experts, and resumes under another degree.

A layer's own results are equal to the bit (`tests/ranks/kernels/test_expert_parallel.py`). Without expert parallelism
each rank sums the gradient of a weight over its own tokens, and FSDP sums those: another order of the same terms, so
the bounds of `tests/ranks/training/test_layouts.py` hold.
"""

import pytest
import torch

from tests.support.needs import slow
from tests.support.ranks import run_ranks
from tests.support.short_run import Trained, assemble, checked, take_steps, train
from titanlite.parallel.placed_units import PlacedGroup

MOE = ["--model.name", "qwen3_moe", "--optimizer.lr", "3e-4"]
DEGREE = "--parallelism.expert_parallel_degree"
REPLICAS = ["--parallelism.data_parallel_replicate_degree", "2"]
BFLOAT16 = ["--training.mixed_precision_param", "bfloat16"]


def off_by(got: Trained, truth: Trained) -> dict[str, float]:
    """What differs, relative to the largest of its kind: the loss and the norm of any step, gradients of the first."""
    errors = {
        "loss": ((got.losses - truth.losses) / truth.losses).abs().max().item(),
        "norm": ((got.norms - truth.norms) / truth.norms).abs().max().item(),
    }
    for name, gradient in truth.gradients.items():
        errors[name] = ((got.gradients[name].double() - gradient).abs().max() / gradient.abs().max()).item()
    return errors


EXACT, ROUNDED = (1e-6, 1e-6), (1e-3, 2e-2)
# Ranks, flags of both, those of the other, steps; how far its losses, and all else, may be off.
ALIKE = [
    (2, [], [DEGREE, "2"], 3, EXACT),
    *slow(
        (4, [], [DEGREE, "4"], 10, EXACT),
        (4, [], [DEGREE, "2"], 10, EXACT),
        (4, [], [DEGREE, "2", *REPLICAS], 10, EXACT),
        # Compiled, gradients of the norms of queries and keys add up tokens and heads in another order.
        (2, [DEGREE, "2"], ["--compile.enable"], 3, (1e-6, 2e-6)),
        *(
            (2, [DEGREE, "2"], ["--activation_checkpoint.recipe", n], 3, (0, 0))
            for n in ("full", "balanced", "matmuls")
        ),
        # Gradients of experts are rounded once for all tokens, instead of once on each rank: to 2^-8 of each.
        (4, BFLOAT16, [DEGREE, "4"], 10, ROUNDED),
        # Scales of columns are over the experts that a rank has.
        *((4, [*BFLOAT16, "--float8.recipe=rowwise"], [DEGREE, n], 5, (2e-3, 4e-2)) for n in ("2", "4")),
    ),
]


@pytest.mark.parametrize(("world", "both", "other", "steps", "bounds"), ALIKE)
def test_a_mixture_trains_alike(world, both, other, steps, bounds, tmp_path):
    truth = train(tmp_path, world, [*MOE, *both], steps=steps)
    got = train(tmp_path, world, [*MOE, *both, *other], steps=steps, timeout_s=300)
    assert truth.gradients.keys() == got.gradients.keys() == got.weights.keys()
    assert all(torch.equal(got.weights[name], weight) for name, weight in truth.weights.items())
    errors = off_by(got, truth)
    assert errors["loss"] <= bounds[0]
    assert max(errors.values()) <= bounds[1], {name: error for name, error in errors.items() if error > bounds[1]}
    if BFLOAT16[0] in both:
        assert got.losses[0] == truth.losses[0]


OWN = """
from torch import nn

from titanlite.models import moe
from titanlite.models.experts import MixtureOfExperts
from titanlite.models.layers import Sequences


class Twice(moe.Qwen3MoEBlock):
    def __init__(self, dims):
        super().__init__(dims)
        self.more = nn.ModuleDict({"experts": MixtureOfExperts(dims, 0.02, 0.01)})

    def forward(self, x, cos, sin, sequences):
        h = super().forward(x, cos, sin, sequences)
        return h + self.more["experts"](h)


class Dense(moe.Qwen3MoEBlock):
    def __init__(self, dims):
        super().__init__(dims)
        del self.experts

    def forward(self, x, cos, sin, sequences):
        return x + self.attention(self.ffn_norm(self.attention_norm(x)), cos, sin, sequences)


class Mine(moe.Qwen3MoE):
    def __init__(self, dims, seq_len):
        super().__init__(dims, seq_len)
        self.layers = nn.ModuleList(kind(dims) for kind in (Twice, Dense, moe.Qwen3MoEBlock))
        self.between = MixtureOfExperts(dims, 0.02, 0.01)

    def forward(self, tokens, sequences=None):
        sequences = sequences or Sequences(self.seq_len)
        cos, sin = (sequences.begin(table) for table in (self.cos, self.sin))
        x = self.tok_embeddings(tokens)
        for block in self.layers:
            x = block(x, cos, sin, sequences)
        return self.output(self.norm(x + self.between(x)))

    def fill_buffers(self):
        super(moe.Mixtral, self).fill_buffers()
        for module in self.modules():
            if isinstance(module, MixtureOfExperts):
                module.fill_buffers()
"""


def test_experts_are_gathered_while_backward_is_in_the_block_behind(tmp_path, monkeypatch) -> None:
    asked = checked(tmp_path, 4, [*MOE, "--model.n_layers", "3", DEGREE, "2"])
    gather, after = PlacedGroup._gather, PlacedGroup.post_backward
    seen: list[str] = []

    def note_gather(self):
        seen.append(f"gather {self.fsdp_params[0]._param_fqn}")
        gather(self)

    def note_after(self, *args):
        seen.append(f"after {self.fsdp_params[0]._param_fqn}")
        return after(self, *args)

    monkeypatch.setattr(PlacedGroup, "_gather", note_gather)
    monkeypatch.setattr(PlacedGroup, "post_backward", note_after)

    def body() -> None:
        run = assemble(asked)
        seen.clear()
        take_steps(run, 1)
        backward = seen[1 + max(i for i, what in enumerate(seen) if what.startswith("gather tok")) :]
        first, rest = "layers.{}.attention_norm.weight", "layers.{}.experts.w13.weight"
        forward = [f"gather {part.format(n)}" for n in range(3) for part in (first, rest)]
        assert [what for what in backward if what in forward][:6] == forward
        backward = [what for what in backward if what in forward or what.startswith("after")][6:]
        for n in (0, 1):
            behind = backward.index(f"after {rest.format(n + 1)}")
            assert all(backward.index(f"gather {part.format(n)}") < behind for part in (first, rest))

    run_ranks(body, tmp_path, 4)
