"""Which functions of the code the models stand for, and whether they are still those that were modelled."""

from __future__ import annotations

import ast
import hashlib
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
TABLE = Path(__file__).parent / "steps.toml"


def functions() -> dict[str, dict[str, str]]:
    """Return what `TABLE` says: for each model, the functions that it stands for, each with the hash of its source."""
    return {model: dict(entries) for model, entries in tomllib.loads(TABLE.read_text()).items()}


def digest(place: str) -> str:
    """Return the hash of a function's source; ``place`` is its file, from aioshm/ on, ``::`` and its name.

    Comments, docstrings and white space do not count.
    """
    file, name = place.split("::")
    text = (ROOT / "aioshm" / file).read_text()
    source = _c_function(text, name) if file.endswith((".c", ".h")) else _python_function(text, name)
    if source is None:
        raise LookupError(f"aioshm/{file} has no {name}, which verify/steps.toml names")
    return hashlib.sha256(source.encode()).hexdigest()[:16]


def changed() -> list[str]:
    """Return which of the functions are not what was modelled, each with its model."""
    found = []
    for model, entries in functions().items():
        for place, known in entries.items():
            try:
                now = digest(place)
            except LookupError as error:
                found.append(f"{model}: {error}")
                continue
            if now != known:
                found.append(f"{model}: aioshm/{place.replace('::', ', ')} has changed")
    return found


def accept() -> int:
    """Take the functions as they are for what is modelled; return how many hashes changed."""
    text, count = TABLE.read_text(), 0
    for entries in functions().values():
        for place, known in entries.items():
            now = digest(place)
            count += now != known
            text = re.sub(rf'^("{re.escape(place)}" = )"[^"]*"', rf'\1"{now}"', text, flags=re.MULTILINE)
    TABLE.write_text(text)
    return count


def _python_function(text: str, name: str) -> str | None:
    nodes: list[ast.AST] = [ast.parse(text)]
    for part in name.split("."):
        nodes = [
            child
            for node in nodes
            for child in getattr(node, "body", [])
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and child.name == part
        ]
    if not nodes:
        return None
    for inner in [each for node in nodes for each in ast.walk(node)]:
        body = getattr(inner, "body", None)
        if isinstance(inner, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and body:
            first = body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                inner.body = body[1:]
    return "".join(ast.dump(node) for node in nodes)


def _c_function(text: str, name: str) -> str | None:
    found = re.search(
        rf"^[A-Za-z][^;{{}}=\n]*\b{re.escape(name)}\([^;{{}}]*\)\n\{{\n.*?^\}}$", text, re.MULTILINE | re.DOTALL
    )
    if found is None:
        return None
    return " ".join(re.sub(r"/\*.*?\*/", " ", found[0], flags=re.DOTALL).split())
