"""Save-lists: which activations of a block are kept for backward and which are recomputed.

A save-list (`recipes/activation_checkpoint/*.toml`) is a list of rules over operations; the first that matches decides,
in eager mode and under `torch.compile` alike (`rules.py` has the classes that they name).

Whether a rule was used is counted: a rule that matched nothing is reported, and without `optional` it is an error.
"""

import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from titanlite.activation_checkpoint import operations as ops
from titanlite.activation_checkpoint.operations import CLASSES
from titanlite.activation_checkpoint.rules import BLOCK, BlockRules, add_mistakes, is_whole
from titanlite.config.problems import Problems
from titanlite.config.recipe_schema import SaveList, SaveRule
from titanlite.errors import Problem, RecipeError, describe, nearest
from titanlite.float8.blocks import BlockScaledFloat8
from titanlite.float8.matmul import Float8Matmul
from titanlite.kernels.products import FLOAT8
from titanlite.models.experts import GroupedProjection, product_names
from titanlite.models.layers import CausalAttention, Linear
from titanlite.parallel.calls import draws
from titanlite.parallel.tensor import ColumnParallelLinear, ParallelLinear

_MOVES = ("aten._to_copy.default", "aten.copy.default")
"""Elementwise too, though torch does not tag them so."""


@dataclass
class KindUse:
    """The use of a save-list in blocks of one class, with the same layers, the same rules and the same attention.

    Attributes:
        rules: numbers of those that are for them.
        blocks: how many.
        passes: forward passes, of all of them, or times that they were traced.
        matches: how often each rule matched in these.
    """

    rules: frozenset[int]
    blocks: int = 0
    passes: int = 0
    matches: Counter[int] = field(default_factory=Counter)

    def in_a_pass(self, i: int) -> float:
        """How often a rule matched in one pass of all these blocks."""
        return self.blocks * self.matches[i] / max(self.passes, 1)


@dataclass
class SaveListUse:
    """The use of a save-list, by what has been seen of blocks so far: in every pass, or as they were compiled.

    Attributes:
        rules: of the list.
        kinds: what was seen, of blocks that are alike.
        checkpointed: numbers of the blocks under checkpointing.
    """

    rules: tuple[SaveRule, ...]
    kinds: list["KindUse"] = field(default_factory=list)
    checkpointed: list[int] = field(default_factory=list)
    refused: RecipeError | None = None  # attention in no `CausalAttention` was recomputed, as its q, k and v are

    @property
    def blocks(self) -> int:
        """How many are under checkpointing."""
        return len(self.checkpointed)

    @property
    def matches(self) -> Counter[int]:
        """Operations that each rule matches in a forward pass of the model."""
        return Counter({i: n for i in range(len(self.rules)) if (n := round(sum(k.in_a_pass(i) for k in self.kinds)))})

    def unmatched(self) -> list[int]:
        """Rules that matched no operation though they are not optional."""
        return [i for i, rule in enumerate(self.rules) if not self.matches[i] and not rule.optional]


def apply_activation_checkpoint(
    model: nn.Module, save_list: SaveList, of_blocks: Sequence[frozenset[int]] | None = None
) -> SaveListUse:
    """Wrap each block of a model, in place, but for those that the list keeps whole.

    Args:
        model: has `layers`.
        save_list: the rules.
        of_blocks: numbers of those of each block; None: as `SaveList.active` has it.

    Returns:
        Counts that fill up as the model runs.

    Raises:
        RecipeError: attention is kept without the matmuls that its q, k and v come from.
    """
    use = SaveListUse(save_list.rules)
    blocks: list[nn.Module] = list(model.layers)  # type: ignore[arg-type]
    kinds: dict[object, tuple[KindUse, type[nn.Module] | None]] = {}  # blocks of one kind share one class
    for n, (block, rules) in enumerate(zip(blocks, of_blocks or save_list.active(len(blocks)), strict=True)):
        layers = product_names(block)
        windows = tuple(module.window for module in block.modules() if isinstance(module, CausalAttention))
        key = rules, type(block), layers, windows  # a model file may have blocks of several classes
        if key not in kinds and is_whole(save_list, rules):
            whole = Counter(i for i in rules if save_list.rules[i].op == BLOCK)
            kinds[key] = KindUse(rules, passes=1, matches=whole), None
        elif key not in kinds:
            kind = KindUse(rules)
            _check_attention(BlockRules(save_list, rules, layers), block)
            # Also where nothing is kept: torch 2.11 keeps what an autograd function makes if only its call is marked.
            contexts = partial(_contexts, save_list, kind, layers, use)
            options = {"use_reentrant": False, "context_fn": contexts}
            kinds[key] = kind, _checkpointed(type(block), options)
        kind, checkpointed = kinds[key]
        kind.blocks += 1
        if checkpointed is not None:
            block.__class__ = checkpointed
            use.checkpointed.append(n)
    use.kinds = [kind for kind, _ in kinds.values()]
    return use


