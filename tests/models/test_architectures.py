"""Qwen3, Gemma 3 and GPT-2: logits are those of the published code, and any layout computes what one process does."""

import dataclasses
import json
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch._dynamo  # before the fork, once for all ranks
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.distributed.tensor import DTensor

from tests.needs import slow
from tests.ranks import run_ranks
from titanlite import recipes
from titanlite.config.architectures import ARCHITECTURES, n_parameters
from titanlite.config.recipe_schema import ModelRecipe, RopeScaling
from titanlite.config.schema import Config, Model, Parallelism, Training
from titanlite.float8.weight import local_data
from titanlite.kernels.cross_entropy import CrossEntropy
from titanlite.models.find import model_class
from titanlite.models.layers import Linear
from titanlite.parallel.fsdp import apply_fsdp
from titanlite.parallel.initialise import local_slice
from titanlite.parallel.mesh import Mesh, build_mesh
from titanlite.parallel.sharding.derive import derive
from titanlite.parallel.sharding.graph import export
from titanlite.parallel.sharding.layers import LayerPlan, layers_of, plan_layers
from titanlite.parallel.tensor import apply_tensor_parallel, reduce_replicated_gradients

S, B = 16, 2  # over four ranks a rank has half a sequence: those of the second half are at other positions
COMMON = {"help": "", "n_layers": 3, "dim": 32, "n_heads": 8, "n_kv_heads": 4, "ffn_dim": 512, "vocab_size": 48}
QWEN3 = ModelRecipe(**COMMON, norm_eps=1e-6, rope_theta=1e4, head_dim=8)
GEMMA3 = {"rope_theta": 1e6, "local_rope_theta": 1e4, "head_dim": 8, "window": 5, "global_every": 3}
SCALING = RopeScaling(factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_seq_len=8)
CASES = {
    "llama3": ("llama3", ModelRecipe(**COMMON, norm_eps=1e-5, rope_theta=1e4, rope_scaling=SCALING)),
    "qwen3": ("qwen3", QWEN3),
    "qwen3, tied": ("qwen3", dataclasses.replace(QWEN3, tied_embeddings=True)),
    "gemma3": ("gemma3", ModelRecipe(**COMMON, norm_eps=1e-6, **GEMMA3, tied_embeddings=True)),
    "gpt2": ("gpt2", ModelRecipe(**{**COMMON, "n_kv_heads": 8}, norm_eps=1e-5, max_seq_len=20, tied_embeddings=True)),
}
GOLDEN = Path(__file__).with_name("transformers_logits.json")


def on_meta(case: str) -> nn.Module:
    name, sizes = CASES[case]
    with torch.device("meta"):
        return model_class(Model(name=name))(sizes, S)  # type: ignore[arg-type]


@torch.no_grad()
def fill(model: nn.Module) -> None:
    """Weights far from initial values, where norms are one and biases zero; those of a name are the same everywhere."""
    model.fill_buffers()  # type: ignore[operator]
    for name, parameter in model.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        whole = torch.randn(parameter.shape, generator=generator) * (0.3 if "norm" in name else 0.1)
        if name.endswith("norm.weight"):
            whole += 1
        local_data(parameter).copy_(local_slice(whole, parameter))


def in_one_process(case: str, dtype: torch.dtype) -> nn.Module:
    model = on_meta(case).to(dtype).to_empty(device="cpu")
    if CASES[case][1].tied_embeddings:
        model.output.weight = model.tok_embeddings.weight
    fill(model)
    return model


