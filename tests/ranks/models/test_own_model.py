"""A model of one's own has its tensors where a run finds them, each under one name, or is refused before it runs."""

from pathlib import Path

import pytest
import torch

from tests.ranks.models.test_find import BATCH, DEBUG, TP_2, assert_same
from tests.support.own_model import Change, mine
from tests.support.short_run import checked, train
from titanlite import recipes
from titanlite.commands.plan import run as plan
from titanlite.config.schema import Model
from titanlite.errors import ConfigError
from titanlite.models.find import build_model
from titanlite.train import main as train_main
from titanlite.training.assemble import try_assembly

SIZES = recipes.load("model", "llama3-debug")

W2 = 'self.w2 = Linear(dims.ffn_dim, {"w2": dims.dim}, std=residual_std)'
IMPORT = "from titanlite.models.layers import CausalAttention, Embedding, Linear, RMSNorm, Sequences\n"


def in_front_of(line: str, code: str) -> Change:
    return line, f"{code}\n        {line}"


def in_model(code: str) -> Change:
    """At the end of the model's `__init__`."""
    return in_front_of("if dims.tied_embeddings:", code)


def in_block(code: str) -> Change:
    """Behind the last part of a block."""
    line = "self.feed_forward = FeedForward(dims, residual_std)"
    return line, f"{line}\n        {code}"


def refused(folder: Path, *changes: Change) -> str:
    """What is said of such a model, behind its file."""
    mine(folder, *changes)
    with pytest.raises(ConfigError) as caught:
        build_model(Model(file=str(folder / "mine.py")), SIZES, 64)
    return str(caught.value).removeprefix(f"{folder}/mine.py: ")


@pytest.mark.parametrize(
    ("code", "saw"),
    [
        (
            "self.layers[1].ffn_norm.weight = self.layers[0].ffn_norm.weight",
            "layers.0.ffn_norm.weight = the same parameter as layers.1.ffn_norm.weight",
        ),
        (
            "self.layers[1].feed_forward = self.layers[0].feed_forward",
            "layers.0.feed_forward.w13.weight = the same parameter as layers.1.feed_forward.w13.weight",
        ),
        ("self.head = self.output", "output.weight = the same parameter as head.weight"),
        (
            "self.more = Embedding(8, 8, 1.0); self.more.weight = self.output.weight = self.tok_embeddings.weight",
            "tok_embeddings.weight = the same parameter as output.weight and 1 more",
        ),
    ],
)
def test_weights_of_two_names_are_refused(code: str, saw: str, tmp_path: Path) -> None:
    said = refused(tmp_path, in_model(code))
    assert f"\n  {saw}" in said
    assert "\n      want: one name for each weight, but for an output.weight that is tied to tok_embeddings" in said


def test_a_tied_head_is_not_refused(tmp_path: Path) -> None:
    mine(tmp_path, in_model("self.output.weight = self.tok_embeddings.weight"))
    made = build_model(Model(file=str(tmp_path / "mine.py")), SIZES, 64)
    assert made.output.weight is made.tok_embeddings.weight


SECOND = """class Second(Block):
    def __init__(self, dims):
        super().__init__(dims)
        self.gate = Linear(dims.dim, {"gate": dims.dim}, std=INIT_STD)

    def forward(self, x, cos, sin, sequences):
        h = x - self.attention(self.attention_norm(x), cos, sin, sequences)
        return h + self.gate(h) * self.feed_forward(self.ffn_norm(h))


"""


def test_blocks_of_two_classes_keep_their_own_forward_under_a_save_list(tmp_path: Path) -> None:
    two = "(Block, Second)[n % 2](dims) for n in range(dims.n_layers)"
    model = "class Mine(nn.Module)"
    flags = mine(tmp_path, (model, SECOND + model), ("self.block(dims) for _ in range(dims.n_layers)", two))
    truth = train(tmp_path, 1, flags, steps=1)
    (tmp_path / "list.toml").write_text(
        'help = "x"\ndefault = "recompute"\n[[rules]]\nop = "matmul"\nmodule = ["gate", "wo"]\naction = "save"\n'
        '[[rules]]\nop = "aten.bmm.default"\naction = "save"\noptional = true\n'
    )
    for name in ("full", str(tmp_path / "list.toml")):
        listed = [*flags, "--activation_checkpoint.recipe", name]
        try_assembly(checked(tmp_path, 1, listed), 1)
        got = train(tmp_path, 1, listed, steps=1)
        assert torch.equal(got.losses, truth.losses)
        for parameter, gradient in truth.gradients.items():
            assert torch.equal(got.gradients[parameter], gradient), parameter


SCALES = [
    in_model("for n, block in enumerate(self.layers): block.scale = 1 / (n + 1)"),
    ("return h + self.feed_forward(normed)", "return h + self.feed_forward(normed) * self.scale"),
]


