"""Find the parameters that weight decay leaves alone, by the patterns of `optimizer.weight_decay_exclude`.

The names of shipped architectures are known without torch, so that a misspelt pattern is found when the config is
checked; those of a model file of the user's own when it is imported.
"""

import re
from collections.abc import Collection, Sequence
from fnmatch import fnmatch

from titanlite.config.architectures import linear_layers
from titanlite.config.build import show
from titanlite.config.problems import Origin, Problems
from titanlite.config.recipe_schema import Block, ModelDims
from titanlite.errors import nearest

_KEY = "optimizer.weight_decay_exclude"


def without_decay(patterns: Sequence[str], parameters: Collection[str], origin: Origin | None = None) -> set[str]:
    """Return the names that a pattern matches.

    Raises:
        ConfigError: a pattern matches no parameter.
    """
    names = dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in parameters)  # blocks are alike
    problems = Problems(origin or Origin("config"))
    for pattern in patterns:
        if not any(fnmatch(name, pattern) for name in parameters):
            # Those of all that end alike, too: "*attention_norm.weight", "*norm.weight", "*weight".
            ends = dict.fromkeys("*" + name[cut.end() :] for name in names for cut in re.finditer(r"^|[._]", name))
            near = nearest(pattern, [*names, *ends])
            want = f"a pattern that matches a parameter: {', '.join(list(names)[:4])}, …"
            problems.add(_KEY, show(pattern), want, f"did you mean {show(near)}?" if near else "remove it")
    problems.raise_all()
    return {name for name in parameters if any(fnmatch(name, pattern) for pattern in patterns)}


def parameter_names(block: Block, dims: ModelDims) -> list[str]:
    """Return the names of all parameters of a shipped architecture; embeddings that are tied have one."""
    names = ["tok_embeddings.weight", *(["positions.weight"] if dims.max_seq_len else [])]
    kinds = ("weight", "bias") if block.layer_norms else ("weight",)
    norms = ["attention_norm", "ffn_norm", *(["post_attention_norm", "post_ffn_norm"] if block.post_norms else [])]
    own = [f"{norm}.{kind}" for norm in norms for kind in kinds]
    own += ["attention.q_norm.weight", "attention.k_norm.weight"] if block.qk_norms else []
    names += [f"layers.{n}.{name}" for n in range(dims.n_layers) for name in own]
    *linears, head = linear_layers(block, dims)
    names += [f"{name}.{kind}" for name in linears for kind in (("weight", "bias") if block.biases else ("weight",))]
    return [*names, *(f"norm.{kind}" for kind in kinds), *([] if dims.tied_embeddings else [f"{head}.weight"])]
