"""Make a corpus of 100 million tokens of manuals and sources: python -m scripts.bench.corpus build OUT

`corpus.toml` names Debian packages by URL and SHA-256; docs/performance.md says what is taken and dropped. Two builds
give the same bytes. `unpack` needs the standard library alone: python -m scripts.bench.corpus unpack OUT/packed corpus
"""

import argparse
import collections
import gzip
import hashlib
import html.parser
import io
import json
import lzma
import re
import string
import struct
import subprocess
import sys
import tarfile
import tomllib
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

TABLE = Path(__file__).with_suffix(".toml")
VOCAB_SIZE, SEPARATOR = 16_384, "<|endoftext|>"
TRAIN_TOKENS, HELD_OUT_TOKENS = 100_000_000, 2_000_000
FILES = "train.bin", "held_out.bin", "tokenizer.json"
HTML, MANUAL = re.compile(r"\.(x?html?|sgml|xml)$"), re.compile(r"/man\w/[^/]+$")
LANGUAGE = "(ar|bg|c[as]|d[ae]|e[lstu]|f[air]|gl|h[eru]|i[dt]|ja|ko|l[tv]|n[blno]|p[lt]|r[ou]|s[klrv]|tr|uk|vi|zh)"
FOREIGN = re.compile(rf"/(translations?|locales?|{LANGUAGE}([_-]\w+)?)/|\.{LANGUAGE}([_-]\w+)?(\.html)?$")
JUNK = re.compile(r"changelog|changes|news|copyright|licen[cs]e|genindex|/_(sources|modules)/|/search\.|testdata", re.I)
SKIPPED = re.compile("script|style|nav|head|header|footer|form|button|select|svg|math").fullmatch
NAVIGATION = re.compile(r"navigation|sidebar|related|navheader|navfooter|\btoc\b|headerlink|breadcrumb|viewcode|footer")
CONTAINER = re.compile("a|aside|div|section|span|table|ul|ol").fullmatch  # what may be navigation, and is closed
VOID = re.compile("area|base|br|col|embed|hr|img|input|link|meta|source|wbr").fullmatch
INLINE = re.compile("a|abbr|b|code|em|i|kbd|q|samp|small|span|strong|sub|sup|tt|u|var").fullmatch
WORDS = {"the", "of", "to", "and", "is", "in", "a", "for", "be", "that", "this", "are", "or", "with", "it", "as"}
DIGITS, LETTERS = string.digits.encode(), string.ascii_letters.encode()
Counts = collections.Counter[str]


class Document(NamedTuple):
    """A file of a package, as text."""

    package: str
    path: str
    text: str


