"""What `datasets` leaves out of a local folder: it chooses the files of one, and says nothing of the others.

Where names say what is training data (train-0.jsonl, test/a.parquet) it takes these alone, else the files of the most
frequent type. What it has chosen is asked of it, not derived. A file that it did not choose may be records that were
meant to be trained on, or lie there for another reason, as a licence: its name decides. A folder whose README says
which files to read is read as that says.
"""

import glob
import os
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from titanlite.data.sources import SUFFIXES, Source
from titanlite.errors import DataError, Problem, describe

_RECORDS = re.compile(r"\.(jsonl|ndjson|parquet|csv|tsv|arrow)(\.(gz|zst|xz|bz2|lz4|zip))?$", re.IGNORECASE)
_BESIDE = re.compile(
    r"(readme|licen[cs]e|notice|copying|citation|changelog|requirements|config|state|stats|metadata|croissant"
    r"|dataset_infos?|dataset_dict)\b.*",
    re.IGNORECASE,
)


def left_out(source: Source) -> list[str]:
    """Compare a local folder with what `datasets` reads of it, in all its splits.

    Args:
        source: a dataset in a folder.

    Returns:
        One line about files that are left out and are no records, or none.

    Raises:
        DataError: records are left out, or what has the suffix of those that are read.
    """
    from datasets.load import dataset_module_factory

    assert source.dataset  # noqa: S101  # it is one
    folder = source.dataset[0]
    found = dataset_module_factory(folder).builder_configs_parameters
    if found.metadata_configs or not found.builder_configs:
        return []
    splits = [files for one in found.builder_configs for files in (one.data_files or {}).values()]
    chosen = {Path(f).resolve() for files in splits for f in files}
    below = _files_below(folder)
    others = [f for f in below if f.resolve() not in chosen]
    suffixes = {_suffix(f) for f in below if f.resolve() in chosen}
    records = [f for f in others if _RECORDS.search(f.name) or (_suffix(f) in suffixes and not _BESIDE.match(f.name))]
    if records:
        raise _refused(source, folder, records, suffixes)
    return [f"{_counts(others)} in no split of the folder, as {others[0]}"] if others else []


def _refused(source: Source, folder: str, records: list[Path], suffixes: set[str]) -> DataError:
    saw = f"{source.name!r}, a folder of which `datasets` leaves out {_counts(records)}, as {records[0]}"
    want = "files of one type, all of them named for a split, as train-0.jsonl, or none; or a README.md that names them"
    fix = "move those that are left out to another folder"
    if suffixes == {_suffix(f) for f in records} and (suffix := min(suffixes)).endswith(SUFFIXES):
        fix += f"; or write, without hf: and splits, {os.path.join(folder, '**', f'*{suffix}')!r} for all of them"
    readme = "---", "configs:", "- config_name: default", '  data_files: "PATTERN"', "---"
    begin = f"or begin {os.path.join(folder, 'README.md')} with the pattern of what is to be read:"
    fix = "\n      ".join([f"{fix};", begin, *readme])
    return DataError(describe("data", [Problem(source.key, saw, want, fix)]))


def _files_below(folder: str) -> list[Path]:
    """All but what `datasets` never looks at: hidden files, folders named as __pycache__, its own descriptions."""
    names = sorted(glob.glob("**/*", root_dir=folder, recursive=True))
    own = [Path(folder, name) for name in names if not re.search(r"(^|/)__.*/", name) and name != "README.md"]
    return [f for f in own if f.is_file()]


def _suffix(file: Path) -> str:
    """With that of what is compressed: `.jsonl.gz`."""
    match = _RECORDS.search(file.name)
    return match[0] if match else file.suffix


def _counts(files: Iterable[Path]) -> str:
    """`2 .txt files, 1 .py file`, the most frequent suffix first."""
    counts = Counter(_suffix(f) or f.name for f in files).most_common()
    return ", ".join(f"{n:,} {suffix} file{'s' * (n > 1)}" for suffix, n in counts)
