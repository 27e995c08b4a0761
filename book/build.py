"""The book's machinery: pair the chapters, execute them, record what they train, build the site.

    python book/build.py book                             execute every chapter from its records, build the site
    python book/build.py pair                             text → notebook; set-up cells; table of claims in the README
    python book/build.py execute --profile smoke --out F  execute into folder F, nothing else
    python book/build.py record 03_ladder --profile desk  execute with training allowed; keep records and verdicts

A chapter is ``notebooks/NN_name.py`` (percent format, what people edit) and its ``.ipynb`` (made from it, no outputs).
Chapters are executed by papermill into a staging folder, never in place; the site is built from there, unexecuted.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jupytext
import nbformat
import papermill
import yaml
from jupytext.cli import jupytext as jupytext_cli
from jupytext.config import load_jupytext_config

from vitbook.show import Verdict, load_claims, scoreboard
from vitbook.show.cards import MIME as VERDICT_MIME

ROOT = Path(__file__).resolve().parents[1]
BOOK, NOTEBOOKS = ROOT / "book", ROOT / "notebooks"
STAGING, SITE = BOOK / "_staging", BOOK / "_build" / "html"
CLAIMS, VERDICTS, RECORDS = BOOK / "claims.yml", BOOK / "verdicts.json", BOOK / "records"
KERNEL = "python3"
BRANCH = "main"
PLACES = ("VITBOOK_DATA", "VITBOOK_CACHE")  # folders that readers name by a variable
CELL_SECONDS = 600  # a cell that trains nothing and takes longer than this is stuck

SETUP_CELL = """\
# In Colab a chapter arrives alone: fetch the rest of the book, records included, and install its package beside the
# torch that is there. Elsewhere this cell does nothing. `make pair` writes it, with the book's public address.
import importlib.util
import os
import subprocess
import sys
from importlib.metadata import version

repository, branch = "{repository}", "{branch}"
in_colab = importlib.util.find_spec("google") and importlib.util.find_spec("google.colab")
if in_colab and not os.path.exists("../pyproject.toml"):
    if not repository:
        raise RuntimeError("this copy names no public address: set Repository in pyproject.toml, then `make pair`")
    if not os.path.exists("vitbook-book"):  # it is there after a restart of the session
        subprocess.run(["git", "clone", "-q", "--depth=1", "-b", branch, repository, "vitbook-book"], check=True)
    os.chdir("vitbook-book/notebooks")
    with open("../keep.txt", "w") as keep:
        keep.writelines(f"{{name}}=={{version(name)}}\\n" for name in ("torch", "torchvision"))
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "-c", "../keep.txt", "-e", ".."], check=True)
    sys.path.insert(0, os.path.abspath(".."))\
"""


class ChapterFailed(RuntimeError):
    """A chapter raised, or ran past its time limit; the message ends with what papermill said."""


def address() -> str:
    """The book's public repository as an https address, or "" while it has none."""
    if name := os.environ.get("GITHUB_REPOSITORY"):
        return f"https://github.com/{name}"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return project.get("urls", {}).get("Repository", "").rstrip("/")


def chapters(names: Iterable[str] = ()) -> list[Path]:
    """The chapters' notebooks in reading order: all of them, or those named, such as "02_heads"."""
    found = {path.stem: path.with_suffix(".ipynb") for path in sorted(NOTEBOOKS.glob("[0-9][0-9]_*.py"))}
    if unknown := sorted(set(names) - set(found)):
        raise ValueError(f"no chapter named {', '.join(unknown)}; there are {', '.join(found) or 'none'}")
    return [found[name] for name in sorted(names or found)]


def pages() -> list[str]:
    """Every page that the site must have, as paths from its root."""
    own = [f"{path.stem}.html" for path in sorted(BOOK.glob("*.md"))]
    return own + [f"notebooks/{notebook.stem}.html" for notebook in chapters()]


