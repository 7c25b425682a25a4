"""Check that the model and the batch of a run can be split over the mesh, and name the nearest legal values."""

import math

from titanlite.config.architectures import ARCHITECTURES
from titanlite.config.problems import Problems
from titanlite.config.recipe_schema import ModelDims
from titanlite.config.schema import FROM_CHECKPOINT, Config, Model
from titanlite.config.stages import data_ranks

RUN = 128
"""Least number of consecutive tokens on a context-parallel rank: the queries in a tile of the attention kernels."""


def check_dims(dims: ModelDims, model: Model, problems: Problems) -> None:
    """Check that heads divide the width and that widths fit the kernels. A user's model file may have any `ffn_dim`."""
    dim, heads, kv_heads = dims.dim, dims.n_heads, dims.n_kv_heads
    if min(dim, heads, kv_heads) < 1:
        return  # reported as out of range
    refuse = problems.about(dims, "model.")

    def add(key: str, want: str, fix: str) -> None:
        is_folder = model.flavor == FROM_CHECKPOINT
        refuse(key, want, "name another folder: its weights have these dimensions" if is_folder else fix)

    even = [h for h in _divisors(dim) if dim // h % 2 == 0]
    if not dims.head_dim and dim % heads:  # a head_dim was checked with its recipe
        add("n_heads", f"a divisor of model.dim = {dim}", _pick("n_heads", heads, _divisors(dim)))
    elif not dims.head_dim and dim // heads % 2:  # an odd dim has only odd divisors
        want = f"heads of even width, for rotary pairs; {dim} / {heads} = {dim // heads}"
        add(*(("n_heads", want, _pick("n_heads", heads, even)) if even else ("dim", want, f"dim = {dim + heads}")))
    elif heads % kv_heads:  # checked only if n_heads is right
        add("n_kv_heads", f"a divisor of model.n_heads = {heads}", _pick("n_kv_heads", kv_heads, _divisors(heads)))
    if dims.ffn_dim % 128 and not model.file:
        add("ffn_dim", "a multiple of 128", f"ffn_dim = {-(-dims.ffn_dim // 128) * 128}")


def check_mesh(config: Config, model: ModelDims | None, world: int | None, problems: Problems) -> None:
    """Check that the product of the degrees is the number of processes, and that each width can be split evenly."""
    p, refuse = config.parallelism, problems.about(config)
    replicate, shard, tensor = p.data_parallel_replicate_degree, p.data_parallel_shard_degree, p.tensor_parallel_degree
    context, key, ranks = p.context_parallel_degree, "parallelism.tensor_parallel_degree", f"processes, {world}"
    left = None if world is None or world % replicate else world // replicate  # ranks of a replica; None: unknown
    if world is not None and left is None:
        fix = _pick("data_parallel_replicate_degree", replicate, _divisors(world))
        refuse("parallelism.data_parallel_replicate_degree", f"a divisor of the number of {ranks}", fix)
    tokens = config.training.seq_len * config.training.local_batch_size
    of_tokens = f"seq_len × local_batch_size = {tokens}"
    if context > 1 and tokens % context == 0:  # if not divisible, `check_context_parallel` reports it
        tokens //= context
        of_tokens += f" / {context}"
    split: dict[str, int] = {}
    if model is not None and not config.model.file:  # a user's model file is checked by its sharding plan
        split = {
            f"model.n_heads = {model.n_heads}": model.n_heads,
            f"model.n_kv_heads = {model.n_kv_heads}": model.n_kv_heads,
            f"model.ffn_dim / 128 = {model.ffn_dim // 128}": model.ffn_dim // 128,
            f"model.vocab_size = {model.vocab_size}": model.vocab_size,
        }
        if (of := model.experts) is not None and of.shared:
            blocks = of.shared * of.ffn_dim // 128
            split[f"experts.shared × experts.ffn_dim / 128 = {blocks}"] = blocks
    split[of_tokens] = tokens
    is_split = all(size % tensor == 0 for size in split.values())
    if left is not None:
        split[f"the number of {ranks}" if replicate == 1 else f"processes / replicas = {left}"] = left
    if tensor > 1 and not config.model.file and not ARCHITECTURES[config.model.name].splits:
        want = f"1: {config.model.name} normalises all heads of a token together"
        refuse(key, want, "tensor_parallel_degree = 1")
    elif bad := [name for name, size in split.items() if size % tensor]:
        fix = _pick("tensor_parallel_degree", tensor, _divisors(math.gcd(*split.values())))
        fix += f", or start {replicate * tensor} processes" * is_split
        refuse(key, f"a divisor of {', of '.join(bad)}", fix)
    elif left is not None and left // tensor % context:
        left //= tensor
        want = f"a divisor of the processes of {'a replica' if tensor == 1 else 'a replica / tensor'}, {left}"
        fix = _pick("context_parallel_degree", context, _divisors(math.gcd(left, runs_of_micro_batch(config))))
        fix += f", or start {replicate * context * tensor} processes"
        refuse("parallelism.context_parallel_degree", want, fix)
    elif left is not None and shard != -1 and shard * context * tensor != left:
        degrees = {"replicate": replicate, "shard": shard, "context": context, "tensor": tensor}
        degrees = {name: degree for name, degree in degrees.items() if name != "context" or degree > 1}
        product = f"{' × '.join(degrees)} = {' × '.join(map(str, degrees.values()))}"
        fix = f"data_parallel_shard_degree = {left // (context * tensor)} (or -1: all remaining ranks)"
        fix += f", or start {math.prod(degrees.values())} processes"
        refuse("parallelism.data_parallel_shard_degree", f"{product} to be the number of {ranks}", fix)


def check_context_parallel(config: Config, world: int | None, problems: Problems, stage: str = "training") -> None:
    """Check that ranks can share a micro-batch in runs of `RUN` tokens. `stage`: table of its shape, for messages."""
    context, training = config.parallelism.context_parallel_degree, config.training
    if context == 1:
        return
    if training.seq_len % RUN:
        near = [n for n in (training.seq_len // RUN * RUN, -(-training.seq_len // RUN) * RUN) if n]
        want = f"a multiple of {RUN} with context_parallel_degree = {context}: ranks have runs of so many tokens"
        problems.add(f"{stage}.seq_len", str(training.seq_len), want, _pick("seq_len", training.seq_len, near))
        return
    runs = runs_of_micro_batch(config)
    if runs % context:
        of_stage = "" if stage == "training" else f" of {stage}"
        want = f"a divisor of seq_len × local_batch_size / {RUN} = {runs}{of_stage}"
        fix = _pick("context_parallel_degree", context, _divisors(math.gcd(runs, _ranks_left(config, world) or 0)))
        problems.add("parallelism.context_parallel_degree", str(context), want, fix)


def check_expert_parallel(config: Config, model: ModelDims | None, world: int | None, problems: Problems) -> None:
    """Check that `expert_parallel_degree` divides the number of experts and the ranks of a replica."""
    p, name = config.parallelism, "expert_parallel_degree"
    ep, shards, tensor = p.expert_parallel_degree, ranks_of_shards(config, world), p.tensor_parallel_degree
    experts, ranks = model and model.experts, max(shards, 0) * tensor
    if ep == 1:
        return
    if model is not None and experts is None and config.model.file:
        want = f"1: the recipe of {config.model.file} has no table [experts]"
        fix = f"{name} = 1; or that table, if the file has a MixtureOfExperts"
    elif model is not None and experts is None:
        want, fix = f"1: {config.model.name} has no experts", f"{name} = 1"
    elif experts is not None and experts.n_experts % ep:
        want = f"a divisor of experts.n_experts = {experts.n_experts}"
        fix = _pick(name, ep, _divisors(math.gcd(experts.n_experts, ranks)))
    elif ranks % ep:
        product = f" × tensor = {shards} × {tensor} = {ranks}" if tensor > 1 else f", {shards}"
        want = f"a divisor of the ranks that shard each parameter{product}"
        fix = _pick(name, ep, _divisors(math.gcd(ranks, experts.n_experts if experts else 0)))
    else:
        return
    problems.add(f"parallelism.{name}", str(ep), want, fix)


def check_batch(config: Config, world: int | None, problems: Problems, stage: str = "training") -> None:
    """Check that the global batch is a multiple of a micro-step over all ranks. `stage`: table of the batch."""
    asked, local = config.training.global_batch_size, config.training.local_batch_size
    if asked is None or asked < 1:
        return  # None: one micro-step; below 1: reported as out of range
    n_data = data_ranks(config, world)
    unit = local * n_data
    if asked % unit:
        near = [n for n in (asked // unit * unit, -(-asked // unit) * unit) if n]
        want = f"a multiple of local_batch_size × data-parallel ranks = {local} × {n_data} = {unit}"
        fix = _pick("global_batch_size", asked, near)
        problems.add(f"{stage}.global_batch_size", str(asked), want, fix)


def runs_of_micro_batch(config: Config) -> int:
    """Return the number of runs of `RUN` tokens in a micro-batch, over all context-parallel ranks."""
    return config.training.seq_len * config.training.local_batch_size // RUN


def tokens_of_rank(config: Config) -> int:
    """Return the tokens of a rank in a micro-step (M), before tensor parallelism splits them."""
    training = config.training
    return training.seq_len * training.local_batch_size // config.parallelism.context_parallel_degree


def ranks_of_shards(config: Config, world: int | None) -> int:
    """Return the number of ranks that shard each parameter, context-parallel ranks included; -1: unknown."""
    p = config.parallelism
    if p.data_parallel_shard_degree != -1:
        return p.data_parallel_shard_degree * p.context_parallel_degree
    return _ranks_left(config, world) or -1


def _ranks_left(config: Config, world: int | None) -> int | None:
    """Return the processes over replicas × tensor-parallel degree; None: unknown or not a whole number."""
    others = config.parallelism.data_parallel_replicate_degree * config.parallelism.tensor_parallel_degree
    return None if world is None or world % others else world // others  # `check_mesh` reports a remainder


def _divisors(n: int) -> list[int]:
    """Return the divisors of `n` in order; for n > 10¹², only those up to 10⁶ and their complements, to save time."""
    return sorted({d for i in range(1, min(math.isqrt(n), 10**6) + 1) if n % i == 0 for d in (i, n // i)})


def _pick(name: str, asked: int, legal: list[int]) -> str:
    """Return the text "name = value" with the legal value nearest to `asked`, and the second nearest in parentheses."""
    first, *others = sorted(legal, key=lambda n: (abs(n - asked), n))[:2]
    return f"{name} = {first}" + (f" (or {others[0]})" if others else "")
