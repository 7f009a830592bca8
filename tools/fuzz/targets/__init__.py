"""The fuzz targets, by name."""

from __future__ import annotations

from tools.fuzz.target import Target
from tools.fuzz.targets import files, queues, ring, services

TARGETS: dict[str, Target] = {
    target.name: target for module in (queues, ring, services, files) for target in module.TARGETS
}
