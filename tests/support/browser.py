"""Open a page in headless Chromium: what stands in it then, and what its console said."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

_CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
NEEDS_CHROMIUM = pytest.mark.skipif(_CHROMIUM is None, reason="there is no Chromium on this machine")
_QUIET = ("quic", "background-networking", "component-update", "sync", "gpu", "dev-shm-usage", "default-apps")


def opened(
    page: Path, flags: tuple[str, ...] = (), script: str = "", time_ms: int | None = 20_000
) -> tuple[str, list[str]]:
    """Open a page and wait until it has nothing to do.

    Args:
        page: an HTML file.
        flags: more of Chromium's own.
        script: what is run at the end of the page.
        time_ms: of the page's clock, which runs as fast as the page lets it; None: the clock is real, and the page is
            left as soon as it is loaded.

    Returns:
        The page's HTML as it is then, and the messages on its console.
    """
    if script:
        page = page.with_suffix(".scripted.html")
        text = page.with_name(page.name.replace(".scripted", "")).read_text()
        page.write_text(text.replace("</body>", f"<script>{script}</script></body>"))
    command = [
        str(_CHROMIUM),
        "--headless",
        "--no-sandbox",
        "--no-first-run",
        *(f"--disable-{name}" for name in _QUIET),
        f"--user-data-dir={page.parent / 'profile'}",
        "--enable-logging=stderr",
        "--run-all-compositor-stages-before-draw",  # a frame may not be left out when the machine is busy
        *([f"--virtual-time-budget={time_ms}"] if time_ms is not None else []),
        *flags,
        "--dump-dom",
        page.as_uri(),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout, re.findall(r"CONSOLE.*?\] (.*)", ended.stderr)
