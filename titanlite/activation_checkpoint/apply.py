"""Apply a save-list: which activations of a block are kept for backward, and which are recomputed.

A save-list (`recipes/activation_checkpoint/*.toml`) is a list of rules over operations. The first rule that matches
decides, in eager mode and under `torch.compile` alike (`rules.py`). Matches are counted: a rule without matches is
reported, and is an error unless it is `optional`.
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
from titanlite.errors import RecipeError, nearest
from titanlite.kernels.products import FLOAT8
from titanlite.models.experts import product_names
from titanlite.models.layers import CausalAttention
from titanlite.parallel.calls import draws

_MOVES = ("aten._to_copy.default", "aten.copy.default")  # elementwise, though torch does not tag them so


@dataclass
class KindUse:
    """Counts of a save-list's matches in blocks with the same class, layers, rules and attention windows."""

    rules: frozenset[int]  # numbers of the rules for these blocks
    blocks: int = 0
    passes: int = 0  # forward passes, or compiler traces, of single blocks
    matches: Counter[int] = field(default_factory=Counter)  # of each rule in these passes

    def in_a_pass(self, i: int) -> float:
        """Return how often rule number `i` matches in one forward pass of all these blocks."""
        return self.blocks * self.matches[i] / max(self.passes, 1)


@dataclass
class SaveListUse:
    """Counts of a save-list's matches so far, from forward passes or from the compilation of blocks."""

    rules: tuple[SaveRule, ...]
    kinds: list["KindUse"] = field(default_factory=list)
    checkpointed: list[int] = field(default_factory=list)  # numbers of the blocks under checkpointing
    refused: RecipeError | None = None  # an error found in a pass, raised after the pass

    @property
    def matches(self) -> Counter[int]:
        """Count the operations that each rule matches in a forward pass of the model."""
        return Counter({i: n for i in range(len(self.rules)) if (n := round(sum(k.in_a_pass(i) for k in self.kinds)))})

    def unmatched(self) -> list[int]:
        """Return the numbers of rules that matched no operation and are not optional."""
        return [i for i, rule in enumerate(self.rules) if not self.matches[i] and not rule.optional]


def apply_activation_checkpoint(
    model: nn.Module, save_list: SaveList, of_blocks: Sequence[frozenset[int]] | None = None
) -> SaveListUse:
    """Put each block of a model under checkpointing, in place, except blocks that the list keeps whole.

    Return counts of matches, which grow as the model runs. `of_blocks`: numbers of the rules for each block; None:
    those of `SaveList.active`.
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
            # Needed even if nothing is kept: without contexts torch 2.11 keeps the results of autograd functions.
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
    """Return a subclass of a block's class whose forward runs under checkpointing.

    A wrapper module would change the names of parameters. Many blocks have one such class, so that they share a
    compiled graph.
    """

    class Checkpointed(block):
        def forward(self, *args: Any, **kwargs: Any) -> Tensor:
            if torch.compiler.is_compiling():  # the compiler itself refuses a change of arguments
                return checkpoint(super().forward, *args, **kwargs, **options)  # type: ignore[return-value]
            before = _given(args, kwargs)
            result = checkpoint(super().forward, *args, **kwargs, **options)
            if _given(args, kwargs) != before:
                want = (
                    "only read: the save-list computes this forward again in backward, from arguments as they are then"
                )
                fix = 'return it, and let the model keep it; or activation_checkpoint.recipe = "none"'
                where = f"{block.__name__}.forward"
                raise RecipeError.of(inspect.getfile(block), where, "changes an argument", want, fix)
            return result  # type: ignore[return-value]

    Checkpointed.__name__ = f"Checkpointed{block.__name__}"
    return Checkpointed


def _given(*arguments: object) -> list[tuple[int, int | None]]:
    """Return the identity and version of each argument of a block, to find arguments that the block has changed."""
    return [(id(x), x._version if isinstance(x, Tensor) else None) for x in pytree.tree_leaves(arguments)]


def _contexts(save_list: SaveList, kind: KindUse, matmuls: tuple[str, ...], use: SaveListUse):
    """Return torch's checkpoint contexts for one forward pass of a block, and for its recomputation."""
    return create_selective_checkpoint_contexts(_policy(save_list, kind, matmuls, use))


