"""titanlite pretrains language models from a TOML file. Start reading at training/build.py.

`run`, `plan` and `load` are for calls from Python: see `titanlite.api`.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from titanlite.api import plan as plan
    from titanlite.api import run as run
    from titanlite.generation.model import load_text_model

    load = load_text_model

__version__ = "0.1.0"
_PLACES = {
    "run": ("titanlite.api", "run"),
    "plan": ("titanlite.api", "plan"),
    "load": ("titanlite.generation.model", "load_text_model"),
}


def __getattr__(name: str) -> Any:
    """Import a function when it is asked for: a command that needs none of them starts without torch."""
    if name not in _PLACES:
        raise AttributeError(f"module 'titanlite' has no attribute {name!r}")
    import importlib

    module, attribute = _PLACES[name]
    return getattr(importlib.import_module(module), attribute)
