"""Find the parameters that weight decay leaves alone, by the patterns of `optimizer.weight_decay_exclude`."""

import re
from collections.abc import Collection, Sequence
from fnmatch import fnmatch

from titanlite.config.build import show
from titanlite.config.problems import Origin, Problems
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