def _policy(
    save_list: SaveList, kind: KindUse, matmuls: tuple[str, ...], use: SaveListUse
) -> Callable[..., CheckpointPolicy]:
    """Return a function that decides for one operation after another, in any pass, whether its result is saved."""
    passes = {is_recompute: BlockRules(save_list, kind.rules, matmuls) for is_recompute in (False, True)}
    began: list[bool] = []
    drew: dict[str, str] = {}  # by action, the last operation that drew random numbers
    actions = {"save": CheckpointPolicy.MUST_SAVE, "recompute": CheckpointPolicy.PREFER_RECOMPUTE}

    def decide(ctx, func, *args: object, **kwargs: object) -> CheckpointPolicy:
        try:
            decision = passes[ctx.is_recompute].decide(str(func), func.is_view, kwargs.get("dtype") in FLOAT8)
        except RecipeError as error:  # not raised here: the compiler would wrap it
            use.refused = error
            return actions["recompute"]
        if draws(func, args, kwargs):
            drew[decision.action] = str(func)
            if len(drew) > 1:  # recomputation would draw other numbers than forward did
                problems, saved = Problems(save_list.origin), drew["save"]
                want = f"kept too, or neither: both draw random numbers, and {saved}, which is kept, draws none again"
                fix = f'put first a rule with op = "{saved}", action = "recompute"'
                problems.add(drew["recompute"], "recomputed", want, fix)
                use.refused = problems.error(RecipeError)
        if not ctx.is_recompute:
            kind.passes += not began
            began[:] = [True]
            kind.matches.update(decision.rules)
        return actions[decision.action]

    return decide


def check_names(save_list: SaveList, layers: Sequence[str], n_layers: int | None = None) -> None:
    """Raise RecipeError for rules whose operation, layer or blocks do not exist, or that keep an elementwise operation.

    `layers` are the dotted names of the linear layers of blocks. Without `n_layers`, block numbers are not checked.
    """
    spelled = (op.replace("::", ".") for op in torch._C._dispatch_get_all_op_names())
    known = {op if op.count(".") > 1 else f"{op}.default" for op in spelled}
    problems = Problems(save_list.origin)
    add_mistakes(save_list, layers, problems)
    own = [op for op in ops.OPERATIONS if op.startswith("titanlite.")]
    for i, rule in enumerate(save_list.rules):
        is_own = rule.op.startswith("titanlite.")
        if rule.op not in (BLOCK, *CLASSES) and rule.op not in (names := own if is_own else known):
            default = f"{rule.op}.default"
            near = default if default in names else nearest(rule.op, names)
            fix = f'did you mean "{near}"?' if near else f"name a class: {', '.join(CLASSES)}"
            of_torch = "an operation of torch with its overload, as aten.mm.default"
            want = f"an operation of forward: {', '.join(own)}" if is_own else of_torch
            problems.add(f"rules[{i}].op", f'"{rule.op}"', want, fix)
        elif rule.op in known and rule.action == "save" and _is_pointwise(rule.op):
            want = "no elementwise operation: it costs less to recompute than to store and load"
            problems.add(f"rules[{i}].op", f'"{rule.op}"', want, "remove the rule")
        elif n_layers is not None and not rule.optional and not rule.blocks(n_layers):
            want = f"some of the model's {n_layers} blocks"
            problems.add(f"rules[{i}].layers", f'"{rule.layers}"', want, "remove the rule, or set optional = true")
    problems.raise_all(RecipeError)


def _is_pointwise(op: str) -> bool:
    """Return whether an operation, like "aten.abs.default", is elementwise."""
    if op in _MOVES:
        return True
    return torch.Tag.pointwise in reduce(getattr, op.split("."), torch.ops).tags  # type: ignore[attr-defined]
