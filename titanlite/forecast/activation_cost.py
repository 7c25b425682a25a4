"""Find what a save-list costs: the bytes that each block keeps, and the operations that backward computes again.

The rules are applied to the traced operations by the same code as in the run (`activation_checkpoint/rules.py`). A
compiler keeps only the saved values that backward needs, and repeats only the operations that make its other inputs:
both are found by a walk from backward's operations to their sources. Eager mode keeps every result that a rule saves,
and repeats forward up to the last result that autograd has kept.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from titanlite.activation_checkpoint import operations as ops
from titanlite.activation_checkpoint.operations import CLASSES, OPERATIONS
from titanlite.activation_checkpoint.rules import BLOCK, BlockRules, Decision, add_mistakes, is_whole, kernels
from titanlite.config.problems import Problems
from titanlite.config.recipe_schema import SaveList, SaveRule
from titanlite.errors import Problem, RecipeError, describe
from titanlite.forecast.traced_block import Operation, TracedBlock
from titanlite.forecast.traced_run import TracedRun


@dataclass(frozen=True)
class Activation:
    """The result of an operation that a save-list can name. `Operation` describes the other attributes.

    Attributes:
        op: the operation that makes it. For attention, the kernel that runs.
        layer: the linear layer that the operation belongs to, "" for attention.
        bytes: size of the result.
    """

    op: str
    layer: str
    bytes: int
    flops: int
    moved: int
    received: int
    in_float8: bool
    call: tuple[Any, ...] = field(compare=False, repr=False)


@dataclass(frozen=True)
class Cost:
    """An activation under a save-list: the decision, bytes held until backward, and whether backward recomputes it."""

    activation: Activation
    decision: Decision
    held: int
    recomputed: bool


@dataclass(frozen=True)
class BlockCost:
    """The bytes that one block keeps under a save-list, and its recomputation, in a micro-step.

    Attributes:
        whole: whether the block runs without checkpointing.
        held: bytes kept until backward, the block's input included.
        recomputed: the activations that backward computes again; none if `whole`.
    """

    whole: bool
    held: int
    recomputed: tuple[Activation, ...]


@dataclass(frozen=True)
class RuleCost:
    """The cost of one rule on one rank in a micro-step.

    Attributes:
        blocks: number of blocks that the rule applies to. `held`, `flops` and `moved` are means over these blocks.
        matches: number of operations that the rule matched, in all blocks.
        held: bytes kept until backward.
        flops: FLOPs to compute once the results that the rule decides about; `moved`: bytes, as in `Operation`.
    """

    rule: SaveRule
    blocks: int
    matches: int
    held: float
    flops: float
    moved: float


def activations(block: TracedBlock) -> list[Activation]:
    """List the results of a block's operations, except elementwise ones, in the order in which they are computed."""
    return [cost.activation for cost in costs(block, SaveList("", "recompute"), frozenset(), compiled=False)]


def costs(
    block: TracedBlock, save_list: SaveList, active: frozenset[int], compiled: bool, kernel: str | None = None
) -> list[Cost]:
    """Return the cost of each activation of one block under a save-list whose default is "recompute".

    `active` are the numbers of the rules for this block. `kernel` is the operation that computes attention to whole
    samples; None: the kernel that the list names. For blocks without checkpointing see `held_without_checkpointing`.

    Raises:
        RecipeError: attention is kept, but not the matmuls that make its q, k and v.
    """
    kernel = kernel or kernels(save_list)[0]
    rules = BlockRules(save_list, active, block.layers)
    decided: list[tuple[int, Operation, str, Decision]] = []
    for i, operation in enumerate(block.forward):
        is_attention = operation.op in CLASSES["attention"] and operation.op not in ops.OWN_ATTENTION
        op = kernel if is_attention else operation.op
        decided.append((i, operation, op, rules.decide(op, to_float8=operation.to_float8)))
    saved = {v for _, operation, _, decision in decided if decision.action == "save" for v in operation.makes}
    if compiled:  # a compiler moves into backward the results that forward does not read
        saved = {v for v in saved if not block.used_in_forward.isdisjoint(block.forward[block.makers[v]].makes)}
    needed, repeated = _reached(block, saved) if compiled else (saved, None)
    found: list[Cost] = []
    for i, operation, op, decision in decided:
        # Skip results made of weights alone, which no rule keeps, and casts to dtypes other than float8.
        if not operation.of_tokens or op not in OPERATIONS or (op == ops.CAST and not operation.to_float8):
            continue
        activation = Activation(
            op=op,
            layer=decision.layer,
            bytes=block.bytes_of(operation.makes),
            flops=operation.flops,
            moved=operation.moved,
            received=operation.received,
            in_float8=operation.in_float8,
            call=operation.call,
        )
        is_saved = decision.action == "save"
        held = block.bytes_of(needed.intersection(operation.makes)) if is_saved else 0
        again = not is_saved and i < block.n_repeated if repeated is None else i in repeated
        found.append(Cost(activation, decision, held, again))
    return found


def _reached(block: TracedBlock, saved: set[int]) -> tuple[set[int], set[int]]:
    """Return the saved values that backward needs, and the numbers of the operations that remake its other inputs."""
    needed, repeated, left = set[int](), set[int](), list(block.wanted)
    while left:
        value = left.pop()
        if value in saved:
            needed.add(value)
        elif (maker := block.makers.get(value)) is not None and maker not in repeated:
            repeated.add(maker)
            left += block.forward[maker].reads
    return needed, repeated


