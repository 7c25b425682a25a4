"""Each kind of model is planned once for all runs of it: every rank of every run would export it again, a second each.

Importing this is enough. Ranks are forked later, and the first that needs a plan leaves it in a folder for all others.
"""

import fcntl
import hashlib
import pickle
import tempfile
from pathlib import Path
from typing import Any

from torch import nn

from titanlite.sharding import graph
from titanlite.sharding.annotations import annotations_of
from titanlite.sharding.layers import PlannedLayers, plan_layers
from titanlite.training import build

_FOLDER = tempfile.TemporaryDirectory(prefix="plans-")  # a forked rank ends without removing it


def _planned_once(model: nn.Module, tokens: int, ranks: int, *how: Any) -> PlannedLayers:
    """`plan_layers`, or what it returned before."""
    if not type(model).__module__.startswith("titanlite.models."):
        return plan_layers(model, tokens, ranks, *how)  # another file may have a class of this name
    decides = repr((graph.kind_of(model), annotations_of(model), tokens, ranks, *how))
    with (Path(_FOLDER.name) / hashlib.sha256(decides.encode()).hexdigest()).open("a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed
        file.seek(0)
        if not (known := file.read()):
            known = pickle.dumps(plan_layers(model, tokens, ranks, *how))
            file.write(known)
    return pickle.loads(known)


build.plan_layers = _planned_once
