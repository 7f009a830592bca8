"""The fuzz targets, by name."""

from __future__ import annotations

from tools.fuzz.target import Target
from tools.fuzz.targets import engine, events, files, lifeline, observe, remote, ring

TARGETS: dict[str, Target] = {
    target.name: target
    for module in (lifeline, ring, remote, engine, events, files, observe)
    for target in module.TARGETS
}
