"""The picture of the package in ``docs/architecture.md``, drawn from its imports: which room uses which.

    python -m tools.picture            # write it into the page
    python -m tools.picture --check    # fail if the page shows another one

A room is a folder; modules that lie beside the folders are not drawn. An arrow leads from who imports to what is
imported; those that follow from others (a uses b, b uses c: so may a) are left out.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tools import sources

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/architecture.md"
BEGIN, END = "<!-- drawn by tools/picture.py: begin -->", "<!-- drawn by tools/picture.py: end -->"
PACKAGE = "aioshm"


def rooms(modules: dict[str, sources.Module], root: str) -> sources.Graph:
    """Tell which folders of a package import from which others, in functions too; not for types alone."""

    def room_of(name: str) -> str:
        return name[len(root) + 1 :].split(".")[0] if name.startswith(f"{root}.") else ""

    folders = {room_of(name) for name, module in modules.items() if module.path.name == "__init__.py"} - {""}
    graph: sources.Graph = {room: set() for room in sorted(folders)}
    for name, imported in sources.import_graph(modules, functions=True).items():
        if room_of(name) in folders:
            graph[room_of(name)] |= folders & {room_of(other) for other in imported} - {room_of(name)}
    return graph


def without_shortcuts(graph: sources.Graph) -> sources.Graph:
    """Leave out the arrows that lead where others lead in two steps or more; what can be reached stays the same."""
    left = {room: set(others) for room, others in graph.items()}
    for room in sorted(graph):
        for other in sorted(graph[room]):
            left[room].remove(other)
            if not _reaches(left, room, other):
                left[room].add(other)
    return left


def _reaches(graph: sources.Graph, start: str, end: str) -> bool:
    seen, ahead = {start}, [start]
    while ahead:
        for other in graph[ahead.pop()] - seen:
            seen.add(other)
            ahead.append(other)
    return end in seen


def picture(graph: sources.Graph) -> str:
    """Draw rooms in Mermaid."""
    # A name of its own for each node: some rooms are called as Mermaid's own words are, such as "end".
    lines = [f'    {room}_["{room}/"]' for room in sorted(graph)]
    lines += [f"    {room}_ --> {other}_" for room in sorted(graph) for other in sorted(graph[room])]
    return "\n".join(["```mermaid", "flowchart TD", *lines, "```"])


def drawn() -> str:
    """Return what stands between the marks on the page."""
    modules = sources.read(ROOT, PACKAGE)
    house = rooms(modules, PACKAGE)
    parts = [picture(without_shortcuts(house))]
    for room in house:
        inside = rooms(modules, f"{PACKAGE}.{room}")
        if len(inside) > 1:
            parts += [f"Inside of `{room}/`:", picture(without_shortcuts(inside))]
    return "\n\n".join(parts)


def main() -> None:
    """Write the picture, or check it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="change nothing; fail if the page shows another picture")
    arguments = parser.parse_args()
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        sys.exit(f"{PAGE} has no lines {BEGIN!r} and {END!r}, between which the picture stands")
    page = f"{before}{BEGIN}\n\n{drawn()}\n\n{END}{after}"
    if page == PAGE.read_text():
        return
    if arguments.check:
        sys.exit("docs/architecture.md shows another house than the imports do: run python -m tools.picture")
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
