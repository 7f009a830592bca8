"""What ``make docs`` adds to the pages, as a hook of mkdocs: parts that stand in the source.

* ``<!-- include: FILE -->``: a page of the repository's root, its links turned to those of the site.
* ``<!-- docstring: MODULE -->``: what a module says of itself, drawings and all.
* ``<!-- command line -->``: the reference of the ``aioshm`` command, from the command.

And an extension of griffe: the reference shows the values of default arguments, not the names of constants.
"""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

from griffe import Attribute, Expr, ExprName, Extension, Function

ROOT = Path(__file__).parents[1]

SITE_PAGES = {
    "README.md": "index.md",
    "SECURITY.md": "explanation/threat-model.md",
    "CHANGELOG.md": "reference/changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
"""Where the pages of the repository's root are on the site."""


def on_config(config: Any) -> None:
    """Name the version at the foot of every page."""
    version = importlib.import_module("aioshm").__version__
    config.copyright = f"aioshm {version}, Apache-2.0"


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Put in what a page only names."""
    depth = page.file.src_uri.count("/")
    markdown = re.sub(r"\]\((?:\.\./)+([A-Z]+\.md)", lambda found: f"]({'../' * depth}{SITE_PAGES[found[1]]}", markdown)
    markdown = re.sub(r"<!-- include: (\S+) -->", lambda found: included(found[1], depth), markdown)
    markdown = re.sub(r"<!-- docstring: (\S+) -->", lambda found: docstring(found[1]), markdown)
    if "<!-- command line -->" in markdown:
        markdown = markdown.replace("<!-- command line -->", command_line())
    return markdown


def included(name: str, depth: int) -> str:
    """Return a page of the repository's root as it stands on the site, ``depth`` folders down."""
    up = "../" * depth

    def link(found: re.Match[str]) -> str:
        target, anchor = found[1], found[2] or ""
        return f"]({up}{SITE_PAGES.get(target, target.removeprefix('docs/'))}{anchor})"

    return re.sub(r"\]\(([\w./-]+\.(?:md|svg|png))(#[\w-]+)?\)", link, (ROOT / name).read_text())


def docstring(module: str) -> str:
    """Return the docstring of a module as Markdown: what is indented there is drawn as it stands."""
    lines: list[str] = []
    drawing: list[str] = []
    for line in [*inspect.cleandoc(importlib.import_module(module).__doc__ or "").splitlines(), "end"]:
        if line.startswith("    ") or (drawing and not line):
            drawing.append(line[4:])
            continue
        if drawing:
            lines += ["```text", *"\n".join(drawing).rstrip().splitlines(), "```", ""]
            drawing = []
        lines.append(line.replace("``", "`"))
    return "\n".join(lines[:-1])


def command_line() -> str:
    """Return the reference of the ``aioshm`` command, a level of headings down."""
    from typer.cli import get_docs_for_click
    from typer.main import get_command

    from aioshm.cli.app import make_app

    command = get_command(make_app())
    context: Any = command.context_class(command)
    text = get_docs_for_click(obj=command, ctx=context, name="aioshm")
    text = text.partition("\n")[2]  # the page has a title of its own
    text = re.sub(r"^(\* `[^`]+`): (.+?)\.\.\.$", lambda found: f"{found[1]}: {found[2]} ...", text, flags=re.MULTILINE)
    return str(text)


class Defaults(Extension):
    """Replaces the name of a constant by its value, in functions and in fields."""

    def on_function(self, *, func: Function, **_: Any) -> None:
        """Replace the defaults of parameters."""
        for parameter in func.parameters:
            parameter.default = value_of(func, parameter.default)

    def on_attribute(self, *, attr: Attribute, **_: Any) -> None:
        """Replace the default of a field of a class."""
        if attr.parent is not None and attr.parent.is_class:
            attr.value = value_of(attr, attr.value)


def value_of(owner: Function | Attribute, default: str | Expr | None) -> str | Expr | None:
    """Return the value of a constant as Python code; anything else as it is."""
    if not isinstance(default, ExprName) or not default.name.lstrip("_").isupper():
        return default
    try:
        module, _, name = default.canonical_path.rpartition(".")
        value = getattr(importlib.import_module(module), name)
    except Exception:
        return default
    return shown(value) if isinstance(value, (int, float, str)) else default


def shown(value: float | str) -> str:
    """Return a constant as a reader would write it: 24 * 1024**2."""
    if isinstance(value, int) and value and value % 1024**2 == 0:
        return f"{value // 1024**3} * 1024**3" if value % 1024**3 == 0 else f"{value // 1024**2} * 1024**2"
    return f"{value:_}" if isinstance(value, int) and value > 9999 else repr(value)
