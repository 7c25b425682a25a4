"""The corpus that is read once: what is taken of a package, and that it is the same each time."""

import gzip
import hashlib
import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from scripts.bench import corpus

WORDS = "The table of the page is in a file, and this is for that which it has to be in, with the key"


def _prose(i: int) -> str:
    return "\n".join(f"{WORDS} {chr(97 + i % 26)}{'abcdefg'[k] * (i % 5 + 2)} of part {i}." for k in range(7))


def _code(i: int) -> str:
    return "\n".join(
        f"def name_{chr(97 + i % 26)}_{'xyzuvwq'[k] * (i % 7 + 2)}(value): return len(value) or value" for k in range(7)
    )


PAGE = (
    "<html><head><title>no</title></head><body><div class='sphinxsidebar'><ul><li>menu<li>menu</ul></div>"
    f"<h1>Head</h1><p>{_prose(1)}</p><pre>  kept   so</pre><p>caf&eacute; &lt;tag&gt;</p>"
    "<script>no()</script></body></html>"
)
MANUAL = '.TH X 3\n.SH NAME\nx \\- \\fBbold\\fP word\n.\\" a comment\n.nf\n' + _prose(2)
FILES = {
    "/html/a.html": PAGE,
    "/html/de/a.html": PAGE.replace("part", "teil"),
    "/html/copy.html": PAGE.replace("Head", "Other"),
    "/man/man3/x.3": MANUAL,
    "/rfc.txt": f"{_prose(3)}\n\nAuthor   Informational   [Page 7]\n\f\nRFC 1   Title   1999\n\n{_prose(4)}",
    "/numbers.txt": "The 1 of 2 3 4 5 6 7 8 9 0 " * 40,
    "/list.txt": "alpha beta gamma delta epsilon " * 30,
    "/changelog.txt": _prose(5),
    "/short.txt": _prose(5).replace("the", "\n").replace("this", "\n"),  # all lines are shorter than 40
    "/short_copy.txt": _prose(5).replace("the", "\n").replace("this", "\n"),
    **{f"/more/{i}.txt": _prose(i) for i in range(6, 60)},
}


def _archive(path: Path, files: dict[str, str]) -> str:
    with tarfile.open(path, "w:gz") as tar:
        for name, text in files.items():
            data = gzip.compress(text.encode(), mtime=0) if name.endswith(".gz") else text.encode()
            member = tarfile.TarInfo("." + name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "corpus.toml"
    monkeypatch.setattr(corpus, "TABLE", path)
    monkeypatch.setattr(corpus, "HELD_OUT_TOKENS", 600)
    monkeypatch.setattr(corpus, "TRAIN_TOKENS", 4000)
    sources = {
        "prose": ("manual", FILES),
        "code": ("source", {f"/{i}.py": _code(i) for i in range(20)}),
    }
    lines = list[str]()
    for out in ("a", "b"):
        (tmp_path / out / "packages").mkdir(parents=True)
    for kind, (name, files) in sources.items():
        for out in ("a", "b"):  # in the cache already, so that nothing is downloaded
            seen = _archive(tmp_path / out / "packages" / f"{name}.tar.gz", files)
        entry = {"name": name, "kind": kind, "url": f"https://host/{name}.tar.gz", "sha256": seen}
        entry |= {"only": r"\.py$"} if kind == "code" else {}
        lines += ["[[package]]", "mib = 1", *(f"{key} = '{value}'" for key, value in entry.items())]
    path.write_text("\n".join(lines))
    return tmp_path


def test_a_corpus_is_text_without_markup_junk_and_copies(table: Path):
    documents, packages = corpus.collect(table / "a" / "packages")
    found = {each.path: each.text for each in documents}
    dropped = {"/html/de/a.html", "/numbers.txt", "/list.txt", "/changelog.txt"}
    assert not dropped & set(found)
    assert len({"/html/a.html", "/html/copy.html"} & set(found)) == 1
    (page,) = (found[path] for path in found if path.startswith("/html/"))
    assert "menu" not in page
    assert "no()" not in page
    assert "  kept   so" in page
    assert "café <tag>" in page
    assert "x - bold word" in found["/man/man3/x.3"]
    assert "comment" not in found["/man/man3/x.3"]
    assert "[Page" not in found["/rfc.txt"]
    assert "1999" not in found["/rfc.txt"]
    counts = packages["manual"]["files"]
    assert packages["source"]["documents"] == 20
    assert (counts["duplicate"], counts["numbers"], counts["not prose"], counts["path or encoding"]) == (2, 1, 1, 2)


def test_two_builds_are_equal_and_what_is_unpacked_is_what_was_packed(table: Path):
    for out in ("a", "b"):
        corpus.build(table / out)
    names = ("manifest.json", "packed/corpus.tar.xz.0", "packed/corpus.tar.xz.1", *corpus.FILES)
    assert all((table / "a" / name).read_bytes() == (table / "b" / name).read_bytes() for name in names)
    corpus.unpack(table / "a" / "packed", table / "c")
    manifest = json.loads((table / "c" / "manifest.json").read_text())
    train, held_out = (np.fromfile(table / "c" / f"{name}.bin", "<u2") for name in ("train", "held_out"))
    assert (len(train), len(held_out)) == (4000, manifest["held_out"])
    assert held_out[-1] == 0
    assert len(held_out) >= 600
    for name in ("train", "held_out"):
        assert sum(each[f"{name}_tokens"] for each in manifest["packages"].values()) == manifest[name]
    tokenizer = Tokenizer.from_file(str(table / "c" / "tokenizer.json"))
    apart = [
        set(tokenizer.decode(ids.tolist(), skip_special_tokens=False).split(corpus.SEPARATOR)[:-1])
        for ids in (train, held_out)
    ]
    documents = {each.text for each in corpus.collect(table / "a" / "packages")[0]}
    assert apart[0] <= documents
    assert apart[1] <= documents
    assert not apart[0] & apart[1]

    part = table / "a" / "packed" / "corpus.tar.xz.1"
    (table / "c" / "train.bin").unlink()
    manifest = table / "a" / "manifest.json"
    manifest.write_text(manifest.read_text().replace(corpus._sha256(table / "a" / "train.bin"), "0" * 64))
    corpus._pack(table / "a")
    assert part.exists()
    with pytest.raises(SystemExit, match="copy both parts again"):
        corpus.unpack(table / "a" / "packed", table / "c")


def test_a_package_that_is_another_is_refused(table: Path):
    (table / "a" / "packages" / "manual.tar.gz").write_bytes(b"other")
    with pytest.raises(SystemExit, match="want: "):
        corpus.collect(table / "a" / "packages")
