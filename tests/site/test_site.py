"""The built site in a headless Chromium: all fits, no code is cut off, contrast is that of WCAG's level AA.

``make site-check`` builds the site, fetches Chromium, and runs this with ``GRADCOMP_SITE`` and ``GRADCOMP_CHROMIUM``.
Screenshots for review are left in ``GRADCOMP_SCREENSHOTS``, if that is set.
"""

from __future__ import annotations

import functools
import html
import importlib.util
import json
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

SITE, CHROMIUM = os.environ.get("GRADCOMP_SITE", ""), os.environ.get("GRADCOMP_CHROMIUM", "")
AXE = importlib.util.find_spec("axe_core_python")

pytestmark = pytest.mark.skipif(
    not (SITE and CHROMIUM and AXE), reason="needs a site and Chromium: make site-check"
)

#: Pages of each kind: their contrast is measured, and their pictures are kept.
SHOWN = ("", "choose/", "recipes/", "api/torch/", "compressors/", "decisions/0041-collectives-by-name/")


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, list[str]]]:
    """Where the site and the pages of checks are served, and the paths of all pages."""
    root = tmp_path_factory.mktemp("site") / "site"
    shutil.copytree(SITE, root)
    pages = sorted(str(p.parent.relative_to(root)) + "/" for p in root.rglob("index.html"))
    pages = ["" if page == "./" else page for page in pages]
    assert len(pages) > 40
    assert set(SHOWN) <= set(pages)
    assert AXE is not None
    assert AXE.origin is not None
    shutil.copy(Path(AXE.origin).with_name("axe.min.js"), root)
    source = Path(__file__).with_name("check.html").read_text(encoding="utf-8")
    for name, looked_at in (("all", pages), ("shown", SHOWN)):
        listed = json.dumps({f"/{page}": page in SHOWN for page in looked_at})
        (root / f"{name}.html").write_text(source.replace("PAGES", listed))
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(root))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", pages
        server.shutdown()
        thread.join()


def chromium(url: str, *options: str) -> str:
    flags = ("--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=240000", *options)
    done = subprocess.run([CHROMIUM, *flags, url], check=False, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_is_readable_on_a_phone_and_on_a_desk(address, scheme: str):
    """In the dark, the pages whose contrast is measured are enough: colours move nothing."""
    server, pages = address
    name, number, looked_at = ("all", 1, pages) if scheme == "light" else ("shown", 0, SHOWN)
    dom = chromium(f"{server}/{name}.html", "--dump-dom", f"--blink-settings=preferredColorScheme={number}")
    written = re.search("FOUND(.*)END</pre>", dom, re.DOTALL)
    assert written is not None, dom[-2000:]
    found = json.loads(html.unescape(written[1]))
    assert len(found) == len(looked_at)
    assert {page["dark"] for page in found.values()} == {scheme == "dark"}
    problems = {
        path: {kind: each for kind in ("phone", "desk", "contrast") if (each := page[kind])}
        for path, page in found.items()
    }
    assert not any(problems.values()), json.dumps({p: k for p, k in problems.items() if k}, indent=1)


def test_a_signature_has_one_line_for_each_argument():
    """mkdocstrings formats signatures only where ruff is installed, and says nothing otherwise."""
    text = (Path(SITE) / "api/torch/index.html").read_text(encoding="utf-8")
    after = text[text.index('id="gradcomp.torch.DistributedOptimizer"') :]
    signature = html.unescape(re.sub("<[^>]+>", "", after[: after.index("</pre>")]))
    assert max(map(len, signature.splitlines())) <= 80
    assert "    compression: Policy | Compressor | str = Compression.none," in signature.splitlines()


@pytest.mark.skipif(not os.environ.get("GRADCOMP_SCREENSHOTS"), reason="GRADCOMP_SCREENSHOTS names no folder")
@pytest.mark.parametrize("width", [390, 1366])
@pytest.mark.parametrize("page", SHOWN)
def test_pictures_for_review(address, page: str, width: int):
    folder = Path(os.environ["GRADCOMP_SCREENSHOTS"])
    folder.mkdir(parents=True, exist_ok=True)
    out = folder / f"{page.strip('/').replace('/', '-') or 'start'}-{width}.png"
    chromium(f"{address[0]}/{page}", f"--screenshot={out}", f"--window-size={width},2400")
    assert out.stat().st_size > 10_000
