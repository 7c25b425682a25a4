"""Find out which packages of titanlite's extras are not installed here, without importing any."""

from importlib.util import find_spec
from pathlib import Path

EXTRAS = {
    "aiohttp": "url",
    "datasets": "datasets",
    "gcsfs": "url",
    "matplotlib": "plot",
    "pyarrow": "datasets",
    "s3fs": "url",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
}
"""The extra in pyproject.toml that installs each optional package."""


def missing_packages(*names: str) -> tuple[str, str] | None:
    """Return what a message about missing packages wants, and its fix; None if all are installed here.

    Args:
        names: keys of `EXTRAS`.
    """
    # A folder of that name in the working directory, such as wandb's own, has a spec, but no origin.
    missing = [name for name in names if (spec := find_spec(name)) is None or spec.origin is None]
    if not missing:
        return None
    one = len(missing) == 1
    want = f"the package{'' if one else 's'} {' and '.join(missing)}, which {'is' if one else 'are'} not installed here"
    extras = ",".join(sorted({EXTRAS[name] for name in missing}))
    # There is no release that pip would find by name; a wheel that is installed it finds.
    is_checkout = (Path(__file__).parents[1] / "pyproject.toml").is_file()
    return want, f"pip install -e '.[{extras}]'" if is_checkout else f"pip install 'titanlite[{extras}]'"
