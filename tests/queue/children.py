"""Ends of a queue in processes of their own."""

from test_death import Child, child

__all__ = ["Child", "child"]