def tokens_of(case: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(CASES[case][1].vocab_size, (B * S + 1,), generator=generator)
    return tokens[:-1], tokens[1:]


def separate_weights(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter under the name it would have without fusing."""
    found = {}
    for name, module in model.named_modules():
        parent = name.rpartition(".")[0]
        for own, parameter in module._parameters.items():
            if isinstance(module, Linear) and parameter is not None:
                parts = module.split(parameter.detach())
                found |= {f"{parent}.{part}.{own}".lstrip("."): piece for part, piece in parts.items()}
            elif parameter is not None:
                found[f"{name}.{own}"] = parameter.detach()
    return found


ROTARY = {
    "tok_embeddings": "embed_tokens", "attention.wq.": "self_attn.q_proj.", "attention.wk.": "self_attn.k_proj.",
    "attention.wv.": "self_attn.v_proj.", "attention.wo.": "self_attn.o_proj.", "attention.q_": "self_attn.q_",
    "attention.k_": "self_attn.k_", "feed_forward.w1": "mlp.gate_proj", "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj",
}  # fmt: skip
NAMES = {
    "llama3": {**ROTARY, ".attention_norm": ".input_layernorm", ".ffn_norm": ".post_attention_layernorm"},
    "qwen3": {**ROTARY, ".attention_norm": ".input_layernorm", ".ffn_norm": ".post_attention_layernorm"},
    "gemma3": {
        **ROTARY, ".attention_norm": ".input_layernorm", ".post_attention_norm": ".post_attention_layernorm",
        ".ffn_norm": ".pre_feedforward_layernorm", ".post_ffn_norm": ".post_feedforward_layernorm",
    },
    "gpt2": {
        "tok_embeddings": "wte", "positions": "wpe", "layers.": "h.", ".attention_norm": ".ln_1", ".ffn_norm": ".ln_2",
        "attention.wo": "attn.c_proj", "feed_forward.w1": "mlp.c_fc", "feed_forward.w2": "mlp.c_proj", "norm.": "ln_f.",
    },
}  # fmt: skip


def under_their_names(architecture: str, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """What transformers calls them, and in what shape it holds them."""
    found = {}
    for name, weight in weights.items():
        theirs = name
        for old, new in NAMES[architecture].items():
            theirs = new + theirs.removeprefix(old) if theirs.startswith(old) else theirs
            theirs = theirs.replace(old, new) if not old.endswith("norm.") else theirs
        prefix = "transformer." if architecture == "gpt2" else "model."
        theirs = theirs.replace("output.", "lm_head.") if name.startswith("output.") else prefix + theirs
        if architecture == "gemma3" and "norm" in name:
            weight = weight - 1
        found[theirs] = weight.T if ".c_" in theirs and weight.ndim == 2 else weight
    return found


def of_transformers(case: str, model: nn.Module) -> nn.Module:
    """The model of transformers with the same weights."""
    transformers = pytest.importorskip("transformers")
    name, sizes = CASES[case]
    weights = separate_weights(model)
    rotary = {
        "hidden_size": sizes.dim, "num_hidden_layers": sizes.n_layers, "num_attention_heads": sizes.n_heads,
        "num_key_value_heads": sizes.n_kv_heads, "intermediate_size": sizes.ffn_dim, "vocab_size": sizes.vocab_size,
        "head_dim": sizes.head_width, "rms_norm_eps": sizes.norm_eps, "tie_word_embeddings": sizes.tied_embeddings,
        "max_position_embeddings": 64,
    }  # fmt: skip
    if name == "llama3":
        assert sizes.rope_scaling is not None
        scaling = dataclasses.asdict(sizes.rope_scaling)
        scaling["original_max_position_embeddings"] = scaling.pop("original_seq_len")
        table = {"rope_type": "llama3", "rope_theta": sizes.rope_theta, **scaling}
        theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**rotary, rope_parameters=table))
    elif name == "qwen3":
        table = {"rope_type": "default", "rope_theta": sizes.rope_theta}
        theirs = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**rotary, rope_parameters=table))
    elif name == "gemma3":
        thetas = {"full_attention": sizes.rope_theta, "sliding_attention": sizes.local_rope_theta}
        tables = {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in thetas.items()}
        kinds = ["sliding_attention", "full_attention"]
        config = transformers.Gemma3TextConfig(
            **rotary,
            rope_parameters=tables,
            layer_types=[kinds[(n + 1) % sizes.global_every == 0] for n in range(sizes.n_layers)],
            sliding_window=sizes.window,
            query_pre_attn_scalar=sizes.head_width,
        )
        theirs = transformers.Gemma3ForCausalLM(config)
    else:
        config = transformers.GPT2Config(
            n_embd=sizes.dim, n_layer=sizes.n_layers, n_head=sizes.n_heads, n_inner=sizes.ffn_dim,
            vocab_size=sizes.vocab_size, n_positions=sizes.max_seq_len,
        )  # fmt: skip
        theirs = transformers.GPT2LMHeadModel(config)
        for n in range(sizes.n_layers):
            for own in ("weight", "bias"):
                qkv = [weights.pop(f"layers.{n}.attention.{part}.{own}") for part in ("wq", "wk", "wv")]
                weights[f"layers.{n}.attn.c_attn.{own}"] = torch.cat(qkv)
    theirs.load_state_dict(under_their_names(name, weights), strict=True)
    return theirs.eval()


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("default")  # transformers' own
def test_logits_are_those_of_transformers(case: str) -> None:
    model = in_one_process(case, torch.float32)
    tokens, _ = tokens_of(case)
    theirs = of_transformers(case, model)
    with torch.no_grad():
        truth = theirs(tokens.unflatten(0, (B, S))).logits.flatten(0, 1)
        assert (model(tokens) - truth).abs().max() <= 1e-4
    assert (truth[::7, ::11] - torch.tensor(json.loads(GOLDEN.read_text())[case])).abs().max() <= 1e-4


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_that_transformers_gave(case: str) -> None:
    """The same where transformers is not: every seventh token, every eleventh logit, of version 5.23."""
    truth = torch.tensor(json.loads(GOLDEN.read_text())[case])
    assert truth.abs().max() > 0.5
    with torch.no_grad():
        got = in_one_process(case, torch.float32)(tokens_of(case)[0])[::7, ::11]
    assert (got - truth).abs().max() <= 1e-4


def test_parameters_of_the_published_sizes() -> None:
    published = {
        "llama3-1B": 1_235_814_400,
        "llama3-3B": 3_212_749_824,
        "llama3-8B": 8_030_261_248,
        "llama3-70B": 70_553_706_496,
        "llama3-405B": 405_853_388_800,
        "qwen3-0.6B": 596_049_920,
        "qwen3-1.7B": 1_720_574_976,
        "qwen3-4B": 4_022_468_096,
        "qwen3-8B": 8_190_735_360,
        "gemma3-270M": 268_098_176,
        "gemma3-1B": 999_885_952,
        "gpt2-124M": 124_439_808,
        "gpt2-355M": 354_823_168,
        "gpt2-774M": 774_030_080,
        "gpt2-1.5B": 1_557_611_200,
    }
    assert published.keys() == {name for name in recipes.names("model") if not name.endswith("-debug")}
    for name in recipes.names("model"):
        architecture = name.partition("-")[0]
        sizes = recipes.load("model", name)
        with torch.device("meta"):
            model = model_class(Model(name=architecture))(sizes, 8)  # type: ignore[arg-type]
        count = sum(p.numel() for p in model.parameters())
        assert count == n_parameters(ARCHITECTURES[architecture].block, sizes), name
        assert count == published.get(name, count), name


@pytest.mark.parametrize("case", CASES)
def test_two_blocks_of_a_kind_stand_for_all_and_few_annotations_do(case: str) -> None:
    model = on_meta(case)
    graph = export(model, [torch.empty(B * S, dtype=torch.long, device="meta")])
    assert len(model.sharding) <= 6
    full = layers_of(graph, *derive(graph, {"tp": 4}, model.sharding))
    assert plan_layers(model, B * S, 4) == full


LAYOUTS = {"TP 2": (1, 2), "TP 4": (1, 4), "FSDP 2 × TP 2": (2, 2)}


def loss_and_gradients(model: nn.Module, tokens: Tensor, targets: Tensor, mesh: Mesh | None) -> dict[str, Tensor]:
    """Whole, over all ranks."""
    group = mesh and mesh.tp_group
    loss = CrossEntropy(group)(model(tokens), targets) / (B * S)
    loss.backward()
    loss = loss.detach()
    if mesh is not None:
        reduce_replicated_gradients(list(model.parameters()), group)
        dist.all_reduce(loss)
        loss /= mesh.tp_size
    grads = {name: p.grad for name, p in model.named_parameters()}
    return {"loss": loss} | {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in grads.items()}


def compute(case: str, layout: str, plan: dict[str, LayerPlan], truth: dict[str, Tensor], compiled: bool) -> None:
    shards, ranks = LAYOUTS[layout]
    training = Training(seq_len=S, mixed_precision_param="float64", mixed_precision_reduce="float64")  # type: ignore[arg-type]
    config = Config(training=training, parallelism=Parallelism(tensor_parallel_degree=ranks))
    mesh = build_mesh(config.parallelism, torch.device("cpu"))
    assert mesh.tp_group is not None
    model = on_meta(case).double()
    apply_tensor_parallel(model, plan, mesh.tp, mesh.tp_group)
    if compiled:
        for block in model.layers:
            block.compile(fullgraph=True, dynamic=False, backend="aot_eager")
    apply_fsdp(model, config, mesh)
    model.to_empty(device="cpu")
    fill(model)
    tokens, targets = (t.chunk(shards)[mesh.dp_rank] for t in tokens_of(case))
    got = loss_and_gradients(model, tokens, targets, mesh)
    assert got.keys() == truth.keys()
    for name, wanted in truth.items():
        assert wanted.abs().max() > 1e-6, name
        error = ((got[name] - wanted).abs().max() / wanted.abs().max()).item()
        assert error <= 1e-12, f"{case}, {layout}: {name} is off by {error:.1e}"


@pytest.fixture
def _double(monkeypatch: pytest.MonkeyPatch) -> None:
    """Statistics in float64, in eager mode and in what is traced: a graph calls the method by its name."""
    monkeypatch.setattr(Tensor, "float", Tensor.double)
    monkeypatch.setattr(FunctionalTensor, "float", FunctionalTensor.double)


@pytest.mark.parametrize(
    ("case", "compiled"),
    [
        *((case, False) for case in ("qwen3", "gemma3", "gpt2")),
        ("gpt2", True),
        *slow(("llama3", False), ("qwen3, tied", False), ("qwen3", True), ("gemma3", True)),
    ],
)
@pytest.mark.usefixtures("_double")
def test_layouts_compute_what_one_process_does(case: str, compiled: bool, tmp_path: Path) -> None:
    """Llama is compiled under every layout in tests/training/test_layouts.py."""
    truth = loss_and_gradients(in_one_process(case, torch.float64), *tokens_of(case), None)
    plans = {ranks: plan_layers(on_meta(case), B * S, ranks) for ranks in (2, 4)}

    def body_of(*layouts: str) -> Callable[[], None]:
        def body() -> None:
            for layout in layouts:
                torch._dynamo.reset()
                compute(case, layout, plans[LAYOUTS[layout][1]], truth, compiled)

        return body

    run_ranks(body_of("TP 2"), tmp_path, 2)
    run_ranks(body_of("TP 4", "FSDP 2 × TP 2"), tmp_path, 4, timeout_s=180)