class _Page(html.parser.HTMLParser):
    """Collect what a reader of a page sees, without its navigation."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self.skipped: list[str] = []  # open elements, from the outermost skipped one on
        self.verbatim = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        role = " ".join(value or "" for name, value in attrs if name in ("class", "role", "id"))
        if self.skipped or SKIPPED(tag) or (CONTAINER(tag) and NAVIGATION.search(role)):
            self.skipped += [] if VOID(tag) else [tag]
            return
        self.verbatim += tag == "pre"
        if not INLINE(tag):
            self.parts.append("\n- " if tag == "li" else " " if tag in ("td", "th", "img") else "\n")

    def handle_endtag(self, tag: str) -> None:
        if self.skipped:
            while tag in self.skipped and self.skipped.pop() != tag:
                pass
            return
        self.verbatim -= tag == "pre" and self.verbatim > 0
        if not INLINE(tag):
            self.parts.append(" " if tag in ("td", "th") else "\n")

    def handle_data(self, data: str) -> None:
        if not self.skipped:
            self.parts.append(data if self.verbatim else re.sub(r"\s+", " ", data))


def _of_html(markup: str) -> str:
    page = _Page()
    page.feed(markup)
    page.close()
    text = re.sub(r"\n-\s+", "\n- ", "".join(page.parts))
    return text if "<pre" in markup.lower() else re.sub(r"\n +", "\n", text)


def _of_roff(text: str) -> str:
    """Return a manual page without its macros: their arguments stay, in lines of their own."""
    text = re.sub(r"\\f(\[\w*\]|\(..|.)|\\s[-+]?\d|\\[&|^/,:]", "", re.sub(r'\\".*', "", text))
    text = text.replace("\\-", "-").replace("\\e", "\\").replace("\\ ", " ")
    signs = {"aq": "'", "dq": '"', "bu": "*", "co": "(c)"}
    text = re.sub(r"\\\((..)|\\\[(\w+)\]", lambda found: signs.get(found[1] or found[2], ""), text)
    layout = r"^[.'] *(TH|so|nf|fi|in|ie|el|if|de|ds|nr|ad|hy|ta|ft|PD|RS|RE|sp|ne|na|PP|IX|UR|UE)\b.*$"
    return re.sub(r"^\.\s*[A-Za-z]*\s*", "", re.sub(layout, "", text, flags=re.M), flags=re.M)


def _of_text(text: str) -> str:  # without page breaks and tables of contents
    text = re.sub(r"\n+[^\n]*\[Page \w+\]\s*\f?\s*\n(RFC \d+[^\n]*\n+)?", "\n\n", text)
    return "\n".join(line for line in text.split("\n") if "....." not in line and ". . . ." not in line)


def _text_of(path: str, data: bytes, is_code: bool) -> str | None:
    """Return a file's text without markup; None if it is not UTF-8."""
    try:
        text = (gzip.decompress(data) if path.endswith(".gz") else data).decode().replace("\r\n", "\n")
    except (UnicodeDecodeError, OSError):
        return None
    if not is_code:
        plain = path.removesuffix(".gz").lower()
        text = _of_html(text) if HTML.search(plain) else _of_roff(text) if MANUAL.search(plain) else _of_text(text)
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"[ \t]+$", "", text, flags=re.M)).strip() + "\n"


def _fault(text: str, is_code: bool) -> str | None:
    """Return why a text is not taken, or None."""
    dense = "".join(text.split())
    plain = dense.encode("ascii", "ignore")
    if len(dense) < 300:
        return "short"
    if SEPARATOR in text or len(dense) - len(plain) > 0.03 * len(dense):
        return "not ASCII"
    digits, letters = (len(plain) - len(plain.translate(None, signs)) for signs in (DIGITS, LETTERS))
    if digits > 0.15 * len(dense) or letters < 0.55 * len(dense):
        return "numbers"
    if is_code:
        return "long lines" if max(map(len, text.splitlines())) > 1000 else None
    words = re.findall(r"[a-z]+", text.lower())
    return None if sum(word in WORDS for word in words) > 0.12 * len(words) else "not prose"


def _fetch(entry: dict[str, Any], cache: Path) -> Path:
    """Return the archive of a package, downloaded once and checked each time."""
    path = cache / Path(entry["url"]).name
    if not path.exists():
        partial = cache / f"{path.name}.part"
        with urllib.request.urlopen(entry["url"], timeout=60) as answer:
            partial.write_bytes(answer.read())
        partial.replace(path)
    if (seen := _sha256(path)) != entry["sha256"]:
        sys.exit(f"{path}: sha256 {seen}\n  want: {entry['sha256']}\n  fix:  delete the file, to fetch it again")
    return path


def _files(archive: Path) -> Iterator[tuple[str, Callable[[], bytes]]]:
    """Yield the regular files of a .deb or a source's .tar.*, in the order of the hashes of their paths."""
    command = [{".xz": "xz", ".gz": "gzip", ".bz2": "bzip2"}.get(archive.suffix, ""), "-dc", str(archive)]
    command = ["dpkg-deb", "--fsys-tarfile", str(archive)] if archive.suffix == ".deb" else command
    data = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        members = {"/" + each.name.removeprefix("./"): each for each in tar if each.isfile() and each.size < 4 << 20}
        for path in sorted(members, key=lambda path: hashlib.sha256(path.encode()).digest()):
            member = members[path]
            yield path, lambda member=member: cast("IO[bytes]", tar.extractfile(member)).read()


