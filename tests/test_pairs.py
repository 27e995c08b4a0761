"""Text and notebook of each chapter say the same, hold no outputs, and have the two cells of fixed form."""

from __future__ import annotations

import build
import nbformat
import papermill
import pytest

CHAPTERS = build.chapters()
each_chapter = pytest.mark.parametrize("notebook", CHAPTERS, ids=[path.stem for path in CHAPTERS])


def tagged(content: nbformat.NotebookNode, tag: str) -> list[nbformat.NotebookNode]:
    return [cell for cell in content.cells if tag in cell.metadata.get("tags", [])]


def test_there_are_chapters_and_each_has_both_files():
    assert CHAPTERS
    assert sorted(build.NOTEBOOKS.glob("*.ipynb")) == CHAPTERS


@each_chapter
def test_notebook_rendered_to_text_is_the_text(notebook):
    content = nbformat.read(notebook, as_version=4)
    assert build.as_text(content) == notebook.with_suffix(".py").read_text(encoding="utf-8"), "run `make pair`"


@each_chapter
def test_nothing_executed_is_stored(notebook):
    content = nbformat.read(notebook, as_version=4)
    nbformat.validate(content)
    code = [cell for cell in content.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code)
    assert set(content.metadata) <= {"kernelspec", "jupytext"}
    assert content.metadata.kernelspec.name == build.KERNEL
    # The third is jupytext's own: how many empty lines follow in the text.
    assert all(set(cell.metadata) <= {"tags", "mystnb", "lines_to_next_cell"} for cell in content.cells)


@each_chapter
def test_fixed_cells(notebook, monkeypatch):
    monkeypatch.delenv("GITHUB_REPOSITORY", raising=False)
    content = nbformat.read(notebook, as_version=4)
    first = next(cell for cell in content.cells if cell.cell_type == "code")
    setup = build.SETUP_CELL.format(repository=build.address(), branch=build.BRANCH)
    assert tagged(content, "colab") == [first]
    assert first.source == setup, "run `make pair`"
    assert len(tagged(content, "parameters")) == 1
    parameters = papermill.inspect_notebook(str(notebook))
    assert {name: eval(parameter["default"]) for name, parameter in parameters.items()} == {
        "profile": "desk",
        "train": False,
    }


@each_chapter
def test_cells_are_short_and_figures_described(notebook):
    """At most 25 lines of code a cell, beside the set-up cell; a numbered figure has a caption and an alt text."""
    for cell in nbformat.read(notebook, as_version=4).cells:
        if cell.cell_type == "code":
            assert len(cell.source.splitlines()) <= 25, cell.source
        if figure := cell.metadata.get("mystnb", {}).get("figure"):
            assert figure["caption"]
            assert figure["name"]
            assert cell.metadata.mystnb.get("image", {}).get("alt"), figure["name"]


def test_readme_shows_the_computed_verdicts():
    readme = (build.ROOT / "README.md").read_text(encoding="utf-8")
    assert build.filled(readme, "claims", build.claims_table()) == readme, "run `make pair`"


def test_address_is_in_one_place(monkeypatch):
    monkeypatch.setenv("GITHUB_REPOSITORY", "someone/somewhere")
    assert build.address() == "https://github.com/someone/somewhere"


def test_filled_wants_its_markers():
    page = "a\n<!-- claims -->\nold\n<!-- /claims -->\nb\n"
    assert build.filled(page, "claims", "new") == "a\n<!-- claims -->\n\nnew\n\n<!-- /claims -->\nb\n"
    with pytest.raises(ValueError, match="<!-- bench -->"):
        build.filled(page, "bench", "new")
