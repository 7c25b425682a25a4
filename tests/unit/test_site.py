"""The site builds, its links lead somewhere, every key has its paragraph, and nothing comes from the network."""

import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from titanlite.config.schema import help_texts, schema_keys, sections

pytest.importorskip("mkdocs", reason="the site is built where titanlite[docs] is installed")
pytest.importorskip("material", reason="the site is built where titanlite[docs] is installed")
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    built = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return folder


class Addresses(HTMLParser):
    """What a page loads, and the text of its paragraphs."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded = list[str]()
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in ("script", "img", "iframe") and given.get("src"):
            self.loaded.append(given["src"] or "")
        if tag == "link" and given.get("rel") in ("stylesheet", "preconnect", "icon"):
            self.loaded.append(given.get("href") or "")

    def handle_data(self, data: str) -> None:
        self.text += data


def read(page: Path) -> Addresses:
    found = Addresses()
    found.feed(page.read_text())
    return found


def plain(text: str) -> str:
    """Leave out what marks code and emphasis, and how lines are broken."""
    return re.sub(r"\s+", " ", text.replace("`", "").replace("*", ""))


def test_every_key_has_its_paragraph(site: Path) -> None:
    page = site / "reference" / "keys.html"
    ids, text = set(re.findall(r'<h3 id="([^"]+)"', page.read_text())), plain(read(page).text)
    assert ids == set(schema_keys())
    for cls in sections().values():
        for doc in help_texts(cls).values():
            assert plain(doc) in text


def test_nothing_is_loaded_from_the_network(site: Path) -> None:
    loaded = {(page, address) for page in site.rglob("*.html") for address in read(page).loaded}
    assert len(loaded) > 20
    for page, address in loaded:
        if page.name != "404.html":  # its addresses begin at the root of the server
            assert "//" not in address
            assert (page.parent / address.partition("?")[0]).exists(), (page, address)
    assert not [file for file in site.rglob("*.css") if re.search(r"url\(\"?https?:|@import", file.read_text())]


def test_a_named_key_is_a_link_to_its_paragraph(site: Path) -> None:
    keys = (site / "reference" / "keys.html").read_text()
    links = {
        link
        for page in site.rglob("*.html")
        for link in re.findall(r'href="[./]*(?:reference/)?keys\.html#([^"]+)"', page.read_text())
    }
    assert len(links) > 20
    assert all(f'id="{link}"' in keys for link in links)


def test_charts_are_as_long_as_their_rows_say(site: Path) -> None:
    page = (site / "performance.html").read_text()
    charts = [list[tuple[float, float]]() for _ in range(page.count("class='bars'"))]
    for chart, text in zip(charts, page.split("class='bars'")[1:], strict=True):
        found = re.findall(r"width:([\d.]+)%'></b>([\d,.]+)</span>", text)
        chart += [(float(width), float(value.replace(",", ""))) for width, value in found]
        longest = max(value for _, value in chart)
        assert all(width == pytest.approx(100 * value / longest, abs=0.051) for width, value in chart)
    assert [len(chart) > 5 for chart in charts] == [True, True]