def _taken(entry: dict[str, Any], archive: Path, why: Counts) -> Iterator[Document]:
    """Yield the documents of a package that are text, up to its `mib`; count the files that were looked at."""
    is_code, room = entry["kind"] == "code", entry["mib"] * 2**20
    only = re.compile(entry.get("only", r"\.(x?html?|txt|rst|md|pod|sgml|xml)(\.gz)?$|/man\w/"))
    for path, read in _files(archive):
        if not only.search(path) or re.search(entry.get("skip", "$^"), path):
            continue
        is_junk = JUNK.search(path) or (not is_code and FOREIGN.search(path.removesuffix(".gz")))
        text = None if is_junk else _text_of(path, read(), is_code)
        fault = "path or encoding" if text is None else _fault(text, is_code)
        why[fault or "text"] += 1
        if text and not fault:
            yield Document(entry["name"], path, text)
            if (room := room - len(text.encode())) < 0:
                return


def _without_repeated(documents: list[Document]) -> list[Document]:
    """Leave out the long lines that many documents of a package have."""
    lines = collections.Counter(line for each in documents for line in set(each.text.split("\n")) if len(line) >= 25)
    kept = ("\n".join(line for line in each.text.split("\n") if lines[line] < 20) for each in documents)
    return [each._replace(text=text) for each, text in zip(documents, kept, strict=True)]


def _deduplicated(documents: list[Document], seen: set[bytes], why: Counts) -> Iterator[Document]:
    """Yield the documents of whose long lines, by characters, at least half are new."""
    for document in documents:
        long = [line for line in map(str.strip, document.text.split("\n")) if len(line) >= 40]
        keys = [hashlib.blake2b(line.encode(), digest_size=8).digest() for line in long]
        repeated = sum(len(line) for line, key in zip(long, keys, strict=True) if key in seen)
        whole = hashlib.sha256(document.text.encode()).digest()
        if whole in seen or repeated > 0.5 * sum(map(len, long)):
            why["duplicate"] += 1
        else:
            seen.update(keys, [whole])
            yield document


def collect(cache: Path) -> tuple[list[Document], dict[str, dict[str, Any]]]:
    """Return all documents, by the hashes of their text, and by package what was done with its files."""
    documents, packages, seen = list[Document](), dict[str, dict[str, Any]](), set[bytes]()
    for entry in tomllib.loads(TABLE.read_text())["package"]:
        why = Counts()
        own = list(_taken(entry, _fetch(entry, cache), why))
        own = own if entry["kind"] == "code" else _without_repeated(own)
        own = list(_deduplicated(own, seen, why))
        size = sum(len(each.text.encode()) for each in own)
        counts = {"files": dict(sorted(why.items())), "documents": len(own), "bytes": size}
        packages[entry["name"]] = {**entry, **counts, "train_tokens": 0, "held_out_tokens": 0}
        print(f"{entry['name']}: {size / 2**20:.1f} MiB, {dict(why)}", flush=True)
        documents += own
    return sorted(documents, key=lambda each: hashlib.sha256(each.text.encode()).digest()), packages


