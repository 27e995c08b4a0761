"""The house, from its imports: three floors, arrows only downwards, no circle, no large file."""

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "vitbook"
FLOOR = {"data": 0, "models": 0, "measures": 0, "theory": 0, "runs": 1, "show": 1}
FILES = sorted(PACKAGE.rglob("*.py"))


def imported(file: Path) -> set[str]:
    """The vitbook modules that a file imports, such as "vitbook.data.sets", wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file.name} imports relatively; write vitbook.… so that arrows can be seen"
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return {name for name in found if name.startswith("vitbook.")}


def room(name: str) -> str:
    return name.split(".")[1]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_a_room_knows_only_the_floors_below(file):
    own = file.relative_to(PACKAGE).parts[0]
    others = {room(name) for name in imported(file)} - {own}
    if file.parent == PACKAGE:  # the front door
        assert not others
    else:
        assert {other for other in others if FLOOR[other] >= FLOOR[own]} == set()


def test_no_circle_between_files():
    modules = {".".join(("vitbook", *file.relative_to(PACKAGE).with_suffix("").parts)): file for file in FILES}
    arrows = {name: imported(file) & set(modules) for name, file in modules.items()}
    assert len(list(TopologicalSorter(arrows).static_order())) >= len(modules)  # raises CycleError on a circle


def test_files_stay_small_and_rooms_few():
    assert {file.relative_to(PACKAGE).parts[0] for file in FILES if file.parent != PACKAGE} <= set(FLOOR)
    long = {file.name: n for file in FILES if (n := len(file.read_text(encoding="utf-8").splitlines())) > 350}
    assert not long