def write(path: Path, text: str) -> None:
    """Replace a text file in one step, and only when its content changes."""
    if path.is_file() and path.read_text(encoding="utf-8") == text:
        return
    part = path.with_name(path.name + ".part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)


# --- pairing ----------------------------------------------------------------------------------------------------------


def pair() -> None:
    """Bring every chapter's notebook and the README's table of claims up to date."""
    for notebook in chapters():
        pair_chapter(notebook)
    write(ROOT / "README.md", filled((ROOT / "README.md").read_text(encoding="utf-8"), "claims", claims_table()))


def pair_chapter(notebook: Path) -> None:
    """Write kernel and set-up cell into a chapter's text, and its notebook from that text (cell ids are kept)."""
    text = notebook.with_suffix(".py")
    # By way of a notebook, whose keys are sorted: text and notebook then have them in one order.
    content = nbformat.reads(nbformat.writes(jupytext.read(text)), as_version=4)
    setups = [cell for cell in content.cells if "colab" in cell.metadata.get("tags", [])]
    if len(setups) != 1:
        raise ValueError(f"{text.name} has {len(setups)} cells tagged colab; a chapter has one, its first code cell")
    setups[0].source = SETUP_CELL.format(repository=address(), branch=BRANCH)
    content.metadata["kernelspec"] = {"display_name": "Python 3", "language": "python", "name": KERNEL}
    write(text, as_text(content))
    jupytext_cli(["--quiet", "--to", "ipynb", "--update", str(text)])


def as_text(content: nbformat.NotebookNode) -> str:
    """A notebook as percent text, in the one spelling that jupytext.toml defines."""
    return jupytext.writes(content, fmt="py:percent", config=load_jupytext_config(str(NOTEBOOKS)))


def claims_table() -> str:
    """The scoreboard as Markdown: every claim, and the verdict that was computed for it."""
    verdicts = [Verdict.from_json(plain) for plain in recorded_verdicts()]
    table = scoreboard(load_claims(CLAIMS), verdicts)
    # Claims are written before they are run, some before their chapter: no link to what is not there yet.
    return re.sub(r"\[([^]]+)\]\((notebooks/[^)]+)\)", lambda link: link[0 if (ROOT / link[2]).exists() else 1], table)


def recorded_verdicts() -> list[dict]:
    return json.loads(VERDICTS.read_text(encoding="utf-8")) if VERDICTS.is_file() else []


def filled(page: str, name: str, body: str) -> str:
    """The page with everything between ``<!-- name -->`` and ``<!-- /name -->`` replaced by ``body``."""
    start, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    if page.count(start) != 1 or page.count(end) != 1:
        raise ValueError(f"a page must hold {start} and {end} once each")
    return f"{page[: page.index(start)]}{start}\n\n{body}\n\n{page[page.index(end) :]}"


# --- execution --------------------------------------------------------------------------------------------------------


def check_parameters(notebook: Path, parameters: dict[str, object]) -> None:
    """Refuse a parameter that the chapter does not have: papermill itself would only warn, and run without it."""
    known = papermill.inspect_notebook(str(notebook))
    if unknown := sorted(set(parameters) - set(known)):
        raise ValueError(f"{notebook.stem} has no parameter {', '.join(unknown)}; it has {', '.join(known) or 'none'}")


def execute(
    notebook: Path,
    out: Path,
    parameters: dict[str, object],
    *,
    seconds: float | None = CELL_SECONDS,
    stream: bool = False,
) -> list[dict]:
    """Run one chapter by papermill into ``out`` and return the verdicts that its claim cards carry.

    ``seconds`` limits each cell (None: no limit); ``stream`` shows the chapter's output as it comes. Raises ValueError
    for a parameter the chapter lacks, before anything runs, and ChapterFailed when a cell raises or runs out of time.
    """
    check_parameters(notebook, parameters)
    out.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "papermill", str(notebook), str(out), "--no-progress-bar", "--kernel", KERNEL]
    command += ["--cwd", str(notebook.parent)]
    command += [part for name, value in parameters.items() for part in ("-p", name, str(value))]
    if seconds:
        command += ["--execution-timeout", str(seconds)]
    if stream:
        command += ["--log-output", "--autosave-cell-every", "0"]
    # A chapter runs in a folder of its own, where a relative path would point elsewhere.
    places = {name: os.path.abspath(os.environ[name]) for name in PLACES if os.environ.get(name)}
    pipe = None if stream else subprocess.PIPE
    done = subprocess.run(command, check=False, text=True, stderr=pipe, env=os.environ | places)
    if done.returncode:
        # What the chapter said, without papermill's own trace above it.
        said = "see above" if stream else done.stderr.rpartition("Exception encountered at")[2][-4000:].strip()
        raise ChapterFailed(f"{notebook.stem} failed with {parameters or 'its own parameters'}: {said}")
    return harvest(out)