@pytest.mark.slow
@pytest.mark.usefixtures("without_machine_code")
def test_each_block_may_have_a_graph_of_its_own(tmp_path: Path) -> None:
    """Of 32 blocks with numbers of their own the ninth ended the run, and of six the ninth graph, in validation."""
    flags = mine(tmp_path, *SCALES)
    truth = train(tmp_path, 1, flags, steps=1)
    with torch._dynamo.config.patch(recompile_limit=1, accumulated_recompile_limit=1):
        assert_same(train(tmp_path, 1, [*flags, "--compile.enable"], steps=1), truth, 1e-5)


def test_the_last_norm_is_called_as_a_module_but_below_a_tied_head(tmp_path: Path) -> None:
    """Its weight was a DTensor in `fork`, of which torch said no more than that."""
    flags = mine(tmp_path, ("self.norm(x)", "self.norm.fork(x)[0]"))
    with pytest.raises(ConfigError, match="norm = fork or add called"):
        plan([DEBUG, *flags, *TP_2])
    recipe = tmp_path / "model" / "mine-small.toml"
    recipe.write_text(f"{recipe.read_text()}\ntied_embeddings = true\n")
    train(tmp_path, 1, flags, steps=1)  # the root is gathered first


def test_a_forward_of_one_object_is_refused_under_tensor_parallelism(tmp_path: Path) -> None:
    """It ran in place of the layer's, without its collectives."""
    code = "import types; w2 = self.layers[0].feed_forward.w2; w2.forward = types.MethodType(Linear.forward, w2)"
    with pytest.raises(ConfigError, match=r"layers\.0\.feed_forward\.w2 = Linear\n +want: a layer of titanlite"):
        plan([DEBUG, *mine(tmp_path, in_model(code)), *TP_2])


MLP = "return self.w2(swiglu(self.w13(x)))"


def test_what_would_differ_when_split_is_refused_before_the_first_step(tmp_path: Path) -> None:
    flags = [*mine(tmp_path, (MLP, "h = swiglu(self.w13(x)); return self.w2(h / h.shape[-1])")), *TP_2]
    with pytest.raises(AssertionError, match=r"what layers\.0 returns = differs by .* on tensor-parallel ranks 0, 1"):
        train(tmp_path, 2, flags, steps=1)


@pytest.mark.slow
def test_a_scale_may_be_read_within_its_block(tmp_path: Path) -> None:
    read = "return h + self.feed_forward(normed)", "return h + self.feed_forward(normed * self.ffn_norm.weight)"
    flags = [*mine(tmp_path, read), BATCH, "4"]
    assert_same(train(tmp_path, 2, [*flags, *TP_2], steps=2), train(tmp_path, 1, flags, steps=2), 1e-5)


def derived(kind: str, weight: str) -> Change:
    """A layer of ours with one weight more, of its first one's shape."""
    init = f"super().__init__(*args, **kwargs); self.{weight} = nn.Parameter(torch.empty_like(self.weight))"
    return IMPORT, f"{IMPORT}\nclass More({kind}):\n    def __init__(self, *args, **kwargs): {init}\n"


SCALE = "self.scale = nn.Parameter(torch.empty(dims.dim))"
NO_LAYERS_OF_OURS: dict[str, list[Change]] = {
    "the model = Mine that holds scale": [in_model(SCALE)],
    "layers.0 = Block that holds scale": [in_block(SCALE)],
    "layers.0.feed_forward.w2 = torch.nn.Linear that holds weight, bias": [
        (W2, "self.w2 = nn.Linear(dims.ffn_dim, dims.dim)")
    ],
    "layers.0.scales = torch.nn.ParameterList that holds 0": [
        in_block("self.scales = nn.ParameterList([torch.empty(1)])")
    ],
    "norm = More that holds bias": [derived("RMSNorm", "bias"), in_model("self.norm = More(dims.dim, 1e-5)")],
    "norm = RMSNorm that holds shift": [in_model("self.norm.shift = nn.Parameter(torch.empty(dims.dim))")],
}


@pytest.mark.parametrize("saw", NO_LAYERS_OF_OURS)
def test_weights_in_no_layer_of_ours_are_refused(saw: str, tmp_path: Path) -> None:
    said = refused(tmp_path, *NO_LAYERS_OF_OURS[saw])
    assert said.startswith(f"1 problem\n  {saw}\n      want: weights in layers of titanlite.models.layers alone: ")


