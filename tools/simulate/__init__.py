"""Simulation: the parts that decide without I/O, together, under one seeded clock, network and table of processes.

`python -m tools.simulate` (``make simulate``) runs thousands of seeds, each a world of its own that can be repeated by
its number. The classes are the real ones; what is made up is time, connections, and processes.
"""
