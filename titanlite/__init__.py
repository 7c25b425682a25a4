"""titanlite pretrains language models from a TOML file. Start reading at training/build.py.

`run`, `plan` and `load` are for calls from Python: see `titanlite.api`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from titanlite.api import plan as plan
    from titanlite.api import run as run
    from titanlite.generation.model import load as load

__version__ = "0.1.0"
_MODULES = {"run": "titanlite.api", "plan": "titanlite.api", "load": "titanlite.generation.model"}


def __getattr__(name: str) -> Any:
    """Import a function when it is asked for: a command that needs none of them starts without torch."""
    if name not in _MODULES:
        raise AttributeError(f"module 'titanlite' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_MODULES[name]), name)
