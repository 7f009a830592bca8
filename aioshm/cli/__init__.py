"""The command line: ``app.py`` runs the commands."""