def harvest(executed: Path) -> list[dict]:
    """Take the verdicts out of an executed chapter, and papermill's traces (paths, clocks) with them."""
    notebook = nbformat.read(executed, as_version=4)
    notebook.metadata.pop("papermill", None)
    verdicts = []
    for cell in notebook.cells:
        for trace in ("papermill", "execution"):
            cell.metadata.pop(trace, None)
        if "injected-parameters" in cell.metadata.get("tags", []):
            cell.metadata.tags.append("remove-cell")
        for output in cell.get("outputs", []):
            verdicts += output.get("data", {}).pop(VERDICT_MIME, [])
    write(executed, nbformat.writes(notebook))
    return verdicts


def execute_all(names: Iterable[str], out: Path, parameters: dict[str, object]) -> dict[str, list[dict]]:
    """Run chapters, two at a time, into ``out``; the verdicts of each. All are tried before a failure is told."""
    workers = 2
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))

    def timed(notebook: Path) -> list[dict]:
        start = time.monotonic()
        verdicts = execute(notebook, out / notebook.name, parameters)
        print(f"  {notebook.stem}: {time.monotonic() - start:.0f} s", flush=True)
        return verdicts

    with ThreadPoolExecutor(workers) as pool:
        runs = {notebook.stem: pool.submit(timed, notebook) for notebook in chapters(names)}
    if failures := [str(run.exception()) for run in runs.values() if run.exception()]:
        raise ChapterFailed("\n\n".join(failures))
    return {name: run.result() for name, run in runs.items()}


