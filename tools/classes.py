"""What the classes of a package know of each other: ladders, shared attributes, private names."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

from tools.sources import Module

_OWN = ("self", "cls")


@dataclass
class Class:
    """One class of the package.

    Attributes:
        name: Its dotted name.
        node: Its definition.
        bases: The dotted names of those base classes that the package defines.
        sets: Attributes that its methods set on ``self``, or its body assigns or declares.
        reads: Attributes that its methods read on ``self``.
        defines: Those, and the names of its methods.
    """

    name: str
    node: ast.ClassDef
    bases: list[str] = field(default_factory=list)
    sets: set[str] = field(default_factory=set)
    reads: set[str] = field(default_factory=set)
    defines: set[str] = field(default_factory=set)


def find(modules: dict[str, Module]) -> dict[str, Class]:
    """Find every class of the package, those inside of functions and classes too, by dotted name."""
    classes: dict[str, Class] = {}
    for module in modules.values():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                classes[f"{module.name}.{node.name}"] = Class(f"{module.name}.{node.name}", node)
    for each in classes.values():
        module = modules[each.name.rpartition(".")[0]]
        for base in each.node.bases:
            found = _resolve(ast.unparse(base).split("[")[0], module, modules)
            if found in classes and found != each.name:
                each.bases.append(found)
        _note_attributes(each)
    return classes


def _resolve(text: str, module: Module, modules: dict[str, Module]) -> str:
    """Follow a name through import statements to where its class is defined."""
    first, _, rest = text.partition(".")
    if first not in module.names:
        return f"{module.name}.{text}"
    name = module.names[first] + (f".{rest}" if rest else "")
    source, _, last = name.rpartition(".")
    while source in modules and last in modules[source].names:  # exported again by a package
        name = modules[source].names[last]
        source, _, last = name.rpartition(".")
    return name


def _note_attributes(each: Class) -> None:
    for statement in each.node.body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            each.defines.add(statement.name)
        for target in statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]:
            if isinstance(target, ast.Name):
                each.sets.add(target.id)
    for node in _inside(each.node):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in _OWN:
            (each.reads if isinstance(node.ctx, ast.Load) else each.sets).add(node.attr)
        elif isinstance(node, ast.AugAssign) and ast.unparse(node.target).startswith("self."):
            each.reads.add(ast.unparse(node.target).split(".")[1])
    each.defines |= each.sets


def _inside(node: ast.AST) -> Iterator[ast.AST]:
    """Walk a class or function without the classes that are defined inside of it."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.ClassDef):
            yield child
            yield from _inside(child)


def ancestors(name: str, classes: dict[str, Class]) -> list[str]:
    """Return a class and all that it inherits from within the package."""
    found = [name]
    for base in classes[name].bases:
        found += [each for each in ancestors(base, classes) if each not in found]
    return found


def longest_ladder(classes: dict[str, Class], *, errors: bool) -> list[str]:
    """Return the longest line of classes, each of which inherits from the next; among errors or all the others."""

    def ladder(name: str) -> list[str]:
        return [name, *max((ladder(base) for base in classes[name].bases), key=len, default=[])]

    def is_error(name: str) -> bool:
        bases = {text for each in ancestors(name, classes) for text in map(ast.unparse, classes[each].node.bases)}
        return any(text.endswith(("Exception", "Error", "Warning")) for text in bases)

    return max((ladder(name) for name in sorted(classes) if is_error(name) == errors), key=len, default=[])


def shared_attributes(classes: dict[str, Class]) -> dict[str, list[str]]:
    """Tell, for each class that has ancestors, which attributes are set in one class of its ladder and read in another.

    Only where no class below has the same, so that an attribute counts once for each ladder that ends somewhere.
    """
    bases = {base for each in classes.values() for base in each.bases}
    found = {}
    for name in sorted(set(classes) - bases):
        ladder = ancestors(name, classes)
        shared = {
            attribute
            for setter in ladder
            for reader in ladder
            if setter != reader
            for attribute in classes[setter].sets & classes[reader].reads
        }
        if shared:
            found[name] = sorted(shared)
    return found


def private_accesses(modules: dict[str, Module], classes: dict[str, Class]) -> list[str]:
    """Find the accesses to a private name of another class: ``module:line object._name``.

    A name counts as another class's if some class of the package defines it, and neither the class that the access
    stands in nor an ancestor or descendant of it does.
    """
    private = {name for each in classes.values() for name in each.defines if _is_private(name)}
    related: dict[str, set[str]] = {name: set() for name in classes}
    for name in classes:
        for ancestor in ancestors(name, classes):
            related[name] |= classes[ancestor].defines
            related[ancestor] |= classes[name].defines
    found = []
    for module in modules.values():
        scopes: list[tuple[ast.AST, set[str]]] = [(module.tree, set())]
        scopes += [
            (node, related[f"{module.name}.{node.name}"])
            for node in ast.walk(module.tree)
            if isinstance(node, ast.ClassDef)
        ]
        for scope, own in scopes:
            for node in _inside(scope):
                if not isinstance(node, ast.Attribute) or node.attr not in private - own:
                    continue
                value = ast.unparse(node.value)
                if value not in _OWN and not value.startswith("super(") and module.names.get(value) not in modules:
                    found.append(f"{module.name}:{node.lineno} {value}.{node.attr}")
    return sorted(found)


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")
