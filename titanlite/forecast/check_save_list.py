"""What a save-list asks for that the blocks of a model do not have: told before a run starts, at the line of the rule.

All that follows from shapes is found here, without torch: layers, blocks, and classes of operations that do not exist;
where no layer is in float8, also the operations that run. Whether torch has another operation that a rule names is
found where torch is imported (`activation_checkpoint/apply.py`); whether it then runs, which kernel of attention torch
chooses and what carries a float8 recipe out on a device, in the first step.
"""

from dataclasses import replace

from titanlite.activation_checkpoint.operations import CLASSES, OPERATIONS
from titanlite.activation_checkpoint.rules import BLOCK, add_unknown_layers, is_whole, kernels
from titanlite.config.problems import Problems
from titanlite.config.recipe_schema import ModelDims, SaveList
from titanlite.errors import RecipeError, nearest
from titanlite.forecast.activation_bytes import Layout
from titanlite.forecast.block_price import price


def check_save_list(save_list: SaveList, dims: ModelDims, layout: Layout, strict: bool) -> None:
    """Refuse a list that cannot work for a model.

    Args:
        save_list: the list.
        dims: the model's dimensions.
        layout: of a rank; what blocks are made of is known.
        strict: refuse rules that match nothing, too (`job.strict`).

    Raises:
        RecipeError: a rule names a layer or an operation of titanlite's that does not exist, or matches nothing though
            it is not optional; or attention is kept without the matmuls that its q, k and v come from.
    """
    problems = Problems(save_list.origin)
    add_unknown_layers(save_list, layout.block.layers, problems)
    for i, rule in enumerate(save_list.rules):
        if rule.op.startswith("titanlite.") and rule.op not in OPERATIONS:
            own = [op for op in OPERATIONS if op.startswith("titanlite.")]
            near = nearest(rule.op, own)
            fix = f'did you mean "{near}"?' if near else f"name a class: {', '.join(CLASSES)}"
            problems.add(f"rules[{i}].op", f'"{rule.op}"', f"an operation of forward: {', '.join(own)}", fix)
        elif strict and not rule.optional and not rule.blocks(dims.n_layers):
            want = f"some of the model's {dims.n_layers} blocks"
            problems.add(f"rules[{i}].layers", f'"{rule.layers}"', want, "remove the rule, or set optional = true")
    problems.raise_all(RecipeError)
    matched = _matched(save_list, layout)
    for i, rule in enumerate(save_list.rules):
        is_known = rule.op in (BLOCK, *CLASSES) or (rule.op in OPERATIONS and layout.float8 is None)
        if strict and is_known and not rule.optional and i not in matched:
            want = "what an operation of this run is; it matches nothing that no earlier rule does"
            problems.add(f"rules[{i}].op", f'"{rule.op}"', want, "remove the rule, or set optional = true")
    problems.raise_all(RecipeError)


def _matched(save_list: SaveList, layout: Layout) -> set[int]:
    """Rules that match something, with one kernel of attention or another."""
    found, dims = set[int](), layout.dims
    in_float8 = layout.by_block or [layout.converted] * dims.n_layers
    blocks = zip(in_float8, save_list.active(dims.n_layers), dims.windows, strict=True)
    for converted, active, window in dict.fromkeys(blocks):
        if is_whole(save_list, active):
            found |= {i for i in active if save_list.rules[i].op == BLOCK}
            continue
        for kernel in kernels(save_list):
            for priced in price(replace(layout, converted=converted), save_list, active, window, kernel):
                found |= {*priced.decision.rules}
    return found
