"""The command line. ``app.py`` puts it together; every other module here is a command, or what commands share."""
