"""The browser in which a report is opened: Debian's Chromium, without a window.

    python tests/report/browser.py install

What a page does is asked by a script that is added to a copy of it, and read back from the page itself.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from html import escape, unescape
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

NAMES = ("chromium", "chromium-browser", "google-chrome")
PACKAGE = "chromium"
ANSWER = "report-answer"
# Chromium's number for what a page loads (blink_resource_loader), beside what it asks for by itself.
FOR_THE_PAGE = 101845102
QUIET = (
    "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-dev-shm-usage",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run",
    "--host-resolver-rules=MAP * ~NOTFOUND", "--virtual-time-budget=2000",
)  # fmt: skip
PATIENCE_S = 180  # on a busy machine


def unavailable_reason() -> str | None:
    """Why no page can be opened here, in one line, or None."""
    if program() is not None:
        return None
    return f"Opening a report needs Chromium. Try: python {Path(__file__)} install"


def program() -> str | None:
    return next((found for name in NAMES if (found := shutil.which(name))), None)


def install() -> None:
    """Raises RuntimeError, in one line, where it can't be installed from here."""
    if program() is not None:
        return
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        raise RuntimeError("Only root on Debian or Ubuntu can install chromium this way.")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for words in (("update",), ("--no-install-recommends", "install", PACKAGE, "fonts-dejavu-core")):
        done = subprocess.run(
            ["apt-get", "-qq", *words],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(f"apt-get {words[0]}: {done.stderr.strip() or done.stdout.strip()}")


@dataclass(frozen=True)
class Opened:
    """`answer`: what the script returned; `console`: what the page said there; `asked`: addresses that it
    asked for, beside its own file."""

    answer: Any
    console: list[str]
    asked: list[str]


def open_page(page: Path, script: str, *, scratch: Path, dark: bool = False, width: int = 0) -> Opened:
    """Open a copy of `page` from the disk, run `script` (the body of a function) in it once it is loaded.

    `width`: of the screen in pixels, which a frame has, because no window is narrower than 500.
    """
    copy, log = scratch / "page.html", scratch / "net.json"
    asking = (
        f'<script>addEventListener("load", () => {{ const said = document.createElement("pre"); '
        f'said.id = "{ANSWER}"; said.textContent = JSON.stringify((() => {{ {script} }})()); '
        "parent.document.body.append(said); });</script>"
    )
    text = page.read_text(encoding="utf-8").replace("</body>", f"{asking}</body>")
    if width:
        style = f"width: {width}px; height: 2000px; border: 0"
        text = f'<!doctype html><body><iframe style="{style}" srcdoc="{escape(text)}"></iframe></body>'
    copy.write_text(text, encoding="utf-8")
    done = _chromium(
        copy, "--dump-dom", "--enable-logging=stderr", f"--log-net-log={log}", scratch=scratch, dark=dark
    )
    found = re.search(rf'<pre id="{ANSWER}">(.*?)</pre>', done.stdout, re.DOTALL)
    assert found is not None, f"the page gave no answer:\n{done.stderr[-3000:]}"
    console = re.findall(r"CONSOLE[:(]\S*\s*(.*)", done.stderr)
    return Opened(json.loads(unescape(found[1])), console, _asked(log))


def screenshot(page: Path, file: Path, *, scratch: Path, dark: bool = False, height: int = 2000) -> None:
    done = _chromium(page, f"--screenshot={file}", f"--window-size=1400,{height}", scratch=scratch, dark=dark)
    assert file.exists(), done.stderr[-3000:]


def _chromium(page: Path, *options: str, scratch: Path, dark: bool) -> subprocess.CompletedProcess[str]:
    found = program()
    assert found is not None
    scheme = f"--blink-settings=preferredColorScheme={0 if dark else 1}"
    return subprocess.run(
        [found, *QUIET, f"--user-data-dir={scratch / 'profile'}", scheme, *options, page.as_uri()],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE_S,
    )  # fmt: skip


def _asked(log: Path) -> list[str]:
    """Every address that the page itself asked the net for."""
    found = re.findall(
        rf'"traffic_annotation":{FOR_THE_PAGE},"url":"([^"]+)"', log.read_text(encoding="utf-8")
    )
    return sorted({url for url in found if urlsplit(url).scheme not in ("file", "data")})


def main() -> int:
    if sys.argv[1:] != ["install"]:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        install()
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