def _checkpointed(block: type[nn.Module], options: dict[str, Any]) -> type[nn.Module]:
    """A block class whose forward runs under checkpointing.

    Not a wrapper module, so that parameters keep their names; and one class for many blocks, so that they share one
    compiled graph.
    """

    class Checkpointed(block):
        def forward(self, *args: Any, **kwargs: Any) -> Tensor:
            if torch.compiler.is_compiling():  # which takes no changed list
                return checkpoint(super().forward, *args, **kwargs, **options)  # type: ignore[return-value]
            before = _given(args, kwargs)
            result = checkpoint(super().forward, *args, **kwargs, **options)
            if _given(args, kwargs) != before:
                raise _changes_what_it_is_given(block)
            return result  # type: ignore[return-value]

    Checkpointed.__name__ = f"Checkpointed{block.__name__}"
    return Checkpointed


def _given(*arguments: object) -> list[tuple[int, int | None]]:
    """Return what tells whether a block's arguments have changed: a list of them is longer, or a tensor was written."""
    return [(id(x), x._version if isinstance(x, Tensor) else None) for x in pytree.tree_leaves(arguments)]


def _changes_what_it_is_given(block: type[nn.Module]) -> RecipeError:
    """The error for a block that recomputation would give other arguments than forward."""
    want = "only read: the save-list computes this forward again in backward, from arguments as they are then"
    fix = 'return it, and let the model keep it; or activation_checkpoint.recipe = "none"'
    problem = Problem(f"{block.__name__}.forward", "changes an argument", want, fix)
    return RecipeError(describe(inspect.getfile(block), [problem]))


def _contexts(save_list: SaveList, kind: KindUse, matmuls: tuple[str, ...], use: SaveListUse):
    """Fresh contexts for one forward pass of one block, and its recomputation."""
    return create_selective_checkpoint_contexts(_policy(save_list, kind, matmuls, use))


def _policy(
    save_list: SaveList, kind: KindUse, matmuls: tuple[str, ...], use: SaveListUse
) -> Callable[..., CheckpointPolicy]:
    """Decide for one operation at a time. Forward and recomputation count separately, so that they agree."""
    passes = {is_recompute: BlockRules(save_list, kind.rules, matmuls) for is_recompute in (False, True)}
    began: list[bool] = []
    drew: dict[str, str] = {}  # by action, an operation that drew random numbers
    actions = {"save": CheckpointPolicy.MUST_SAVE, "recompute": CheckpointPolicy.PREFER_RECOMPUTE}

    def decide(ctx, func, *args: object, **kwargs: object) -> CheckpointPolicy:
        try:
            decision = passes[ctx.is_recompute].decide(str(func), func.is_view, kwargs.get("dtype") in FLOAT8)
        except RecipeError as error:  # not raised here: the compiler would wrap it
            use.refused = error
            return actions["recompute"]
        if draws(func, args, kwargs):
            drew[decision.action] = str(func)
            if len(drew) > 1:
                use.refused = _draws_of_two_kinds(save_list, drew)
        if not ctx.is_recompute:
            kind.passes += not began
            began[:] = [True]
            kind.matches.update(decision.rules)
        return actions[decision.action]

    return decide


