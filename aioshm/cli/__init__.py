"""The command line: ``app.py`` runs the commands, ``outcome.py`` has their common parts."""
