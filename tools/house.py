"""How well the source is kept, in figures: of one tree, or of two next to each other.

    python -m tools.house .                        # this checkout
    python -m tools.house ../before . --json       # another one, or what --json wrote of it, next to this one

Counted are files and lines of each folder; the longest ladder of classes that inherit from each other; attributes that
one class of a ladder sets and another one reads; accesses to private names of other classes; modules that import each
other in a circle; and, by running `tools.walks` with the tree's own interpreter, the calls and the moves between files
of what users do most.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, TypeAlias

from tools import classes, sources

PACKAGE = "aioshm"
BESIDE = ("tests", "benchmarks", "tools", "examples")
WALKS_TIMEOUT_S = 300

Figures: TypeAlias = dict[str, Any]


def measure(tree: Path) -> Figures:
    """Measure what the syntax trees of a checkout tell.

    Raises:
        FileNotFoundError: There is no such package in it.
    """
    modules = sources.read(tree, PACKAGE)
    found = classes.find(modules)
    shared = classes.shared_attributes(found)
    folders: dict[str, list[int]] = {}
    for module in modules.values():
        folders.setdefault(str(module.path.parent.relative_to(tree)), []).append(module.lines)
    beside = {name: [_lines(path) for path in (tree / name).rglob("*.py")] for name in BESIDE if (tree / name).is_dir()}
    return {
        "folders": {name: {"files": len(counts), "lines": sum(counts)} for name, counts in sorted(folders.items())},
        "package": {"files": len(modules), "lines": sum(module.lines for module in modules.values())},
        "c": {path.name: _lines(path) for path in sorted((tree / PACKAGE).rglob("*.c"))},
        "beside": {name: {"files": len(counts), "lines": sum(counts)} for name, counts in beside.items()},
        "longest_file": max((module.lines, str(module.path.relative_to(tree))) for module in modules.values()),
        "longest_ladder": classes.longest_ladder(found, errors=False),
        "longest_ladder_of_errors": classes.longest_ladder(found, errors=True),
        "shared_attributes": shared,
        "private_accesses": classes.private_accesses(modules, found),
        "circles": sources.circles(sources.import_graph(modules)),
        "circles_with_functions": sources.circles(sources.import_graph(modules, functions=True)),
        "circles_with_types": sources.circles(sources.import_graph(modules, functions=True, types=True)),
    }


def _lines(path: Path) -> int:
    return path.read_text().count("\n")


def walk(tree: Path) -> Figures:
    """Run the walks of a tree with its own interpreter, ``.venv/bin/python``.

    Raises:
        FileNotFoundError: It has none.
        subprocess.CalledProcessError: A walk failed; its traceback is on standard error.
    """
    python = (tree / ".venv/bin/python").absolute()  # not resolved: the link itself says which environment it is
    if not python.exists():
        raise FileNotFoundError(f"{python} is not there: build the tree's environment first, or say --no-walks")
    done = subprocess.run(
        [python, Path(__file__).with_name("walks.py").absolute(), "--json"],
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree.absolute())},
        stdout=subprocess.PIPE,
        timeout=WALKS_TIMEOUT_S,
        check=True,
    )
    walks: Figures = json.loads(done.stdout)
    return walks


def rows(figures: Figures) -> dict[str, str]:
    """Say the figures as the lines of a table."""
    shared = figures["shared_attributes"]
    table = {"package: files, lines": _size(figures["package"])}
    table |= {f"{name}/": _size(size) for name, size in figures["folders"].items()}
    table |= {f"{name} (C)": f"{lines:,} lines" for name, lines in figures["c"].items()}
    table |= {f"beside: {name}/": _size(size) for name, size in figures["beside"].items()}
    table |= {
        "longest file": "{:,} lines".format(figures["longest_file"][0]),
        "longest class ladder": str(len(figures["longest_ladder"])),
        "longest ladder of errors": str(len(figures["longest_ladder_of_errors"])),
        "names set in one class, read in another": str(sum(map(len, shared.values()))),
        "the most of one ladder": str(max(map(len, shared.values()), default=0)),
        "private accesses across classes": str(len(figures["private_accesses"])),
        "import circles": _circles(figures["circles"]),
        "with imports inside functions": _circles(figures["circles_with_functions"]),
        "with imports for types, too": _circles(figures["circles_with_types"]),
    }
    for name, counts in figures.get("walks", {}).items():
        table[name] = "{calls} calls, {moves} moves ({moves back} back), {files} files".format(**counts)
    return table


def _size(size: dict[str, int]) -> str:
    return f"{size['files']:,} files, {size['lines']:,} lines"


def _circles(found: list[list[str]]) -> str:
    return f"{len(found)}" + (f" (of {', '.join(str(len(circle)) for circle in found)} modules)" if found else "")


def _measured(where: Path, with_walks: bool) -> Figures:
    if where.is_file():
        figures: Figures = json.loads(where.read_text())
        return figures
    return measure(where) | ({"walks": walk(where)} if with_walks else {})


def _in_order(tables: list[dict[str, str]]) -> list[str]:
    """Return the names of all rows, those of the first table alone beside what they stood after."""
    names = list(tables[-1])
    before = None
    for name in tables[0]:
        if name not in names:
            names.insert(names.index(before) + 1 if before else 0, name)
        before = name
    return names


def main() -> None:
    """Print a table, or JSON, of one tree or of two."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("tree", nargs="+", type=Path, help="a checkout, or the JSON of one; a second one to compare")
    parser.add_argument("--json", action="store_true", help="print everything that was found as JSON")
    parser.add_argument("--no-walks", action="store_true", help="only read the source, run nothing")
    arguments = parser.parse_args()
    if len(arguments.tree) > 2:
        parser.error(f"one tree or two, not {len(arguments.tree)}")
    try:
        measured = [_measured(tree, not arguments.no_walks) for tree in arguments.tree]
    except (FileNotFoundError, json.JSONDecodeError, subprocess.SubprocessError) as error:
        sys.exit(f"{parser.prog}: {error}")
    if arguments.json:
        print(json.dumps(measured[0] if len(measured) == 1 else dict(zip(("before", "after"), measured, strict=True))))
        return
    tables = [rows(figures) for figures in measured]
    names = _in_order(tables)
    heads = ("", "before", "after") if len(tables) == 2 else ("", "")
    lines = [heads, *((name, *(table.get(name, "") for table in tables)) for name in names)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


if __name__ == "__main__":
    main()
