"""Check what the schemas in `recipe_schema.py` cannot express: that values fit each other and the hardware."""

import dataclasses
import re
from typing import get_args

from titanlite.config.architectures import ARCHITECTURES
from titanlite.config.build import repair_slice
from titanlite.config.problems import Problems, show
from titanlite.config.ranges import check_ranges
from titanlite.config.recipe_schema import (
    BLOCKS,
    MATMULS,
    Float8Recipe,
    Granularity,
    MatrixGroup,
    ModelDims,
    OptimizerRecipe,
    SaveList,
)
from titanlite.config.schema import Model
from titanlite.errors import nearest

OP_CLASSES = ("attention", "matmul", "communication", "statistics", "cast", "experts", "dispatch", "route")
_OF_LAYERS = tuple(name for name in OP_CLASSES if name not in ("attention", "route"))


def check_model(recipe: ModelDims, problems: Problems) -> None:
    """Check ranges, head width and experts. `config/check.py` compares dimensions, after the overrides of `[model]`."""
    experts, refuse = recipe.experts, problems.about(recipe)
    check_ranges(recipe, problems, fix="{} = the published size")
    if not recipe.ffn_dim and experts is None:
        problems.add("ffn_dim", "", "a whole number; it is missing", "add ffn_dim = …, or a table [experts]")
    if recipe.head_dim % 2:  # checked here, as no key of a config overrides it
        refuse("head_dim", "an even width, for rotary pairs", "head_dim = the published size")
    if experts is not None and 0 < experts.n_experts < experts.top_k:
        refuse("experts.top_k", f"at most experts.n_experts = {experts.n_experts}", f"top_k = {experts.n_experts}")
    if experts is not None and experts.ffn_dim > 0 and experts.ffn_dim % 128:
        refuse("experts.ffn_dim", "a multiple of 128", f"ffn_dim = {-(-experts.ffn_dim // 128) * 128}")
    if experts is not None and experts.score == "softmax_of_chosen" and not experts.normalised:
        want = 'true beside score = "softmax_of_chosen": such weights sum to 1 already'
        refuse("experts.normalised", want, "leave normalised out")


_PAIRS = {  # granularities of the two operands that one matmul can combine
    frozenset({"tensor"}),
    frozenset({"row"}),
    frozenset({"tensor", "row"}),  # the tensor's one scale is repeated for each row
    frozenset({"1x128"}),
    frozenset({"1x128", "128x128"}),
}


def check_float8(recipe: Float8Recipe, problems: Problems) -> None:
    """Check that formats and scales of operands can be combined in each matmul, and that the other keys allow them."""
    for matmul, (left, right) in MATMULS.items():
        a, b = getattr(recipe, left), getattr(recipe, right)
        grain_a, grain_b = recipe.operands(matmul)
        if (grain_a == "none") != (grain_b == "none"):
            where, other = (left, right) if grain_a == "none" else (right, left)
            want = f'both operands of a matmul in float8, or both "none"; {other}.{matmul} is not "none"'
            problems.add(f"{where}.{matmul}", '"none"', want, f'{other}.{matmul} = "none"')
        elif grain_a == "none":
            continue
        elif a.dtype == b.dtype == "e5m2":
            want = f"e4m3 for one operand of the {matmul} matmul: tensor cores have no e5m2 × e5m2"
            problems.add(f"{right}.dtype", '"e5m2"', want, f'{right}.dtype = "e4m3"')
        elif frozenset({grain_a, grain_b}) not in _PAIRS:
            kept, wrong = (f"{left}.{matmul}", grain_a), (f"{right}.{matmul}", grain_b)
            if problems.is_own(kept[0]) and not problems.is_own(wrong[0]):  # report a key of this file, not of its base
                kept, wrong = wrong, kept
            fitting = [show(g) for g in get_args(Granularity) if frozenset({kept[1], g}) in _PAIRS]
            want = f"one of {', '.join(fitting)} beside {kept[0]} = {show(kept[1])}"
            problems.add(wrong[0], show(wrong[1]), want, f"{matmul} = {fitting[0]}")
        elif grain_a in BLOCKS and getattr(recipe.accumulation, matmul) == "fast":
            want = '"split": what has scales by block is added up in float32, block by block'
            problems.add(f"accumulation.{matmul}", '"fast"', want, f'{matmul} = "split"')
    grains, weight, refuse = set(recipe.granularities) - {"none"}, recipe.weight, problems.about(recipe)
    if not grains and not problems:
        fix = 'float8.recipe = "none" in the config, for no float8 at all'
        refuse("input.output", 'a matmul in float8; all three are "none"', fix)
    if recipe.fsdp_all_gather == "float8":
        given, want = ["fsdp_all_gather"], ""
        if weight.output != weight.grad_input or weight.output not in ("tensor", "row"):
            given += ["weight.output", "weight.grad_input"]
            want = 'weight.output and weight.grad_input both "tensor", or both "row": one cast travels'
        elif weight.output == "row" and recipe.scale_rounding != "pow2_floor":
            given.append("scale_rounding")
            want = 'scale_rounding = "pow2_floor": backward casts rows again, by column'
        if want:  # report a key of this file, not of its base
            key = next(filter(problems.is_own, given), "fsdp_all_gather")
            refuse(key, f'beside fsdp_all_gather = "float8", {want}', 'fsdp_all_gather = "high_precision"')
    if recipe.reduce_amax and (others := sorted(set(recipe.granularities) - {"tensor"})):
        want = f'false, unless every operand has one scale, "tensor"; {", ".join(others)} would stay a rank\'s own'
        refuse("reduce_amax", want, "leave reduce_amax out")
    elif recipe.reduce_amax and recipe.fsdp_all_gather != "float8":
        want = '"float8" beside reduce_amax = true: maxima of all weights are then reduced at once'
        refuse("fsdp_all_gather", want, 'fsdp_all_gather = "float8"')
    check_ranges(recipe, problems)
    # In float8, a row must be a multiple of 16 bytes.
    unit, why = (128, "blocks are whole") if recipe.has_blocks else (16, "tensor cores multiply no other widths")
    if recipe.dim_multiple < 1 or recipe.dim_multiple % unit:
        refuse("dim_multiple", f"a multiple of {unit}: {why}", f"dim_multiple = {unit}")


