"""The tool that measures the source, on a small package whose figures are known, and on this one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tools import classes, house, picture, sources

ROOT = Path(__file__).parents[2]

PACKAGE = {
    "__init__.py": "from small.top import Top\n",
    "base.py": """
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from small.top import Top
class Base:
    kind: str
    def __init__(self):
        self._loop, self._own = 1, 2
    def use(self):
        self._own += 1
        return self._own, self._name
""",
    "middle.py": """
from small import base
class Middle(base.Base):
    def __init__(self):
        self._name = "x"
    def other(self):
        from small.top import Top
        return Top, self.kind
""",
    "top.py": """
import os
from small.middle import Middle
from small.parts.part import Part
class Top(Middle):
    def work(self, part: Part, other: "Top"):
        os._exit(0)
        part._hidden = part._hidden + other._loop
        return super()._name
class Refused(ValueError): ...
class TwiceRefused(Refused): ...
""",
    "parts/__init__.py": "",
    "parts/part.py": "from small.twin import twin\nclass Part:\n    def __init__(self):\n        self._hidden = 0\n",
    "twin.py": "from .parts import part\ndef twin():\n    return part.Part()._hidden\n",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in PACKAGE.items():
        path = tmp_path / "small" / name
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_text(text)
    return tmp_path


def test_who_imports_whom(tree: Path) -> None:
    modules = sources.read(tree, "small")
    graph = sources.import_graph(modules)
    assert graph["small.top"] == {"small.middle", "small.parts.part"}
    assert graph["small.twin"] == {"small.parts.part"}
    assert graph["small.base"] == set()
    assert sources.circles(graph) == [["small.parts.part", "small.twin"]]
    in_functions = sources.circles(sources.import_graph(modules, functions=True))
    assert in_functions == [["small.middle", "small.top"], ["small.parts.part", "small.twin"]]
    with_types = sources.circles(sources.import_graph(modules, functions=True, types=True))
    assert with_types[0] == ["small.base", "small.middle", "small.top"]
    with pytest.raises(FileNotFoundError, match="is no package"):
        sources.read(tree, "smaller")


def test_what_classes_know_of_each_other(tree: Path) -> None:
    modules = sources.read(tree, "small")
    found = classes.find(modules)
    assert classes.longest_ladder(found, errors=False) == ["small.top.Top", "small.middle.Middle", "small.base.Base"]
    assert classes.longest_ladder(found, errors=True) == ["small.top.TwiceRefused", "small.top.Refused"]
    assert classes.shared_attributes(found) == {"small.top.Top": ["_name", "kind"]}
    assert classes.private_accesses(modules, found) == [
        "small.top:8 part._hidden",
        "small.top:8 part._hidden",
        "small.twin:3 part.Part()._hidden",
    ]


def test_shortcuts_are_left_out_and_nothing_gets_lost() -> None:
    graph = {"a": {"b", "c", "d"}, "b": {"c"}, "c": {"d"}, "d": set()}
    assert picture.without_shortcuts(graph) == {"a": {"b"}, "b": {"c"}, "c": {"d"}, "d": set()}
    circle = {"a": {"b", "c"}, "b": {"a", "c"}, "c": {"a"}}
    assert picture.without_shortcuts(circle) == {"a": {"b"}, "b": {"c"}, "c": {"a"}}


@pytest.fixture(scope="module")
def figures() -> house.Figures:
    return house.measure(ROOT)


@pytest.mark.slow
def test_this_house(figures: house.Figures) -> None:
    assert figures["package"]["files"] > 100
    assert figures["circles"] == []
    assert figures["circles_with_functions"] == []


@pytest.mark.slow
def test_two_trees_next_to_each_other(figures: house.Figures, tree: Path) -> None:
    before, after = tree / "before.json", tree / "after.json"
    after.write_text(json.dumps(figures))
    attic = {"files": 2, "lines": 1234}
    before.write_text(json.dumps(figures | {"folders": figures["folders"] | {"aioshm/attic": attic}}))
    run = [sys.executable, "-m", "tools.house", "--no-walks"]
    done = subprocess.run([*run, before, after], cwd=ROOT, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["before", "after"]
    assert [line.split()[1:] for line in lines if line.startswith("aioshm/attic")] == [
        ["2", "files,", "1,234", "lines"]
    ]
    refused = subprocess.run([*run, tree], cwd=ROOT, capture_output=True, text=True)
    assert refused.returncode == 1
    assert "pass the folder that has aioshm/ in it" in refused.stderr


def test_walks() -> None:
    walks = ROOT / "tools/walks.py"
    done = subprocess.run([sys.executable, walks, "--steps", "hot dequeue"], capture_output=True, text=True, check=True)
    assert len(done.stdout.splitlines()) <= 2, "a hot dequeue is a call or two"


@pytest.mark.slow
def test_every_walk() -> None:
    done = subprocess.run([sys.executable, ROOT / "tools/walks.py", "--json"], capture_output=True, check=True)
    figures = json.loads(done.stdout)
    assert len(figures) == 8
    for name, row in figures.items():
        assert row["calls"] >= row["moves"] >= row["moves back"] >= 0, name
        assert row["calls"] or name.startswith("hot"), name  # a hot call may be the core's alone


def test_the_picture_is_that_of_the_imports() -> None:
    checked = subprocess.run(
        [sys.executable, "-m", "tools.picture", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stderr
