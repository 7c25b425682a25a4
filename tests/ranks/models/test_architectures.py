"""Logits are those of the published code, for every architecture, and any layout computes what one process does."""

import dataclasses
import json
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch._dynamo  # before the fork, once for all ranks
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.distributed.tensor import DTensor

from tests.support.documents import sequences_of
from tests.support.needs import slow
from tests.support.ranks import run_ranks
from titanlite import recipes
from titanlite.checkpoint.hugging_face import export_checkpoint, load_weights
from titanlite.checkpoint.resume import identity_of
from titanlite.checkpoint.saved_state import SavedState
from titanlite.checkpoint.state import Checkpoints
from titanlite.commands.export import run as export_command
from titanlite.config.architectures import ARCHITECTURES
from titanlite.config.config_json import check_initial_load_path, recipe_of
from titanlite.config.hugging_face import model_keys
from titanlite.config.problems import Origin, Problems
from titanlite.config.recipe_schema import Experts, ModelDims, RopeScaling
from titanlite.config.schema import Checkpoint, Config, Model, Parallelism, Training
from titanlite.config.write import to_toml
from titanlite.device import CPU
from titanlite.errors import CheckpointError
from titanlite.float8.weight import local_data
from titanlite.kernels.cross_entropy import CrossEntropy
from titanlite.models.find import model_class
from titanlite.parallel.fsdp import apply_fsdp
from titanlite.parallel.initialise import local_slice
from titanlite.parallel.mesh import Mesh, build_mesh
from titanlite.parallel.replicated_gradients import reduce_replicated_gradients
from titanlite.parallel.tensor import LayerPlan, apply_tensor_parallel
from titanlite.preflight.run_folder import RunFolder
from titanlite.sharding.graph import export
from titanlite.sharding.layers import plan_layers, planned_layers

S, B = 16, 2  # over four ranks a rank has half a sequence: those of the second half are at other positions
COMMON = {"help": "", "n_layers": 3, "dim": 32, "n_heads": 8, "n_kv_heads": 4, "ffn_dim": 512, "vocab_size": 48}
QWEN3 = ModelDims(**COMMON, norm_eps=1e-6, rope_theta=1e4, head_dim=8)
GEMMA3 = {"rope_theta": 1e6, "local_rope_theta": 1e4, "head_dim": 8, "window": 5, "global_every": 3}
SCALING = RopeScaling(factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_seq_len=8)
CASES = {
    "llama3": ("llama3", ModelDims(**COMMON, norm_eps=1e-5, rope_theta=1e4, rope_scaling=SCALING)),
    "qwen3": ("qwen3", QWEN3),
    "qwen3, tied": ("qwen3", dataclasses.replace(QWEN3, tied_embeddings=True)),
    "gemma3": ("gemma3", ModelDims(**COMMON, norm_eps=1e-6, **GEMMA3, tied_embeddings=True)),
    "gpt2": ("gpt2", ModelDims(**{**COMMON, "n_kv_heads": 8}, norm_eps=1e-5, max_seq_len=20, tied_embeddings=True)),
}
SPARSE = {key: value for key, value in COMMON.items() if key != "ffn_dim"} | {"rope_theta": 1e4, "n_layers": 2}
CASES |= {
    "qwen3_moe": (
        "qwen3_moe",
        ModelDims(**SPARSE, norm_eps=1e-6, head_dim=8, experts=Experts(n_experts=6, top_k=3, ffn_dim=128)),
    ),
    "olmoe": (
        "olmoe",
        ModelDims(**SPARSE, norm_eps=1e-5, experts=Experts(n_experts=6, top_k=3, ffn_dim=128, normalised=False)),
    ),
    "mixtral": (
        "mixtral",
        ModelDims(
            **SPARSE, norm_eps=1e-5, experts=Experts(n_experts=4, top_k=2, ffn_dim=256, score="softmax_of_chosen")
        ),
    ),
}
DENSE = [case for case, (_, dims) in CASES.items() if dims.experts is None]
GOLDEN = Path(__file__).with_name("transformers_logits.json")
EXPORTED = Path(__file__).with_name("transformers_folders.json")


