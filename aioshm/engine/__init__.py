"""Engines: their startup, handshake, client, supervision and end; the names are vLLM's.

Names are imported at their first use: an engine's process needs neither client nor supervisor.
"""

from aioshm.deferred import import_when_used as _import_when_used

__getattr__, __dir__, __all__ = _import_when_used(__name__, __file__)
