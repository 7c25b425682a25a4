"""Control the choices that the `datasets` library makes by itself: which files of a folder it reads, and how.

If file names contain split names (train-0.jsonl, test/a.parquet), the library reads only these files, else the files of
the most frequent type. Its choice is queried from the library, not derived. A file that it leaves out may contain
records meant for training, or be something else, such as a licence: the file's name decides. If the folder's README
lists the files to read, the library follows it and nothing is checked.

titanlite reads the file types that it knows itself, so that their documents are the same with and without `hf:`. The
library would cut text at newlines and drop these, and turn strings that look like dates into dates. For other types the
options of the library are set such that a text file is one document and "NA" in a table stays text.
"""

import dataclasses
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from titanlite.data.sources import SUFFIXES, Source, counted_names, ending, files_below
from titanlite.errors import DataError

if TYPE_CHECKING:
    from datasets import DatasetBuilder

_OWN = (".txt", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")  # .json.gz may be one value: left to the library
_OPTIONS = {"sample_by": "document", "encoding": "utf-8-sig", "keep_default_na": False, "parse_agent_traces": False}
_RECORDS = re.compile(r"\.(jsonl|ndjson|parquet|csv|tsv|arrow)(\.(gz|zst|xz|bz2|lz4|zip))?$", re.IGNORECASE)
_BESIDE = re.compile(
    r"(readme|licen[cs]e|notice|copying|citation|changelog|requirements|config|state|stats|metadata|croissant"
    r"|dataset_infos?|dataset_dict)\b.*",
    re.IGNORECASE,
)


def left_out(source: Source) -> list[str]:
    """Find the files of a local folder that `datasets` reads in none of its splits.

    Returns:
        A list with one line that counts these files, or an empty list.

    Raises:
        DataError: one of these files seems to contain records, as its suffix is of a record format or of a read file.
    """
    from datasets.load import dataset_module_factory

    assert source.dataset  # noqa: S101  # the source is a dataset
    folder = source.dataset[0]
    found = dataset_module_factory(folder).builder_configs_parameters
    if found.metadata_configs or not found.builder_configs:
        return []
    splits = [files for one in found.builder_configs for files in (one.data_files or {}).values()]
    chosen = {Path(f).resolve() for files in splits for f in files}
    # Leave out the files that `datasets` never reads: hidden ones, README.md, and those in folders like __pycache__.
    names = sorted(os.path.relpath(f, folder) for f in files_below(source.name, source.key, folder))
    own = (Path(folder, name) for name in names if not re.search(r"(^|/)__.*/", name) and name != "README.md")
    below = [f for f in own if f.is_file()]
    others = [f for f in below if f.resolve() not in chosen]
    suffixes = {_suffix(f) for f in below if f.resolve() in chosen}
    records = [f for f in others if _RECORDS.search(f.name) or (_suffix(f) in suffixes and not _BESIDE.match(f.name))]
    if records:
        raise _folder_refused(source, folder, records, suffixes)
    return [f"{_counts(others)} in no split of the folder, as {others[0]}"] if others else []


def builder_of(source: Source) -> "DatasetBuilder":
    """Return the `datasets` builder of a dataset, with options under which the library does not change texts."""
    from datasets import load_dataset_builder

    assert source.dataset  # noqa: S101  # the source is a dataset
    path, config, _ = source.dataset
    builder = load_dataset_builder(path, config)
    if type(builder).__module__.startswith("datasets.packaged_modules.cache"):
        what = ", which the hub does not give; `datasets` has kept records of it from another time"
        fix = f"download its files, as with `hf download --repo-type dataset {path} --local-dir DIR`, and give hf:DIR"
        raise source.refused(what, "the dataset as it is on the hub", fix)
    for name, value in _OPTIONS.items():
        field = next((f for f in dataclasses.fields(builder.config) if f.name == name), None)
        if field is not None and getattr(builder.config, name) == field.default:  # not set by the README
            setattr(builder.config, name, value)
    return builder


def own_files(builder: "DatasetBuilder", split: str) -> tuple[Path, ...]:
    """Return the files of a split if titanlite can read all of them itself, else an empty tuple."""
    given = {"name", "version", "data_dir", "data_files", "description"}
    fields = [f for f in dataclasses.fields(builder.config) if f.name not in given]
    defaults = {f.name: _OPTIONS.get(f.name, f.default) for f in fields}
    of_splits = builder.config.data_files or {}
    splits = list(of_splits) if split == "all" else [name.strip() for name in split.split("+")]  # as the library does
    files = [Path(f) for name in splits for f in of_splits.get(name, [""])]
    is_asked = any(getattr(builder.config, name) != default for name, default in defaults.items())
    return () if is_asked or any(ending(f) not in _OWN for f in files) else tuple(files)


def _folder_refused(source: Source, folder: str, records: list[Path], suffixes: set[str]) -> DataError:
    saw = f"{source.name!r}, a folder of which `datasets` leaves out {_counts(records)}, as {records[0]}"
    want = "files of one type, all of them named for a split, as train-0.jsonl, or none; or a README.md that names them"
    fix = "move those that are left out to another folder"
    if suffixes == {_suffix(f) for f in records} and (suffix := min(suffixes)).endswith(SUFFIXES):
        fix += f"; or write, without hf: and splits, {os.path.join(folder, '**', f'*{suffix}')!r} for all of them"
    readme = "---", "configs:", "- config_name: default", '  data_files: "PATTERN"', "---"
    begin = f"or begin {os.path.join(folder, 'README.md')} with the pattern of what is to be read:"
    fix = "\n      ".join([f"{fix};", begin, *readme])
    return DataError.of("data", source.key, saw, want, fix)


def _suffix(file: Path) -> str:
    """Return the suffix of a file, including the suffix of its compression: `.jsonl.gz`."""
    match = _RECORDS.search(file.name)
    return match[0] if match else file.suffix


def _counts(files: Iterable[Path]) -> str:
    return counted_names((_suffix(f) or f.name for f in files), is_file=True)