def on_meta(case: str) -> nn.Module:
    name, dims = CASES[case]
    with torch.device("meta"):
        return model_class(Model(name=name))(dims, S)


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


def empty(case: str, dtype: torch.dtype) -> nn.Module:
    model = on_meta(case).to(dtype).to_empty(device="cpu")
    if CASES[case][1].tied_embeddings:
        model.output.weight = model.tok_embeddings.weight
    return model


def in_one_process(case: str, dtype: torch.dtype) -> nn.Module:
    model = empty(case, dtype)
    fill(model)
    return model


def tokens_of(case: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(CASES[case][1].vocab_size, (B * S + 1,), generator=generator)
    return tokens[:-1], tokens[1:]


def exported(case: str, model: nn.Module, folder: Path) -> Path:
    """What `titanlite export` makes of a run's checkpoint that holds the model."""
    name, dims = CASES[case]
    config = Config(model=Model(name=name), training=Training(seq_len=S))
    run = RunFolder(folder / "run")
    run.path.mkdir()
    run.record(to_toml(config))
    weights = {f"model/{name}": parameter.detach() for name, parameter in model.named_parameters()}
    moments = {"optimizer/exp_avg/norm.weight": torch.zeros(dims.dim)}
    Checkpoints(run.checkpoints, keep=0).save(
        7, weights | moments, SavedState(tokenizer="bytes", **identity_of(config, dims))
    )
    assert export_command([str(run.path), "--dtype", "float32", "--out", str(folder / "out")]) == 0
    return folder / "out"


def signatures(weights: dict[str, Tensor]) -> dict[str, list[object]]:
    """Shape of each, and one value from its inside."""
    return {name: [list(t.shape), t.flatten()[t.numel() // 3].item()] for name, t in weights.items()}


@torch.no_grad()
def logits_of_transformers(case: str, model: nn.Module, tokens: Tensor, folder: Path) -> Tensor:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        exported(case, model, folder), experts_implementation="eager"
    )
    return theirs(tokens.unflatten(0, (B, S))).logits.flatten(0, 1)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("default")  # transformers' own
def test_logits_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    model, (tokens, _) = in_one_process(case, torch.float32), tokens_of(case)
    truth = logits_of_transformers(case, model, tokens, tmp_path)
    with torch.no_grad():
        assert (model(tokens) - truth).abs().max() <= 1e-4
    assert (truth[::7, ::11] - torch.tensor(json.loads(GOLDEN.read_text())[case])).abs().max() <= 1e-4


def others(value: object) -> list[object]:
    """Return other values of a field of a config."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int | float):
        return [2 * value, value / 2 + 0.25] if isinstance(value, float) else [2 * value, max(1, value // 2)]
    words: dict[object, list[object]] = {"silu": ["gelu"], "gelu_pytorch_tanh": ["silu"], "gelu_new": ["relu"]}
    return [1, 2.0, True] if value is None else words.get(value, []) if isinstance(value, str) else []


@pytest.mark.parametrize("case", ["llama3", "qwen3", "gemma3", "gpt2", "qwen3_moe", "olmoe", "mixtral"])
@pytest.mark.filterwarnings("default")  # transformers' own
@torch.no_grad()
def test_each_field_of_transformers_is_computed_as_there_or_refused(case: str, tmp_path: Path) -> None:
    """One after the other, with another value; `config/architectures.py` is the table of what is made of it."""
    transformers = pytest.importorskip("transformers")
    layout, (tokens, _) = ARCHITECTURES[case], tokens_of(case)
    content = model_keys(layout, CASES[case][1]) | {"max_position_embeddings": 2 * S, "pad_token_id": None}
    content |= {} if case == "gpt2" else {"rope_theta": 1e4}
    every = transformers.AutoConfig.for_model(layout.model_type).to_dict()
    changes = [{key: value} for key, default in every.items() for value in others(content.get(key, default))]
    computed, refused = set[str](), set[str]()
    for n, change in enumerate([{}, *changes]):
        (folder := tmp_path / str(n)).mkdir()
        try:
            torch.manual_seed(0)
            given = {key: value for key, value in (content | change).items() if key != "model_type"}
            config = transformers.AutoConfig.for_model(layout.model_type, **given)
            theirs = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
            theirs.save_pretrained(folder)
            truth = theirs(tokens.unflatten(0, (B, S))).logits.flatten(0, 1)
        except Exception:  # no model of theirs
            continue
        if truth.isnan().any() or (found := recipe_of(str(folder), Problems(Origin("folder")), "--from")) is None:
            refused |= change.keys()
            continue
        with torch.device("meta"):
            model = model_class(Model(name=case))(found[1], S)
        model.to_empty(device="cpu").fill_buffers()
        if found[1].tied_embeddings:
            model.output.weight = model.tok_embeddings.weight
        load_weights(str(folder), case, model, dict(model.named_parameters()))
        logits, cap = model(tokens), found[1].logit_softcap
        logits = cap * torch.tanh(logits / cap) if cap else logits  # which is the loss's, here
        assert (logits - truth).abs().max() <= 1e-4 * truth.abs().max(), change
        computed |= change.keys() or {"as it is"}
        shutil.rmtree(folder)
    assert "as it is" in computed
    assert len(computed) > 8
    assert len(refused) > 2


@pytest.mark.parametrize("case", CASES)
def test_exported_is_what_transformers_loaded(case: str, tmp_path: Path) -> None:
    """The same where transformers is not: the folders from which version 5.23 made these logits."""
    golden = json.loads(EXPORTED.read_text())[case]
    folder = exported(case, in_one_process(case, torch.float32), tmp_path)
    assert json.loads((folder / "config.json").read_text()) == golden["config"]
    assert signatures(load_file(folder / "model.safetensors")) == golden["weights"]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("cut", [0, 3], ids=["samples", "packed documents"])
def test_logits_are_those_that_transformers_gave(cut: int, case: str) -> None:
    """The same where transformers is not: every seventh token, every eleventh logit, of version 5.23.

    Documents, of which each is the beginning of a text that transformers saw by itself, are packed into one sample.
    """
    truth = torch.tensor(json.loads(GOLDEN.read_text())[case])
    assert truth.abs().max() > 0.5
    kept = torch.arange(B * S) % S < torch.tensor([S - cut * n for n in range(B)]).repeat_interleave(S)
    starts = torch.zeros(int(kept.sum()), dtype=torch.int32)
    first = (torch.arange(B * S) % S == 0)[kept]
    starts[first] = torch.arange(len(starts), dtype=torch.int32)[first]
    documents = sequences_of(len(starts), starts.cummax(0).values.int()) if cut else None
    got = torch.full((B * S, CASES[case][1].vocab_size), torch.nan)
    with torch.no_grad():
        got[kept] = in_one_process(case, torch.float32)(tokens_of(case)[0][kept], sequences=documents)
    compared = kept[::7]
    assert compared.sum() >= B
    assert (got[::7, ::11][compared] - truth[compared]).abs().max() <= 1e-4


def loaded(case: str, folder: Path, *, is_checked: bool = True) -> nn.Module:
    """A model with the weights of a folder that its config accepts."""
    name, dims = CASES[case]
    config = Config(model=Model(name=name), checkpoint=Checkpoint(initial_load_path=str(folder)))
    if is_checked:
        check_initial_load_path(config, dims, Origin("config"))
    model = empty(case, torch.float32)
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        for parameter in parameters.values():
            parameter.fill_(torch.nan)
    assert load_weights(str(folder), name, model, parameters) == len(json.loads(EXPORTED.read_text())[case]["weights"])
    return model


def require_same_weights(got: nn.Module, wanted: nn.Module) -> None:
    for name, parameter in wanted.named_parameters():
        # Gemma's norms are less one there: one rounding of 1 + w, and of the difference none where w is near 0.
        atol = 2**-23 if "norm" in name else 0.0
        torch.testing.assert_close(got.get_parameter(name), parameter, rtol=0, atol=atol)


@pytest.mark.parametrize("case", CASES)
def test_what_was_exported_can_be_loaded(case: str, tmp_path: Path) -> None:
    model = in_one_process(case, torch.float32)
    require_same_weights(loaded(case, exported(case, model, tmp_path)), model)


def test_weights_that_are_not_the_runs_are_listed_and_buffers_of_older_releases_are_not(tmp_path: Path) -> None:
    folder = exported("gpt2", in_one_process("gpt2", torch.float32), tmp_path)
    file = folder / "model.safetensors"
    weights = load_file(file)
    mask = {"transformer.h.0.attn.bias": torch.ones(1, 1, 20, 20), "h.1.attn.masked_bias": torch.ones(())}
    save_file(weights | mask, file)
    loaded("gpt2", folder)
    save_file(weights | {"transformer.wte.weight": weights["transformer.wte.weight"].to(torch.int8)}, file)
    with pytest.raises(CheckpointError, match=r"in the folder = transformer.wte.weight I8\n.*floating-point numbers"):
        loaded("gpt2", folder, is_checked=False)
    del weights["transformer.ln_f.bias"]
    save_file(weights | {"transformer.more": torch.ones(2), "transformer.wpe.weight": torch.ones(2, 3)}, file)
    with pytest.raises(CheckpointError) as caught:
        loaded("gpt2", folder, is_checked=False)
    for words in (
        "missing in the folder = transformer.ln_f.bias", "only in the folder = transformer.more",
        "different in the folder = transformer.wpe.weight [2, 3] (this run: [20, 32])",
    ):  # fmt: skip
        assert words in str(caught.value)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="rank 0"):
        loaded("gpt2", folder, is_checked=False)


@pytest.mark.parametrize("case", ["qwen3, tied", "gemma3", "gpt2"])
def test_a_head_that_is_not_the_embedding_is_not_dropped(case: str, tmp_path: Path) -> None:
    folder = exported(case, in_one_process(case, torch.float32), tmp_path)
    file = folder / "model.safetensors"
    weights = load_file(file)
    embedding = next(
        weight for name, weight in weights.items() if name.endswith((".wte.weight", ".embed_tokens.weight"))
    )
    save_file(weights | {"lm_head.weight": embedding.clone()}, file)
    loaded(case, folder)
    one_bit = embedding.clone()
    one_bit.view(torch.int32)[-1, -1] ^= 1
    for head in (one_bit, torch.ones(2), embedding.bfloat16()):
        save_file(weights | {"lm_head.weight": head}, file)
        with pytest.raises(
            CheckpointError, match=r'lm_head.weight, which is not .*\n.*\n.*"tie_word_embeddings": false in'
        ):
            loaded(case, folder)


def test_a_head_that_is_not_the_embedding_is_loaded_as_the_message_says(tmp_path: Path) -> None:
    model = in_one_process("qwen3", torch.float32)
    folder = exported("qwen3", model, tmp_path)
    said = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(said | {"tie_word_embeddings": True}))
    with pytest.raises(CheckpointError, match=r"lm_head.weight, which is not"):
        loaded("qwen3, tied", folder)
    (folder / "config.json").write_text(json.dumps(said | {"tie_word_embeddings": False}))
    config = Config(
        model=Model(name="qwen3", flavor="from_checkpoint"), checkpoint=Checkpoint(initial_load_path=str(folder))
    )
    assert not recipes.model_dims(config).tied_embeddings
    require_same_weights(loaded("qwen3", folder), model)


def test_a_weight_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    folder = exported("gpt2", in_one_process("gpt2", torch.float32), tmp_path)
    file = folder / "model.safetensors"
    weights = load_file(file)
    save_file(weights | {"ln_f.bias": weights["transformer.ln_f.bias"].clone()}, file)
    with pytest.raises(CheckpointError, match=r"twice in the folder = transformer.ln_f.bias \(ln_f.bias in"):
        loaded("gpt2", folder)
    file.unlink()
    save_file(weights, folder / "a.safetensors")
    save_file({"transformer.ln_f.bias": weights["transformer.ln_f.bias"] + 1}, folder / "b.safetensors")
    where = dict.fromkeys(weights, "a.safetensors") | {"transformer.ln_f.bias": "b.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    with pytest.raises(CheckpointError, match=r"in a.safetensors, transformer.ln_f.bias in b.safetensors\)"):
        loaded("gpt2", folder)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("default")  # transformers' own
def test_what_transformers_saves_can_be_loaded(case: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = in_one_process(case, torch.float32)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(exported(case, model, tmp_path))
    theirs.save_pretrained(tmp_path / "theirs", max_shard_size="50kB")
    assert len(list(tmp_path.glob("theirs/*.safetensors"))) > 1
    require_same_weights(loaded(case, tmp_path / "theirs"), model)
    theirs.base_model.save_pretrained(tmp_path / "headless")  # its weights are called without "model."
    if CASES[case][1].tied_embeddings:
        require_same_weights(loaded(case, tmp_path / "headless"), model)
    else:
        with pytest.raises(CheckpointError, match=r"missing in the folder = lm_head.weight"):
            loaded(case, tmp_path / "headless")


@pytest.mark.parametrize(
    ("over", "says"),
    [
        ({"balance_bias": 0.1}, "experts.balance_bias = 0.1\n      want: 0.0, which every MixtralForCausalLM"),
        ({"shared": 1}, "experts.shared = 1\n      want: 0,"),
        ({"score": "sigmoid"}, 'experts.score = "sigmoid"\n      want: "softmax_of_chosen",'),
        ({"score": "softmax", "normalised": False}, "experts.normalised = false\n      want: true,"),
    ],
)
def test_what_transformers_does_not_compute_is_refused(over: dict[str, object], says: str) -> None:
    name, dims = CASES["mixtral"]
    assert dims.experts is not None
    dims = dataclasses.replace(dims, experts=dataclasses.replace(dims.experts, **over))
    config = Config(model=Model(name=name))
    with pytest.raises(CheckpointError) as caught:
        export_checkpoint(Path(), Path(), config, dims, None, "float32", print)
    assert says in str(caught.value)


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
        "qwen3_moe-30B-A3B": 30_532_122_624,
        "qwen3_moe-235B-A22B": 235_093_634_560,
        "olmoe-1B-7B": 6_919_161_856,
        "mixtral-8x7B": 46_702_792_704,
    }
    assert published.keys() == {name for name in recipes.names("model") if not name.endswith("-debug")}
    for name in recipes.names("model"):
        architecture = name.partition("-")[0]
        dims = recipes.load("model", name)
        with torch.device("meta"):
            model = model_class(Model(name=architecture))(dims, 8)
        count = sum(p.numel() for p in model.parameters())
        assert count == published.get(name, count), name


@pytest.mark.parametrize(
    "case", ["gemma3", "qwen3_moe", *slow("mixtral", *(name for name in DENSE if name != "gemma3"))]
)
def test_two_blocks_of_a_kind_stand_for_all_and_few_annotations_do(case: str) -> None:
    model = on_meta(case)
    graph = export(model, [torch.empty(B * S, dtype=torch.long, device="meta")])
    assert len(model.sharding) <= 6
    assert plan_layers(model, B * S, 4).layers == planned_layers(graph, model.sharding, 4, {})[1]


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
    mesh = build_mesh(config.parallelism, CPU)
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


ALL = tuple(LAYOUTS)


@pytest.mark.parametrize(
    ("case", "compiled", "layouts"),
    [
        ("gemma3", False, ("TP 2", "FSDP 2 × TP 2")),
        *slow(
            *((n, False, ALL) for n in ("llama3", "qwen3", "gemma3", "qwen3, tied", "gpt2")),
            *((n, True, ALL) for n in ("qwen3", "gemma3", "gpt2")),
        ),
    ],
)
@pytest.mark.usefixtures("_double")
def test_layouts_compute_what_one_process_does(
    case: str, compiled: bool, layouts: tuple[str, ...], tmp_path: Path
) -> None:
    """Llama is compiled under every layout in tests/ranks/training/test_layouts.py."""
    truth = loss_and_gradients(in_one_process(case, torch.float64), *tokens_of(case), None)
    plans = {ranks: plan_layers(on_meta(case), B * S, ranks).layers for ranks in (2, 4)}

    def body_of(*layouts: str) -> Callable[[], None]:
        def body() -> None:
            for layout in layouts:
                torch._dynamo.reset()
                compute(case, layout, plans[LAYOUTS[layout][1]], truth, compiled)

        return body

    run_ranks(body_of(layouts[0]), tmp_path, 2)
    if layouts[1:]:
        run_ranks(body_of(*layouts[1:]), tmp_path, 4, timeout_s=180)
