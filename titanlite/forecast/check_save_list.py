"""Refuse what a save-list asks for that the blocks of a model do not have: before a run, at the line of the rule.

Layers, blocks and classes of operations that do not exist are found without torch, where the names of the layers are
known, and so is attention without its q, k and v; what matches nothing is found by the traced blocks. Which kernel of
attention torch chooses, and what carries a float8 recipe out on a device, shows in the first step.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from titanlite.activation_checkpoint.operations import ATTENTION, CLASSES, OPERATIONS
from titanlite.activation_checkpoint.rules import BLOCK, BlockRules, add_mistakes, is_whole, kernels
from titanlite.config.problems import Problems
from titanlite.config.recipe_schema import SaveList
from titanlite.errors import RecipeError, nearest

if TYPE_CHECKING:
    from titanlite.forecast.traced_run import TracedRun


def check_names_of_list(save_list: SaveList, layers: Sequence[str] | None, n_layers: int, strict: bool) -> None:
    """Refuse a list that names what a model does not have.

    Args:
        save_list: the list.
        layers: names of the linear layers of a block; None: they are not known.
        n_layers: blocks of the model.
        strict: refuse rules that are for no block, too (`job.strict`).

    Raises:
        RecipeError: a rule names a layer or an operation of titanlite's that does not exist, or is for no block though
            it is not optional.
    """
    problems = Problems(save_list.origin)
    add_mistakes(save_list, layers, problems)
    for i, rule in enumerate(save_list.rules):
        if rule.op.startswith("titanlite.") and rule.op not in OPERATIONS:
            own = [op for op in OPERATIONS if op.startswith("titanlite.")]
            near = nearest(rule.op, own)
            fix = f'did you mean "{near}"?' if near else f"name a class: {', '.join(CLASSES)}"
            problems.add(f"rules[{i}].op", f'"{rule.op}"', f"an operation of forward: {', '.join(own)}", fix)
        elif strict and not rule.optional and not rule.blocks(n_layers):
            want = f"some of the model's {n_layers} blocks"
            problems.add(f"rules[{i}].layers", f'"{rule.layers}"', want, "remove the rule, or set optional = true")
    problems.raise_all(RecipeError)


def check_attention(save_list: SaveList, layers: Sequence[str], n_layers: int, matmuls: Sequence[str]) -> None:
    """Refuse a list that keeps attention without its q, k and v, in blocks that begin with `wqkv` and attention.

    Args:
        save_list: the list.
        layers: names of the linear layers of a block.
        n_layers: blocks of the model.
        matmuls: operations that `wqkv` may turn out to be; the list must be wrong with each.

    Raises:
        RecipeError: it is.
    """
    for active in dict.fromkeys(save_list.active(n_layers)):
        if is_whole(save_list, active):
            continue
        found: list[RecipeError] = []
        for op in matmuls:
            rules = BlockRules(save_list, active, tuple(layers))
            rules.decide(op)
            try:
                rules.decide(ATTENTION)
            except RecipeError as error:
                found.append(error)
        if len(found) == len(matmuls):
            raise found[0]


def check_matches(save_list: SaveList, run: "TracedRun", strict: bool) -> None:
    """Refuse a list of which a rule matches nothing, or that keeps attention without its q, k and v.

    Args:
        save_list: the list.
        run: of a rank.
        strict: refuse rules that match nothing (`job.strict`).

    Raises:
        RecipeError: there is such a rule, and it is not optional.
    """
    if run.no_trace_reason is not None:
        return
    matched, problems = _matched(save_list, run), Problems(save_list.origin)
    for i, rule in enumerate(save_list.rules):
        is_known = rule.op in (BLOCK, *CLASSES) or (rule.op in OPERATIONS and run.float8 is None)
        if strict and is_known and not rule.optional and i not in matched:
            want = "what an operation of this run is; it matches nothing that no earlier rule does"
            problems.add(f"rules[{i}].op", f'"{rule.op}"', want, "remove the rule, or set optional = true")
    problems.raise_all(RecipeError)


def _matched(save_list: SaveList, run: "TracedRun") -> set[int]:
    """Give the rules that match something, with one kernel of attention or another."""
    from titanlite.forecast.activation_cost import costs

    found = set[int]()
    kinds = {
        (id(block), active): block for block, active in zip(run.blocks, save_list.active(len(run.blocks)), strict=True)
    }
    for (_, active), block in kinds.items():
        if is_whole(save_list, active):
            found |= {i for i in active if save_list.rules[i].op == BLOCK}
            continue
        for kernel in kernels(save_list):
            for cost in costs(block, save_list, active, run.compiled, kernel):
                found |= {*cost.decision.rules}
    return found
