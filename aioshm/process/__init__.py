"""Processes: started, watched, stopped; what the system lets this one have, and what its signals may interrupt."""

from aioshm.deferred import import_when_used as _import_when_used

__getattr__, __dir__, __all__ = _import_when_used(__name__, __file__)
