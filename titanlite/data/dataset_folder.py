"""Find which files of a local folder `datasets` chooses without being asked, and how text becomes records.

Where names say what is training data (train-0.jsonl, test/a.parquet) it takes these alone, else the files of the most
frequent type. A folder whose README says which files to read is read as that says.

Files that titanlite can read itself it reads itself, so that their documents are the same with and without `hf:`: the
library cuts text at newlines and drops these, and takes strings that look like dates for dates. Of the rest, text is
one document per file, and "NA" in a table is text.
"""

import dataclasses
import os
from pathlib import Path
from typing import TYPE_CHECKING

from titanlite.data.sources import Source, by_ending, ending, files_below

if TYPE_CHECKING:
    from datasets import DatasetBuilder

_OWN = (".txt", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet")  # .json.gz may be one value, which the library reads
_RECORDS = {".jsonl", ".parquet", ".csv", ".tsv", ".arrow"}
_OPTIONS = {"sample_by": "document", "encoding": "utf-8-sig", "keep_default_na": False, "parse_agent_traces": False}


def left_out(source: Source) -> list[str]:
    """Compare a local folder with what `datasets` reads of it, in all its splits.

    Returns:
        One line about files that are in no split, or none.

    Raises:
        DataError: they are records.
    """
    from datasets.load import dataset_module_factory

    assert source.dataset  # noqa: S101  # it is one
    folder = source.dataset[0]
    found = dataset_module_factory(folder).builder_configs_parameters
    if found.metadata_configs or not found.builder_configs:
        return []
    splits = [files for one in found.builder_configs for files in (one.data_files or {}).values()]
    chosen = {Path(f).resolve() for files in splits for f in files}
    below = map(Path, sorted(files_below(source.name, source.key, folder)))
    others = [f for f in below if f.resolve() not in chosen and f.name != "README.md"]
    if records := [f for f in others if _RECORDS & {suffix.lower() for suffix in f.suffixes}]:
        what = f", a folder of which `datasets` leaves out {by_ending(records)}, as {records[0]}"
        want = "files of one type, all named for a split, as train-0.jsonl, or none; or `configs` in its README.md"
        pattern = os.path.join(folder, "**", f"*{ending(records[0]) or '.jsonl'}")
        fix = f"move them to another folder; or name the files without hf: and splits, as in {pattern!r}"
        raise source.refused(what, want, fix)
    return [f"{by_ending(others)} in no split of the folder, as {others[0]}"] if others else []


def builder_of(source: Source) -> "DatasetBuilder":
    """Return the builder of a dataset, its defaults set so that they change no text."""
    from datasets import load_dataset_builder

    assert source.dataset  # noqa: S101  # it is one
    path, config, _ = source.dataset
    builder = load_dataset_builder(path, config)
    if type(builder).__module__.startswith("datasets.packaged_modules.cache"):
        what = ", which the hub does not give; `datasets` has kept records of it from another time"
        fix = f"download its files, as with `hf download --repo-type dataset {path} --local-dir DIR`, and give hf:DIR"
        raise source.refused(what, "the dataset as it is on the hub", fix)
    for name, value in _OPTIONS.items():
        field = next((f for f in dataclasses.fields(builder.config) if f.name == name), None)
        if field is not None and getattr(builder.config, name) == field.default:  # the README may say otherwise
            setattr(builder.config, name, value)
    return builder


def own_files(builder: "DatasetBuilder", split: str) -> tuple[Path, ...]:
    """Return the files of a split if titanlite reads all of them itself, else nothing."""
    given = {"name", "version", "data_dir", "data_files", "description"}
    fields = [f for f in dataclasses.fields(builder.config) if f.name not in given]
    defaults = {f.name: _OPTIONS.get(f.name, f.default) for f in fields}
    of_splits = builder.config.data_files or {}
    splits = list(of_splits) if split == "all" else [name.strip() for name in split.split("+")]  # as the library does
    files = [Path(f) for name in splits for f in of_splits.get(name, [""])]
    is_asked = any(getattr(builder.config, name) != default for name, default in defaults.items())
    return () if is_asked or any(ending(f) not in _OWN for f in files) else tuple(files)