def _draws_of_two_kinds(save_list: SaveList, drew: dict[str, str]) -> RecipeError:
    """The error for random numbers that recomputation would draw from another place than forward did."""
    problems = Problems(save_list.origin)
    want = f"kept too, or neither: both draw random numbers, and {drew['save']}, which is kept, draws none again"
    fix = f'put first a rule with op = "{drew["save"]}", action = "recompute"'
    problems.add(drew["recompute"], "recomputed", want, fix)
    return problems.error(RecipeError)


def check_names(save_list: SaveList, layers: Sequence[str], n_layers: int | None = None) -> None:
    """Refuse rules that name no operation, no layer or no block of a model, or keep what is cheaper to recompute.

    Args:
        save_list: the list.
        layers: dotted names of the linear layers of blocks.
        n_layers: blocks of the model; None: rules that are for no block are let pass.

    Raises:
        RecipeError: there are such rules.
    """
    spelled = (op.replace("::", ".") for op in torch._C._dispatch_get_all_op_names())
    known = {op if op.count(".") > 1 else f"{op}.default" for op in spelled}
    problems = Problems(save_list.origin)
    add_mistakes(save_list, layers, problems)
    for i, rule in enumerate(save_list.rules):
        if rule.op.startswith("titanlite.") and rule.op not in ops.OPERATIONS:
            own = [op for op in ops.OPERATIONS if op.startswith("titanlite.")]
            near = nearest(rule.op, own)
            fix = f'did you mean "{near}"?' if near else f"name a class: {', '.join(CLASSES)}"
            problems.add(f"rules[{i}].op", f'"{rule.op}"', f"an operation of forward: {', '.join(own)}", fix)
        elif rule.op not in (BLOCK, *CLASSES) and rule.op not in known:
            default = f"{rule.op}.default"
            near = default if default in known else nearest(rule.op, known)
            fix = f'did you mean "{near}"?' if near else f"name a class: {', '.join(CLASSES)}"
            want = "an operation of torch with its overload, as aten.mm.default"
            problems.add(f"rules[{i}].op", f'"{rule.op}"', want, fix)
        elif rule.op in known and rule.action == "save" and _is_pointwise(rule.op):
            want = "no elementwise operation: it costs less to recompute than to store and load"
            problems.add(f"rules[{i}].op", f'"{rule.op}"', want, "remove the rule")
        elif n_layers is not None and not rule.optional and not rule.blocks(n_layers):
            want = f"some of the model's {n_layers} blocks"
            problems.add(f"rules[{i}].layers", f'"{rule.layers}"', want, "remove the rule, or set optional = true")
    problems.raise_all(RecipeError)


def _check_attention(rules: BlockRules, block: nn.Module) -> None:
    """Raise if attention is kept without its q, k and v: here, because the compiler would wrap the error."""
    for module in block.modules():  # in the order in which they run, as for their names
        if isinstance(module, Linear):
            rules.decide(_matmul_of(module))
        elif isinstance(module, GroupedProjection):
            rules.decide(ops.GROUPED_MATMUL)
        elif isinstance(module, CausalAttention):
            rules.decide(ops.ATTENTION)


def _matmul_of(layer: Linear) -> str:
    """The operation that multiplies in a layer, as a trace of it has it."""
    if isinstance(layer, ParallelLinear) and layer.fused is not None:
        gathers = isinstance(layer, ColumnParallelLinear)
        return ops.GATHER_MATMUL if gathers else ops.MATMUL_SCATTER
    if isinstance(layer.matmul, Float8Matmul):
        if layer.matmul.lowering.why is None:
            return ops.SCALED_MATMUL
        if isinstance(layer.matmul.function, BlockScaledFloat8) and layer.matmul.recipe.input.output != "none":
            return ops.BLOCK_SCALED_MATMUL
    return ops.MATMUL


def _is_pointwise(op: str) -> bool:
    """Check whether an operation, like "aten.abs.default", computes each element for itself."""
    if op in _MOVES:
        return True
    return torch.Tag.pointwise in reduce(getattr, op.split("."), torch.ops).tags  # type: ignore[attr-defined]