def record(name: str, profile: str, train: bool = True) -> None:
    """Execute a chapter with training allowed and no time limit, then keep its records and verdicts in the book.

    Can be stopped and started at will: runs that have finished are kept, and one that was stopped goes on from its
    last checkpoint. With ``train=False`` nothing is trained: the book gets what is finished by now.
    """
    (notebook,) = chapters([name])
    pair_chapter(notebook)  # the text is what people edit: a notebook behind it would record what no page says
    check_parameters(notebook, parameters := {"profile": profile, "train": train})
    os.environ["VITBOOK_PUBLISH"] = "1"  # a record that is finished goes into the book, where `train=False` finds it
    before = records()
    try:
        with tempfile.TemporaryDirectory() as folder:  # not the staging folder: `make book` empties that
            fresh = execute(notebook, Path(folder) / notebook.name, parameters, seconds=None, stream=True)
    finally:
        print(f"{len(records() - before)} new records in {RECORDS}, {len(records())} in all")
    claims = load_claims(CLAIMS)
    rest = {claim.id for claim in claims.values() if claim.chapter != name}
    others = [v for v in recorded_verdicts() if v["claim"] in (rest if v["profile"] == profile else claims)]
    kept = sorted([*others, *fresh], key=lambda v: (v["claim"], v["profile"]))  # what the page no longer says goes
    write(VERDICTS, json.dumps(kept, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    pair()
    judged = {verdict["claim"] for verdict in fresh}
    for claim in claims.values():
        if claim.chapter == name:
            print(f"{'judged ' if claim.id in judged else 'MISSING'} {claim.id}")


def records() -> set[str]:
    """The ids of the records that the book ships."""
    return {path.parent.name for path in RECORDS.glob("[0-9a-f]*/record.json")}


# --- the site ---------------------------------------------------------------------------------------------------------


def stage() -> None:
    """Lay the book's own pages and settings beside the executed chapters, with tables filled and buttons set."""
    for path in [*BOOK.glob("*.md"), BOOK / "references.bib", BOOK / "_toc.yml"]:
        shutil.copy(path, STAGING / path.name)
    shutil.copytree(BOOK / "_static", STAGING / "_static", dirs_exist_ok=True)
    index, machine = STAGING / "index.md", STAGING / "machine.md"
    write(index, filled(index.read_text(encoding="utf-8"), "claims", claims_table()))
    if (bench := BOOK / "bench.json").is_file():
        figures = json.loads(bench.read_text(encoding="utf-8"))
        write(machine, filled(machine.read_text(encoding="utf-8"), "bench", bench_table(figures)))
    config = yaml.safe_load((BOOK / "_config.yml").read_text(encoding="utf-8"))
    config["sphinx"]["local_extensions"] = {"selfcontained": str(BOOK / "_ext")}
    config["repository"] = {"url": address(), "branch": BRANCH}
    if address():
        config["launch_buttons"] = {"colab_url": "https://colab.research.google.com"}
        config["html"]["use_repository_button"] = True
    write(STAGING / "_config.yml", yaml.safe_dump(config, allow_unicode=True, sort_keys=False))


def bench_table(figures: dict) -> str:
    """Markdown for what ``make bench`` left: ``machine`` (name → text) in one sentence, ``rows`` (alike) as a table."""
    rows = figures["rows"]
    machine = "; ".join(f"{name}: {text}" for name, text in figures["machine"].items())
    lines = [list(rows[0]), ["-"] * len(rows[0]), *([str(cell) for cell in row.values()] for row in rows)]
    return f"Measured on this machine — {machine}.\n\n" + "\n".join("| " + " | ".join(line) + " |" for line in lines)


def site() -> None:
    """Build the site from the staging folder; any warning is an error. Raises SystemExit with the builder's status."""
    if not (STAGING / "notebooks").is_dir():
        raise ValueError("no chapter is executed yet: `make book` executes them, then builds the site")
    stage()
    # A rebuild from Sphinx's cache repeats no warnings and keeps pages of chapters that are gone: always afresh.
    shutil.rmtree(SITE.parent, ignore_errors=True)
    command = [
        sys.executable,
        "-c",
        "from jupyter_book.cli.main import main; main()",
        "build",
        str(STAGING),
        "--path-output",
        str(BOOK),
    ]
    done = subprocess.run([*command, "-W", "--keep-going", "-q"], check=False, stdout=subprocess.DEVNULL)
    if done.returncode:
        raise SystemExit(done.returncode)
    print(f"\nThe book is built. Open {SITE / 'index.html'}\nor run `make serve` and open http://localhost:8000")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("book", help="execute every chapter from its records, then build the site")
    commands.add_parser("pair", help="write each notebook from its text")
    commands.add_parser("site", help="build the site from chapters that are executed already")
    executing = commands.add_parser("execute", help="execute chapters into a folder")
    executing.add_argument("chapter", nargs="*", help="such as 02_heads; all when none is named")
    executing.add_argument("--profile", choices=("smoke", "desk", "paper"), default="desk")
    executing.add_argument("--out", type=Path, default=STAGING / "notebooks")
    recording = commands.add_parser("record", help="train what a chapter needs and keep records and verdicts")
    recording.add_argument("chapter")
    recording.add_argument("--profile", choices=("desk", "paper"), default="desk")
    recording.add_argument("--finished", action="store_true", help="train nothing, keep what is finished by now")
    given = parser.parse_args()
    try:
        if given.command == "pair":
            pair()
        elif given.command == "record":
            record(given.chapter, given.profile, train=not given.finished)
        elif given.command == "execute":
            execute_all(given.chapter, given.out, {"profile": given.profile, "train": given.profile == "smoke"})
        else:
            if given.command == "book":
                print("Executing the chapters from their records")
                shutil.rmtree(STAGING, ignore_errors=True)
                execute_all((), STAGING / "notebooks", {})
            site()
    except (ValueError, ChapterFailed) as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
