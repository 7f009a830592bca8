"""``python -m aioshm``, and the ``aioshm`` command."""

from __future__ import annotations

import sys

_EXTRA = {"typer", "click", "rich"}


def main() -> int:
    """Run the command line; return its exit code."""
    try:
        from aioshm.cli.app import run

        return run(sys.argv[1:])  # which imports what the command needs
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in _EXTRA:
            raise
        print(f"aioshm: the command line needs {error.name}: pip install 'aioshm[cli]'", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("aioshm: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
