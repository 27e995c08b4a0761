"""What tests share, each made once a session: chapters executed at desk from records, the built site, a browser."""

from __future__ import annotations

import functools
import http.server
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "book"))
# Chapters run in processes of their own; they shall import this tree, installed or not.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))

import build  # noqa: E402
import vendor  # noqa: E402
from browser import Browser, find_chromium  # noqa: E402

from vitbook.runs import records, store, training  # noqa: E402


@pytest.fixture
def own_world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A cache and a book of its own, in which runs are trained in bf16 with one thread."""
    monkeypatch.setenv("VITBOOK_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("VITBOOK_PUBLISH", raising=False)
    monkeypatch.setattr(store, "shipped", lambda: tmp_path / "book")
    monkeypatch.setattr(training, "precision", lambda device: "bf16")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "fit", lambda *_, **__: pytest.fail("a run was trained"))


@dataclass(frozen=True)
class Site:
    """The built pages on disk, and where a local server shows them."""

    folder: Path
    address: str
    pages: list[str]  # every page of the contents list, such as "notebooks/01_vit.html"


@pytest.fixture(scope="session")
def desk_verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict]]:
    """Each chapter executed at desk, from records, as `make book` does; its verdicts by chapter name."""
    shutil.rmtree(build.STAGING, ignore_errors=True)
    # Decoded images may come from the user's cache, records only from the book.
    images, cache = vendor.cache().parent / "data", tmp_path_factory.mktemp("cache")
    images.mkdir(parents=True, exist_ok=True)
    (cache / "data").symlink_to(images.resolve())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VITBOOK_CACHE", str(cache))
        return build.execute_all((), build.STAGING / "notebooks", {})


@pytest.fixture(scope="session")
def site(desk_verdicts: dict[str, list[dict]]) -> Iterator[Site]:
    """The site as `make book` builds it, served on a free port of this machine."""
    build.site()
    handler = functools.partial(QuietHandler, directory=str(build.SITE))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield Site(build.SITE, f"http://127.0.0.1:{server.server_port}", build.pages())
        server.shutdown()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    """Serves files without a line on the terminal for each."""

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A headless Chromium; the test is skipped where there is none, except on CI."""
    binary = find_chromium()
    if binary is None:
        if os.environ.get("CI"):
            pytest.fail("CI must look at the pages in a browser: install Chromium")
        pytest.skip("no Chromium on this machine (the variable CHROMIUM may name one)")
    with Browser(binary, tmp_path_factory.mktemp("chromium")) as opened:
        yield opened