def _tokenizer(documents: list[Document]) -> Any:
    """Train the vocabulary on one document in eight."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    parts: dict[str, Any] = {"special_tokens": [SEPARATOR], "initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE, show_progress=False, **parts)
    tokenizer.train_from_iterator((each.text for each in documents[::8]), trainer)
    return tokenizer


def _ids(tokenizer: Any, documents: list[Document]) -> Iterator[tuple[str, list[int]]]:
    for at in range(0, len(documents), 64):
        batch = documents[at : at + 64]
        for each, encoded in zip(batch, tokenizer.encode_batch_fast([each.text for each in batch]), strict=True):
            yield each.package, [*encoded.ids, 0]


def _write(name: str, wanted: int, tokens: Iterator[tuple[str, list[int]]], packages: Any, out: Path) -> int:
    """Write a token file, uint16, of `wanted` tokens, or of whole documents where they are held out."""
    written = 0
    with (out / f"{name}.bin").open("wb") as file:
        for package, ids in tokens:
            taken = ids if name == "held_out" else ids[: wanted - written]
            file.write(struct.pack(f"<{len(taken)}H", *taken))
            packages[package][f"{name}_tokens"] += len(taken)
            written += len(taken)
            if written >= wanted:
                break
    if written < wanted:
        sys.exit(
            f"{name}: {written:,} tokens\n  want: {wanted:,}\n  fix:  more packages in {TABLE.name}, or larger mib"
        )
    return written


def build(out: Path) -> None:
    """Make the corpus, its manifest and the two parts to carry."""
    (out / "packages").mkdir(parents=True, exist_ok=True)
    documents, packages = collect(out / "packages")
    tokenizer = _tokenizer(documents)
    tokenizer.save(str(out / "tokenizer.json"))
    tokens = _ids(tokenizer, documents)
    held_out = _write("held_out", HELD_OUT_TOKENS, tokens, packages, out)
    train = _write("train", TRAIN_TOKENS, tokens, packages, out)
    prose = sum(each["train_tokens"] for each in packages.values() if each["kind"] == "prose") / train
    if prose < 0.5:
        sys.exit(f"prose: {prose:.1%} of the tokens\n  want: half or more\n  fix:  less source code in {TABLE.name}")
    hashes = {name: _sha256(out / name) for name in FILES}
    manifest = {"train": train, "held_out": held_out, "prose": round(prose, 4), "sha256": hashes, "packages": packages}
    (out / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    _pack(out)
    print(f"{train:,} tokens, {held_out:,} held out, {prose:.1%} prose\n{hashes}")


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _pack(out: Path) -> None:
    packed = io.BytesIO()
    words = {"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": 256 << 20, "lc": 3, "lp": 1, "pb": 1}  # of two bytes
    with lzma.open(packed, "wb", filters=[words]) as file, tarfile.open(fileobj=file, mode="w|") as tar:
        for name in ("manifest.json", *FILES):
            member, data = tarfile.TarInfo(name), (out / name).read_bytes()  # without times and owners
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    (out / "packed").mkdir(exist_ok=True)
    half = len(packed.getvalue()) // 2
    (out / "packed" / "corpus.tar.xz.0").write_bytes(packed.getvalue()[:half])
    (out / "packed" / "corpus.tar.xz.1").write_bytes(packed.getvalue()[half:])


def unpack(packed: Path, out: Path) -> None:
    """Join the parts and hold what is in them against the manifest."""
    joined = b"".join((packed / f"corpus.tar.xz.{part}").read_bytes() for part in range(2))
    with tarfile.open(fileobj=io.BytesIO(joined), mode="r:xz") as tar:
        out.mkdir(parents=True, exist_ok=True)
        for member in tar:
            if member.name in ("manifest.json", *FILES) and (data := tar.extractfile(member)):
                (out / member.name).write_bytes(data.read())
    for name, wanted in json.loads((out / "manifest.json").read_text())["sha256"].items():
        if (seen := _sha256(out / name)) != wanted:
            sys.exit(f"{out / name}: sha256 {seen}\n  want: {wanted}\n  fix:  copy both parts again")
    print(f"{out}: {', '.join(FILES)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("build", "unpack"))
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER", help="build: OUT; unpack: PACKED OUT")
    args = parser.parse_args()
    (build if args.command == "build" else unpack)(*args.folders)


if __name__ == "__main__":
    main()