def held_without_checkpointing(block: TracedBlock, compiled: bool) -> int:
    """Return the bytes that a block without checkpointing holds for backward, its input included if it is kept.

    Eager mode holds what autograd keeps. A compiler recomputes an elementwise result if it can fuse this with all
    operations that read the result in backward. It keeps all other results that backward reads.
    """
    if not compiled:
        return block.saved
    made, forward = block.makers, block.forward

    def is_fusible(value: int) -> bool:
        return forward[made[value]].is_fusible

    read = [(v, each.is_fusible or each.is_reduction) for each in block.backward for v in each.reads]
    kept = {value for value, is_joined in read if value in made and not (is_joined and is_fusible(value))}
    left, seen = [value for value, _ in read], set[int]()
    while left:
        value = left.pop()
        if value in kept or value in seen:
            continue
        seen.add(value)
        if value in block.stream or (value in made and not is_fusible(value)):
            kept.add(value)
        elif value in made:
            left += forward[made[value]].reads
    # The compiler computes these in backward: forward does not read them, and backward has their inputs.
    there = kept | block.given
    late = {
        value
        for value in kept.intersection(made)
        if block.used_in_forward.isdisjoint(forward[made[value]].makes) and there.issuperset(forward[made[value]].reads)
    }
    return block.bytes_of(kept - late)


def no_cost_reasons(save_list: SaveList) -> list[Problem]:
    """Return the reasons why the cost of a save-list cannot be predicted; empty if it can be."""
    problems: list[Problem] = []
    if save_list.default == "save" and save_list.rules:
        want = '"recompute": what is kept without being named depends on the compiler, and has no price'
        problems.append(Problem("default", '"save"', want, 'default = "recompute", and rules for what to keep'))
    for i, rule in enumerate(save_list.rules):
        if rule.action == "save" and rule.op not in (BLOCK, *CLASSES, *OPERATIONS):
            want = "a class, or an operation of one: what others make has no price"
            fix = f"name a class: {', '.join(CLASSES)}; or train a few steps and read memory_gib"
            problems.append(Problem(f"rules[{i}].op", f'"{rule.op}"', want, fix))
    return problems


def block_costs(run: TracedRun, save_list: SaveList) -> list[BlockCost]:
    """Return the cost of each block of a run under a save-list, in the order in which the blocks run.

    Raises:
        RecipeError: the cost cannot be predicted (`no_cost_reasons`); the list names a layer that blocks lack, or keeps
            attention without its q, k and v; or the run could not be traced.
    """
    if run.no_trace_reason:
        raise RecipeError(describe("config", [run.no_trace_reason]))
    problems = Problems(save_list.origin)
    for why in no_cost_reasons(save_list):
        problems.add(why.where, why.saw, why.want, why.fix)
    add_mistakes(save_list, run.layers, problems)
    problems.raise_all(RecipeError)
    known: dict[tuple[frozenset[int], int], BlockCost] = {}
    return [
        known.get(key) or known.setdefault(key, _block_cost(run, block, save_list, active))
        for block, active in zip(run.blocks, save_list.active(len(run.blocks)), strict=True)
        for key in [(active, id(block))]
    ]


def _block_cost(run: TracedRun, block: TracedBlock, save_list: SaveList, active: frozenset[int]) -> BlockCost:
    if is_whole(save_list, active):
        return BlockCost(True, held_without_checkpointing(block, run.compiled), ())
    parts = costs(block, save_list, active, run.compiled)
    held = block.input_bytes + sum(part.held for part in parts)
    return BlockCost(False, held, tuple(part.activation for part in parts if part.recomputed))


def rule_costs(run: TracedRun, save_list: SaveList) -> list[RuleCost]:
    """Return the cost of each rule of a save-list, which must be one that `block_costs` accepts."""
    rules = save_list.rules
    matches, held, flops, moved = (Counter[int]() for _ in range(4))
    for active, block, n in _kinds_of_blocks(run, save_list):
        if is_whole(save_list, active) and rules:
            first = min(i for i in active if rules[i].op == BLOCK)
            matches[first] += n
            held[first] += n * (held_without_checkpointing(block, run.compiled) - block.input_bytes)
            continue
        for part in costs(block, save_list, active, run.compiled) if rules else ():
            matches.update(dict.fromkeys(part.decision.rules, n))
            if (by := part.decision.by) is not None:
                held[by] += n * part.held
                flops[by] += n * part.activation.flops
                moved[by] += n * part.activation.moved
    counts = [len(rule.blocks(len(run.blocks))) for rule in rules]
    return [
        RuleCost(rule, n, matches[i], held[i] / max(n, 1), flops[i] / max(n, 1), moved[i] / max(n, 1))
        for i, (rule, n) in enumerate(zip(rules, counts, strict=True))
    ]


def check_matches(save_list: SaveList, run: TracedRun, strict: bool) -> None:
    """Refuse a list that keeps attention without its q, k and v; if `strict`, also rules that match no operation.

    Raises:
        RecipeError: the list is refused. Rules with `optional = true` may match nothing.
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


def _matched(save_list: SaveList, run: TracedRun) -> set[int]:
    """Return the numbers of the rules that match an operation with at least one of the list's attention kernels."""
    found = set[int]()
    for active, block, _ in _kinds_of_blocks(run, save_list):
        if is_whole(save_list, active):
            found |= {i for i in active if save_list.rules[i].op == BLOCK}
            continue
        for kernel in kernels(save_list):
            found.update(*(cost.decision.rules for cost in costs(block, save_list, active, run.compiled, kernel)))
    return found


def _kinds_of_blocks(run: TracedRun, save_list: SaveList) -> list[tuple[frozenset[int], TracedBlock, int]]:
    """Group the blocks by active rules and trace; return (rule numbers, trace, number of blocks) of each group."""
    by_id = {id(block): block for block in run.blocks}
    kinds = Counter(zip(save_list.active(len(run.blocks)), map(id, run.blocks), strict=True))
    return [(active, by_id[each], n) for (active, each), n in kinds.items()]
