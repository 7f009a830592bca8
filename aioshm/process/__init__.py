"""Processes: started, watched, stopped; what the system lets this one have, and what its signals may interrupt."""

from typing import TYPE_CHECKING

from aioshm.deferred import import_when_used as _import_when_used

if TYPE_CHECKING:  # "as" marks exported names
    from aioshm.process.orphans import adopt_orphans as adopt_orphans

if not TYPE_CHECKING:  # with __getattr__ a type checker would accept any name
    __all__ = ["adopt_orphans"]
    _homes = {"aioshm.process.orphans": __all__, "aioshm.process.progress": ()}
    __getattr__, __dir__ = _import_when_used(__name__, _homes)
