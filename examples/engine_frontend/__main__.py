"""``python -m engine_frontend``, in the folder ``examples``; see README.md here."""

import sys

if __name__ == "__main__":  # the engines and their workers import this module, too, and need nothing of what follows
    from engine_frontend.server import main

    sys.exit(main())