def check_save_rules(recipe: SaveList, problems: Problems) -> None:
    """Check that each rule of a save-list names an operation, and that earlier rules leave it something to match."""
    decided: set[str] = set()  # operations that an earlier rule matches in all layers
    for n, rule in enumerate(recipe.rules):
        refuse, is_class, is_block = problems.about(rule, f"rules[{n}]."), rule.op in OP_CLASSES, rule.op == "block"
        is_known = is_class or is_block or "." in rule.op
        if not is_known:
            near = nearest(rule.op, choices := (*OP_CLASSES, "block"))
            fix = f'did you mean "{near}"?' if near else "name a class, or one op"
            refuse("op", f"one of {', '.join(choices)}, or one op, as aten.mm.default", fix)
        if is_block and any(earlier.op != "block" for earlier in recipe.rules[:n]):
            want = "before all rules that are for a part of a block: the first that matches decides"
            refuse("op", want, "move the rule up")
        if is_block and rule.action != "save":
            want = '"save": what a block keeps of itself, other rules say'
            refuse("action", want, 'action = "save", or remove the rule')
        if is_block and recipe.default == "save":
            want = '"recompute" beside a rule for whole blocks'
            problems.add("default", '"save"', want, 'default = "recompute"')
        if rule.every < 1 or (rule.every > 1 and not is_class):
            refuse("every", "at least 1, and 1 for a rule that names one op", "every = 1 (the default)")
        if rule.module and is_known and rule.op not in _OF_LAYERS:
            want = f"no modules: a rule chooses by linear layer among {', '.join(_OF_LAYERS)}"
            refuse("module", want, "remove module")
        try:
            rule.blocks(1)
        except ValueError:
            refuse("layers", 'a slice of the blocks, as ":", "5:" or ":-2"', repair_slice(rule.layers))
        if rule.op in decided or (rule.op == "experts" and "matmul" in decided):
            want = "an op that no earlier rule has decided; this rule can never match"
            refuse("op", want, "remove the rule, or move it up")
        if rule.every == 1 and not rule.module and rule.layers == ":":
            decided.add(rule.op)


def check_optimizer(recipe: OptimizerRecipe, problems: Problems) -> None:
    """Check that the recipe has a group, and that names and numbers of each group are legal."""
    if not recipe.groups:
        problems.add("groups", "", "at least one group", 'add [groups.all] with rule = "adamw"')
    check_ranges(recipe, problems, unsaid=": [optimizer] says it")
    for name, group in recipe.groups.items():
        if not re.fullmatch(r"[\w-]+", name):  # the name becomes a part of metric names
            plain = re.sub(r"[^\w-]+", "_", name) or "all"
            problems.add(f"groups.{name}", "", "a name of letters, digits, _ and -", f"[groups.{plain}]")
        if isinstance(group, MatrixGroup) and isinstance(group.polynomials, tuple):
            _check_polynomials(f"groups.{name}.polynomials", group.polynomials, problems)


def _check_polynomials(key: str, polynomials: tuple[tuple[float, ...], ...], problems: Problems) -> None:
    """Check that each polynomial has three coefficients, and that in turn they keep singular values in (0, 3]."""
    if not polynomials or any(len(each) != 3 for each in polynomials):
        want = "at least one list of three numbers: the factors of x, x³ and x⁵"
        problems.add(key, show(polynomials), want, 'polynomials = "polar_express" (the default)')
        return
    values = [n / 100 for n in range(1, 101)]
    for n, (a, b, c) in enumerate(polynomials):
        values = [a * x + b * x**3 + c * x**5 for x in values]
        if not all(0 < x <= 3 for x in values):  # false for NaN; 0 gives no update, and below 0 the loss rises
            want = f"polynomials that leave singular values of (0, 1] in (0, 3]; after step {n + 1} one is not"
            problems.add(key, show(polynomials), want, "those of a source, with their signs, and each in its place")
            return


def check_keys(model: Model, recipe: ModelDims, problems: Problems) -> None:
    """Refuse keys of a recipe that the architecture of `[model]` does not use, and report keys that it lacks."""
    if model.file:
        return
    known = ARCHITECTURES[model.name]
    defaults = {field.name: field.default for field in dataclasses.fields(ModelDims)}
    every = [key for one in ARCHITECTURES.values() for key in one.needs + one.may_have]
    for key in dict.fromkeys(every):
        value = getattr(recipe, key)
        is_given, is_own = value != defaults[key], getattr(model, key, None) is not None
        if is_given and key not in known.needs + known.may_have:
            where, at = (f"model.{key}", "") if is_own else (key, f" in the recipe {model.name}-{model.flavor}")
            saw = "" if dataclasses.is_dataclass(value) else show(value)
            problems.add(where, saw, f"no such key{at}: {model.name} does not use it", "remove it")
        if not is_given and not is_own and key in known.needs:
            want = f"a value: {model.name} needs it"
            problems.add(f"model.{key}", "", want, f"{key} = the published value, in the recipe")