@pytest.mark.parametrize(
    ("change", "saw"),
    [
        (in_model("self.bfloat16()"), "tok_embeddings.weight = torch.bfloat16, requires_grad = True"),
        (in_model("self.norm.requires_grad_(False)"), "norm.weight = torch.float32, requires_grad = False"),
        (
            (W2, f"{W2}\n        {W2.replace('self.w2', 'self.w4')}"),
            'layers.0.feed_forward.w4 = a Linear with a part "w2", as layers.0.feed_forward.w2',
        ),
        (
            (W2, f"{W2.replace('Linear(', 'nn.ModuleList(Linear(')} for _ in range(2))"),
            'layers.0.feed_forward.w2.1 = a Linear with a part "w2", as layers.0.feed_forward.w2.0',
        ),
    ],
)
def test_what_a_run_would_not_train_or_draw_twice_is_refused(change: Change, saw: str, tmp_path: Path) -> None:
    assert refused(tmp_path, change).startswith(f"1 problem\n  {saw}\n      want: ")


def test_all_of_it_is_said_at_once_and_of_alike_blocks_once(tmp_path: Path) -> None:
    code = "self.scale = nn.Parameter(torch.empty(1)); self.two = self.ffn_norm"
    assert [line.strip() for line in refused(tmp_path, in_block(code)).splitlines()[1::3]] == [
        "layers.0.ffn_norm.weight = the same parameter as layers.0.two.weight",
        "layers.0 = Block that holds scale",
    ]


def test_plan_and_a_run_refuse_it_under_any_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under tensor parallelism no layer of `blocks.0` had the collectives of the plan's `layers.0`, in silence."""
    blocks = "self.layers = nn.ModuleList(self.make_blocks(dims))"
    two_names = f"{blocks.replace('layers', 'blocks', 1)}; self.layers = nn.ModuleList(self.blocks)"
    flags = [*mine(tmp_path, (blocks, two_names)), "--job.dump_folder", str(tmp_path / "runs")]
    for layout in (["--world", "2"], TP_2):
        with pytest.raises(ConfigError, match=r"\n  blocks.0.attention.wqkv.weight = the same parameter as layers.0."):
            plan([DEBUG, *flags, *layout])
    monkeypatch.setattr("sys.argv", ["train.py", "--config", DEBUG, *flags])
    with pytest.raises(ConfigError, match=r"\n  blocks.0.attention.wqkv.weight = the same parameter as layers.0."):
        train_main()


ROTARY = """
class Rotary(nn.Module):
    def __init__(self, dims, seq_len):
        super().__init__()
        self.table = seq_len, dims.head_width, dims.rope_theta, dims.rope_scaling
        self.register_buffer("cos", torch.empty(seq_len, dims.head_width // 2), persistent=False)
        self.register_buffer("sin", torch.empty_like(self.cos), persistent=False)

    def fill(self):
        for buffer, values in zip((self.cos, self.sin), rope_table(*self.table)):
            buffer.copy_(values)

    def forward(self, qkv, queries_per_kv):
        return rotated_heads(qkv, self.cos, self.sin, queries_per_kv)
"""
ONE_ROTARY = [
    (IMPORT, IMPORT + ROTARY),
    in_model("one = Rotary(dims, seq_len)\n        for block in self.layers: block.attention.rotary = one"),
    (
        "heads = rotated_heads(self.wqkv(x), cos, sin, self.queries_per_kv)",
        "heads = self.rotary(self.wqkv(x), self.queries_per_kv)",
    ),
    in_front_of("dims = self.dims\n", "self.layers[0].attention.rotary.fill()"),
]


@pytest.mark.slow
def test_one_table_for_all_blocks_trains_as_shipped(tmp_path: Path) -> None:
    """A module that has buffers alone may have several names, under tensor parallelism too."""
    flags = mine(tmp_path, *ONE_ROTARY)
    shipped = train(tmp_path, 1, [BATCH, "4"], steps=2)
    assert_same(train(tmp_path, 1, [*flags, BATCH, "4"], steps=2), shipped, 0.0)
    assert_same(train(tmp_path, 2, [*flags, BATCH, "4", *TP_2], steps=2), shipped, 1e-5)


TENSORS_SHARED = in_model(
    "for block in self.layers[1:]:\n"
    "            other = block.attention.rotary = Rotary(dims, seq_len)\n"
    "            other.cos, other.sin = one.cos, one.sin"
)


@pytest.mark.parametrize(
    ("changes", "left"),
    [
        ([("self.cos, self.sin = (", "self.cos, _ = (")], "sin"),
        ([in_model('self.register_buffer("places", torch.arange(seq_len))')], "places"),
        ([in_model('self.register_buffer("steps", torch.ones(4, dtype=torch.int32))')], "steps"),
        ([*ONE_ROTARY, TENSORS_SHARED], "layers.1.attention.rotary.cos and 1 more"),
    ],
)
def test_a_buffer_that_is_not_filled_is_refused(changes: list[Change], left: str, tmp_path: Path) -> None:
    flags = mine(tmp_path, *changes)
    with pytest.raises(AssertionError, match=rf"ConfigError: buffers: 1 problem\n  {left} = not filled\n"):
        train(tmp_path, 1, flags, steps=1)
