"""The parts of all benchmarks.

`harness` is the command line, `crew` the other processes, `workload` the messages, `stage` a contestant with its lines
open, `loops` the measuring loops of its processes, `report` figures, promises and their table.
"""
