"""The coordinator of data-parallel engines."""
