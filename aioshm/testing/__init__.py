"""For tests of programs that use aioshm: both ends of a queue in one loop, and a check for leftovers.

The pytest plugin (`aioshm.testing.plugin`) is installed with aioshm and has the same as fixtures: `aioshm_pair`,
`aioshm_readers`, `aioshm_clean` and `aioshm_runtime_dir`. This module needs no pytest, and imports its parts on first
use: pytest imports the plugin in every run.
"""

from aioshm.deferred import import_when_used as _import_when_used

__getattr__, __dir__, __all__ = _import_when_used(__name__, __file__)
