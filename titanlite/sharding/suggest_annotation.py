"""Find the wrong annotation of a model without a sharding plan, by changing each annotation alone.

An impossible placement often shows far from the wrong annotation. So each annotation is removed or changed, and each
matrix without an annotation gets one. Changes with which there is a plan are suggested. This delays an error by some
seconds.
"""

import re
from collections.abc import Callable, Mapping, Sequence

from titanlite.errors import ShardingError
from titanlite.sharding.graph import Graph, value

_CHOICES = ("tp:0", "tp:1", "replicate", None)


def suggest_annotation(
    graphs: Sequence[Graph], annotations: Mapping[str, str], plan: Callable[[Graph, Mapping[str, str]], object]
) -> str:
    """Return lines with each change of one annotation after which there is a plan; "" if no change helps.

    Args:
        graphs: of a model, small ones first; a change must give all of them a plan.
        annotations: those with which there is no plan.
        plan: makes a plan of a graph or raises ShardingError.
    """

    def makes_one(changed: Mapping[str, str]) -> bool:
        try:
            for graph in graphs:
                plan(graph, changed)
        except ShardingError:
            return False
        return True

    matrices = (n for node, n in graphs[0].names.items() if node in graphs[0].parameters and value(node).ndim > 1)
    patterns = {**annotations, **dict.fromkeys(re.sub(r"\b\d+\b", "*", n) for n in matrices), "@tok_embeddings": None}
    found: list[str] = []
    for pattern in patterns:
        now = annotations.get(pattern)
        others = {k: v for k, v in annotations.items() if k != pattern}
        good = [c for c in _CHOICES if c != now and makes_one(others if c is None else {**others, pattern: c})]
        if good:
            found.append(f'"{pattern}" = {" or ".join(map(_quoted, good))} instead of {_quoted(now)}')
    if not found:
        return ""
    return "\n  one of these changes makes a plan; each was tried:\n    " + "\n    ".join(found)


def _quoted(annotation: str | None) -> str:
    return f'"{annotation}"' if annotation else "none"
