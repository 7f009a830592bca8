"""Follows every link of the built site: ``python -m tools.links site``.

Those that lead nowhere within the site, to a page or to a place on one, are an error. Those that lead out of it are
listed, and not followed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit


class _Page(HTMLParser):
    """Collects what a page links to, and what may be linked to on it."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "link" and dict(attrs).get("rel") in ("canonical", "next", "prev"):
            return  # the page itself, and its neighbours, by the address that the site is to have
        for name, value in attrs:
            if name in ("href", "src") and value is not None:
                self.targets.append(value)
            elif name in ("id", "name") and value and tag != "meta":
                self.anchors.add(value)


def follow(site: Path) -> tuple[list[str], list[str]]:
    """Return what leads nowhere, and what leads out of a site."""
    pages = {path.resolve(): _Page(path) for path in site.rglob("*.html")}
    broken, outward = set(), set()
    for path, page in pages.items():
        if path.name == "404.html":  # whose links are those of the place where it will be
            continue
        for target in page.targets:
            if urlsplit(target).scheme or target.startswith("//"):
                outward.add(target)
                continue
            name, anchor = urldefrag(target)
            goal = (path.parent / unquote(name)).resolve() if name else path
            goal = goal / "index.html" if goal.is_dir() else goal
            known = pages.get(goal)
            lost = anchor and known is not None and unquote(anchor) not in known.anchors and anchor != "__skip"
            if not goal.exists() or lost:
                broken.add(f"{path.relative_to(site.resolve())}: {target}")
    return sorted(broken), sorted(outward)


def main(arguments: Sequence[str]) -> int:
    """Follow, tell, and return the exit code."""
    broken, outward = follow(Path(arguments[0] if arguments else "site"))
    for line in outward:
        print(f"out of the site, not followed: {line}")
    for line in broken:
        print(f"leads nowhere: {line}", file=sys.stderr)
    return int(bool(broken))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
