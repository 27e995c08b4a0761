"""Every chapter runs: at smoke from nothing, at desk from records with the recorded verdicts, and alone in Colab."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import build
import nbformat
import pytest

CHAPTERS = build.chapters()
each_chapter = pytest.mark.parametrize("notebook", CHAPTERS, ids=[path.stem for path in CHAPTERS])
SMOKE_SECONDS = 45


def processor_seconds() -> float:
    """Processor time of all ended processes below this one; the clock on the wall measures the neighbours as well."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.fixture
def empty_store(tmp_path, monkeypatch):
    """A cache that holds nothing, so that nothing is found and nothing of the user's is touched."""
    monkeypatch.setenv("VITBOOK_CACHE", str(tmp_path / "cache"))
    return tmp_path


@each_chapter
def test_smoke_from_nothing(notebook, empty_store, monkeypatch):
    monkeypatch.delenv("VITBOOK_DATA", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    start = processor_seconds()
    verdicts = build.execute(notebook, empty_store / notebook.name, {"profile": "smoke", "train": True})
    assert processor_seconds() - start <= SMOKE_SECONDS
    assert {verdict["verdict"] for verdict in verdicts} <= {"not judged"}


@each_chapter
def test_desk_from_records_gives_the_recorded_verdicts(notebook, desk_verdicts):
    claims = build.load_claims(build.CLAIMS)
    recorded = {
        verdict["claim"]: verdict
        for verdict in build.recorded_verdicts()
        if verdict["profile"] == "desk" and claims[verdict["claim"]].chapter == notebook.stem
    }
    measured = {verdict["claim"]: verdict for verdict in desk_verdicts[notebook.stem] if verdict["profile"] == "desk"}
    assert set(measured) == set(recorded)
    for claim, verdict in measured.items():
        assert verdict["verdict"] == recorded[claim]["verdict"], claim
        assert verdict["records"] == recorded[claim]["records"], claim
        assert verdict["value"] == pytest.approx(recorded[claim]["value"], rel=1e-6), claim
        interval = recorded[claim]["interval"]  # None where one seed is all there is
        assert verdict["interval"] == (interval and pytest.approx(interval, rel=1e-6)), claim


def test_recorded_verdicts_are_sorted_and_belong_to_claims():
    claims = build.load_claims(build.CLAIMS)
    keys = [(verdict["claim"], verdict["profile"]) for verdict in build.recorded_verdicts()]
    assert keys == sorted(set(keys))
    assert {claim for claim, _ in keys} <= set(claims)


def test_unknown_chapter_and_parameter_are_refused_before_anything_runs(tmp_path):
    with pytest.raises(ValueError, match="no chapter named 99_none; there are 01_"):
        build.chapters(["99_none"])
    with pytest.raises(ValueError, match=r"has no parameter profil; it has profile, train"):
        build.execute(CHAPTERS[0], tmp_path / "out.ipynb", {"profil": "smoke"})
    assert not list(tmp_path.iterdir())


def test_unknown_profile_is_refused(empty_store):
    with pytest.raises(build.ChapterFailed, match="lunch"):
        build.execute(CHAPTERS[-1], empty_store / "out.ipynb", {"profile": "lunch"})


@pytest.fixture
def small_book(tmp_path, monkeypatch):
    """A book of one chapter, which trains when it may and then carries a verdict on its only claim."""
    for folder in ("notebooks", "book/records"):
        (tmp_path / folder).mkdir(parents=True)
    shutil.copy(build.ROOT / "jupytext.toml", tmp_path)
    (tmp_path / "README.md").write_text("<!-- claims -->\n<!-- /claims -->\n")
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "small"\n')
    (tmp_path / "book" / "claims.yml").write_text(SMALL_CLAIMS)
    (tmp_path / "notebooks" / "01_small.py").write_text(SMALL_CHAPTER)
    places = {
        "ROOT": "", "NOTEBOOKS": "notebooks", "STAGING": "book/_staging", "CLAIMS": "book/claims.yml",
        "VERDICTS": "book/verdicts.json", "RECORDS": "book/records",
    }  # fmt: skip
    for name, place in places.items():
        monkeypatch.setattr(build, name, tmp_path / place)
    build.pair()
    return tmp_path


SMALL_CLAIM = """
{name}:
  source: B
  chapter: 01_small
  sentence: One is small.
  where: here
  quantity: one
  comparison: "<"
  threshold: 2
  paper: "1"
"""
SMALL_CLAIMS = SMALL_CLAIM.format(name="small.one") + SMALL_CLAIM.format(name="small.other")

SMALL_CHAPTER = """\
# %% tags=["colab", "remove-cell"]

# %% tags=["parameters"]
profile: str = "desk"
train: bool = False

# %% tags=["hide-input"] mystnb={"image": {"alt": "None."}}
import os
from pathlib import Path

from vitbook.show import claim_cards, judge, load_claims

assert train and os.environ["VITBOOK_PUBLISH"] == "1"
Path("../book/records/a1").mkdir()
Path("../book/records/a1/record.json").touch()
claims = load_claims(Path("../book/claims.yml"))
claim_cards(claims, [judge(claims["small.one"], [1.0, 1.25, 1.5], profile=profile, records=["a1"])])
"""


def test_record_keeps_verdicts_of_other_profiles_and_refreshes_the_readme(small_book, monkeypatch, capfd):
    monkeypatch.setenv("VITBOOK_PUBLISH", "")  # so that what `record` sets is undone afterwards
    older = [
        {"claim": "small.one", "verdict": "holds", "value": 1.0, "interval": None, "n": 1, "profile": "paper",
         "records": [], "note": ""},
        {"claim": "small.one", "verdict": "does not hold", "value": 3.0, "interval": None, "n": 1, "profile": "desk",
         "records": [], "note": ""},
        {"claim": "no.longer", "verdict": "holds", "value": 1.0, "interval": None, "n": 1, "profile": "desk",
         "records": [], "note": ""},
    ]  # fmt: skip
    build.VERDICTS.write_text(json.dumps(older))
    build.record("01_small", "desk")

    desk, paper = build.recorded_verdicts()
    assert paper == older[0]
    half = (
        4.302652729911275 * 0.25 / 3**0.5
    )  # t quantile for 2 degrees of freedom; the values' standard deviation is 1/4
    assert desk["interval"] == pytest.approx([1.25 - half, 1.25 + half])
    assert (desk["profile"], desk["verdict"], desk["records"]) == ("desk", "holds", ["a1"])
    readme = (small_book / "README.md").read_text()
    assert "[01_small](notebooks/01_small.ipynb)" in readme
    assert readme.count("| – | not yet run |") == 1
    said = capfd.readouterr().out
    assert "1 new records" in said
    assert "judged  small.one" in said
    assert "MISSING small.other" in said


def test_record_of_what_is_finished_allows_no_training(small_book, monkeypatch):
    monkeypatch.setenv("VITBOOK_PUBLISH", "")
    with pytest.raises(build.ChapterFailed, match=r"with \{'profile': 'desk', 'train': False\}"):
        build.record("01_small", "desk", train=False)
    assert os.environ["VITBOOK_PUBLISH"] == "1"


def test_record_runs_the_text_as_it_stands(small_book, monkeypatch):
    monkeypatch.setenv("VITBOOK_PUBLISH", "")
    text = small_book / "notebooks" / "01_small.py"
    text.write_text(text.read_text().replace("[1.0, 1.25, 1.5]", "[0.5, 0.75, 1.0]"))  # and nobody paired
    build.record("01_small", "desk")
    assert [verdict["value"] for verdict in build.recorded_verdicts()] == [0.75]


def test_pairing_again_changes_nothing_and_an_edit_keeps_cell_ids(small_book):
    text, notebook = small_book / "notebooks" / "01_small.py", small_book / "notebooks" / "01_small.ipynb"
    before = text.read_bytes(), notebook.read_bytes()
    build.pair()
    assert (text.read_bytes(), notebook.read_bytes()) == before
    assert build.as_text(nbformat.read(notebook, as_version=4)) == text.read_text()

    ids = [cell.id for cell in nbformat.read(notebook, as_version=4).cells]
    text.write_text(text.read_text() + "\n# %% [markdown]\n# One more.\n")
    build.pair()
    cells = nbformat.read(notebook, as_version=4).cells
    assert [cell.id for cell in cells[:-1]] == ids
    assert cells[-1].source == "One more."


def test_a_chapter_that_fails_says_why_and_changes_no_verdict(small_book):
    with pytest.raises(build.ChapterFailed, match=r"01_small failed with(.|\n)*AssertionError"):
        build.execute_all([], build.STAGING, {"profile": "desk"})
    assert not build.VERDICTS.exists()


def test_colab_rehearsal(empty_store, monkeypatch):
    """A chapter alone in an empty folder, in a Python that has `google.colab`, fetches the book and runs at smoke."""
    origin, content, stubs = (empty_store / name for name in ("origin", "content", "stubs"))
    publish(origin)
    content.mkdir()
    chapter = alone(build.NOTEBOOKS / "02_heads.ipynb", content, f"file://{origin}")
    (stubs / "google" / "colab").mkdir(parents=True)
    (stubs / "google" / "colab" / "__init__.py").touch()
    (stubs / "pip").mkdir()
    (stubs / "pip" / "__init__.py").touch()
    # The real pip would install; this one writes down what it was asked to do.
    (stubs / "pip" / "__main__.py").write_text(
        "import json, pathlib, sys\n"
        "pathlib.Path('../pip.json').write_text(json.dumps([sys.argv[1:], pathlib.Path('../keep.txt').read_text()]))\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(stubs))

    executed = empty_store / "executed.ipynb"
    build.execute(chapter, executed, {"profile": "smoke", "train": True})

    clone = content / "vitbook-book"
    arguments, kept = json.loads((clone / "pip.json").read_text())
    assert arguments == ["install", "-q", "-c", "../keep.txt", "-e", ".."]
    assert [line.split("==")[0] for line in kept.splitlines()] == ["torch", "torchvision"]
    last = nbformat.read(executed, as_version=4).cells[-1]
    assert Path(last.outputs[0].text.strip()).resolve() == (clone / "vitbook" / "__init__.py").resolve()


def test_colab_after_a_restart_fetches_nothing_again(tmp_path):
    """The session's files are still there: the set-up cell goes into them and installs, and asks no repository."""
    (tmp_path / "vitbook-book" / "notebooks").mkdir(parents=True)
    for package in ("google/colab", "pip"):
        (tmp_path / "stubs" / package).mkdir(parents=True)
        (tmp_path / "stubs" / package / "__init__.py").touch()
    (tmp_path / "stubs" / "pip" / "__main__.py").write_text("import sys; print('pip', *sys.argv[1:])")
    script = build.SETUP_CELL.format(repository="file:///nowhere", branch="main") + "\nprint(os.getcwd(), sys.path[0])"
    paths = os.pathsep.join([str(tmp_path / "stubs"), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    book = (tmp_path / "vitbook-book").resolve()
    assert done.stdout.splitlines() == ["pip install -q -c ../keep.txt -e ..", f"{book / 'notebooks'} {book}"]


def publish(origin: Path) -> None:
    """Make a repository of this tree as it is now, uncommitted changes included, as the public one would be."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=build.ROOT, check=True, capture_output=True, text=True,
    )  # fmt: skip
    for name in filter(None, listed.stdout.split("\0")):
        if (build.ROOT / name).is_file():
            (origin / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(build.ROOT / name, origin / name)
    author = ["-c", "user.name=rehearsal", "-c", "user.email=rehearsal@example.org", "-c", "commit.gpgsign=false"]
    for command in (["init", "-q", "-b", build.BRANCH], ["add", "-A"], [*author, "commit", "-q", "-m", "as it is"]):
        subprocess.run(["git", *command], cwd=origin, check=True)


def alone(notebook: Path, folder: Path, repository: str) -> Path:
    """Copy a chapter into a folder as Colab would open it, its set-up cell naming a repository, and let it end with
    the place that `vitbook` was imported from."""
    content = nbformat.read(notebook, as_version=4)
    setup = next(cell for cell in content.cells if "colab" in cell.metadata.get("tags", []))
    setup.source = build.SETUP_CELL.format(repository=repository, branch=build.BRANCH)
    content.cells.append(nbformat.v4.new_code_cell("import vitbook\n\nprint(vitbook.__file__)"))
    nbformat.write(content, folder / notebook.name)
    return folder / notebook.name
