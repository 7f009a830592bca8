"""The modules of a package as syntax trees, and who imports whom."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

Graph: TypeAlias = dict[str, set[str]]


@dataclass
class Module:
    """One file of a package.

    Attributes:
        name: Its dotted name; that of a package for an ``__init__.py``.
        path: The file.
        tree: Its syntax tree.
        lines: How many it has.
        names: What its import statements bind, each with the dotted name that it stands for.
        at_import: Modules of the package that importing this one imports.
        in_functions: Those that only its functions import, when they are called.
        for_types: Those that it imports for the type checker alone.
    """

    name: str
    path: Path
    tree: ast.Module
    lines: int
    names: dict[str, str] = field(default_factory=dict)
    at_import: set[str] = field(default_factory=set)
    in_functions: set[str] = field(default_factory=set)
    for_types: set[str] = field(default_factory=set)

    @property
    def package(self) -> str:
        """The package that relative imports start from."""
        return self.name if self.path.name == "__init__.py" else self.name.rpartition(".")[0]


def read(tree: Path, package: str = "aioshm") -> dict[str, Module]:
    """Parse every module of a package, by dotted name.

    Raises:
        FileNotFoundError: The tree has no such package.
    """
    root = tree / package
    if not (root / "__init__.py").is_file():
        raise FileNotFoundError(f"{root} is no package: pass the folder that has {package}/ in it")
    modules = {}
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(tree).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        text = path.read_text()
        modules[name] = Module(name, path, ast.parse(text, str(path)), text.count("\n"))
    for module in modules.values():
        _note_imports(module, modules)
    return modules


def _note_imports(module: Module, modules: dict[str, Module]) -> None:
    for node, kind in _imports(module.tree.body, "at_import"):
        if isinstance(node, ast.Import):
            targets = {alias.name: alias for alias in node.names}
            module.names.update({alias.asname or name.split(".")[0]: name for name, alias in targets.items()})
        else:
            base = module.package.split(".")[: len(module.package.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            targets = {f"{source}.{alias.name}": alias for alias in node.names}
            module.names.update({alias.asname or alias.name: name for name, alias in targets.items()})
        for name in targets:
            found = name if name in modules else name.rpartition(".")[0]
            if found in modules and found != module.name:
                getattr(module, kind).add(found)
    module.in_functions -= module.at_import
    module.for_types -= module.at_import | module.in_functions


def _imports(body: list[ast.stmt], kind: str) -> Iterator[tuple[ast.Import | ast.ImportFrom, str]]:
    """Find the import statements of a body, each with the `Module` attribute that it counts for."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node, kind
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _imports(node.body, "in_functions" if kind == "at_import" else kind)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from _imports(node.body, "for_types")
            yield from _imports(node.orelse, kind)
        else:
            for name in ("body", "orelse", "finalbody"):
                yield from _imports(getattr(node, name, []), kind)
            for handler in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
                yield from _imports(handler.body, kind)


def import_graph(modules: dict[str, Module], *, functions: bool = False, types: bool = False) -> Graph:
    """Tell which modules each one imports: when it is imported and, if asked, in functions or for types, too.

    That importing a module runs the ``__init__`` of the packages around it does not count, or all would be circles.
    """
    return {
        name: module.at_import | (module.in_functions if functions else set()) | (module.for_types if types else set())
        for name, module in modules.items()
    }


def circles(graph: Graph) -> list[list[str]]:
    """Find the groups of modules that import each other: strongly connected components of two or more (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in sorted(graph[node]):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            component = stack[stack.index(node) :]
            del stack[stack.index(node) :]
            if len(component) > 1:
                found.append(sorted(component))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return sorted(found, key=lambda circle: (-len(circle), circle))
