"""Format a sharding plan: a table of the weights' placements, and where a tensor's placement comes from."""

import difflib
import re
from collections.abc import Collection, Iterable
from typing import TypeVar

from titanlite.errors import ConfigError
from titanlite.sharding.plan import placement_text
from titanlite.sharding.representative_blocks import BLOCK_NAME, PlannedLayers
from titanlite.text_table import columns

T = TypeVar("T")


def weight_rows(planned: PlannedLayers) -> list[list[str]]:
    """Return a row for each weight: its name, shape, placement and reason. Equal rows of several layers are joined."""
    held = [t for t in planned.plan.tensors.values() if t.name.endswith((".weight", ".bias"))]
    rows = ((n, (t.shape, t.placement, t.origin.reason), t) for t in held for n in planned.names(t.name))
    found = []
    for name, _, t in _joined_rows(rows):
        how = placement_text(t.placement), t.origin.reason
        found.append([name, "×".join(map(str, t.shape)), *(("-", _APART) if _is_apart(planned, t.name) else how)])
    return found


_APART = "experts: by FSDP alone"


def _is_apart(planned: PlannedLayers, name: str) -> bool:
    """Return whether tensor parallelism has no placement for a parameter, as for experts, which only FSDP shards."""
    layers = [planned.layers.get(n.rpartition(".")[0]) for n in planned.names(name)]
    return not any(layer is not None and name.rpartition(".")[2] in layer.placements for layer in layers)


def _most_alike(asked: str, names: Collection[str]) -> list[str]:
    """Return up to three of `names` that contain `asked`, or else resemble it most. Equal blocks give one name."""

    def unlikeness(name: str) -> tuple[float, int]:
        end = ".".join(name.split(".")[-asked.count(".") - 1 :])  # as many parts as `asked` has
        return -difflib.SequenceMatcher(None, asked, end).ratio(), len(name)

    order = sorted(name for name in names if asked in name)
    order = sorted(order, key=len) if order else sorted(names, key=unlikeness)
    once: dict[str, str] = {}
    for name in order:
        once.setdefault(BLOCK_NAME.sub("layers.*", name), name)
    return [*once.values()][:3]


def _joined_rows(rows: Iterable[tuple[str, object, T]]) -> list[tuple[str, int, T]]:
    """Join rows that differ only in their layer's number to (name with all numbers, number of rows, first item)."""
    groups: dict[object, list[tuple[str, T]]] = {}
    for name, content, item in rows:
        groups.setdefault((re.sub(r"\b\d+\b", "*", name), content), []).append((name, item))
    found: list[tuple[str, int, T]] = []
    for same in groups.values():
        numbers = sorted({int(n) for name, _ in same for n in re.findall(r"\b\d+\b", name)[:1]})
        span = f"{numbers[0]}-{numbers[-1]}" if len(numbers) > 1 else "".join(map(str, numbers))
        if len(numbers) > 1 and numbers != list(range(numbers[0], numbers[-1] + 1)):
            span = ",".join(map(str, numbers))
        found.append((re.sub(r"\b\d+\b", span, same[0][0], count=1), len(same), same[0][1]))
    return found


def sharding_table(planned: PlannedLayers) -> str:
    """Return the table of the weights' placements, below a legend."""
    weights = [["weight", "shape", "placed", "why"], *weight_rows(planned)]
    over = f"tensor parallelism over {planned.plan.ranks} ranks"
    split = f"{over}: S(d) is split along dim d over tp, R whole, P a partial sum"
    return f"{split}\n\n{columns(*weights)}"


def why(planned: PlannedLayers, tensor: str) -> str:
    """Return where a tensor's placement comes from: a line for each step of its derivation, back to the annotation.

    `tensor` is a tensor of the plan, or a module (with or without @) for the tensors that it returns and gathers. It
    may name several blocks, as layers.0-31 in the table or layers.* in an annotation.
    """
    plan, returned = planned.plan, dict[str, str]()
    for t in plan.tensors.values():
        if t.name in plan.steps:  # in order of computation, so the last tensor of a module is its output
            parts = t.module.split(".")
            returned |= {".".join(parts[:n]): t.name for n in range(1, len(parts) + 1) if t.module}
    asked = re.sub(r"^(layers\.\d+)[-,][-,\d]*", r"\1", tensor.removeprefix("@"))
    in_plan = {"loss": [*plan.steps][-1]} | {name: name for name in plan.tensors} | returned
    known = {name: (at, found) for at, found in in_plan.items() for name in planned.names(at)}
    asked = next((name for name in known if BLOCK_NAME.sub("layers.*", name) == asked), asked)
    if asked not in known or (
        tensor.startswith("@") and asked not in {n for at in returned for n in planned.names(at)}
    ):
        own = [name for name, (at, tensor) in known.items() if at in returned or tensor not in plan.steps]
        near = _most_alike(asked, own)
        want = "a parameter, a tensor of the plan, or a module"
        raise ConfigError.of("command line", "--why", tensor, want, " or ".join(f"--why {name}" for name in near))
    at, name = known[asked]
    place = BLOCK_NAME.match(at)
    is_apart = name.endswith((".weight", ".bias")) and _is_apart(planned, name)
    text = "\n  <- ".join([f"{name}: -", _APART] if is_apart else plan.why(name)) + "\n"
    for move in plan.moves:
        ends_at = plan.tensors[move.consumers[0] if move.consumers else move.tensor].module
        if move.forward and ends_at == at and move.tensor != name:
            text += f"{move.forward} of " + "\n  <- ".join(plan.why(move.tensor)) + "\n"
    note = "" if at == asked or not place else f"{place[0]} was planned for this block too: they are alike\n"
    return text + note
