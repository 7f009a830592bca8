"""aioshm: messages between the processes of one asyncio service.

The names of this package are imported at first use, so that a program pays for the parts that it uses.
"""

from aioshm.deferred import import_when_used as _import_when_used

__version__ = "0.1.0"  # pyproject.toml reads it

__getattr__, __dir__, __all__ = _import_when_used(__name__, __file__)
