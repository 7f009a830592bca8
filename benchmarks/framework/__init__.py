"""What all benchmarks are made of.

`harness` is the command line, `crew` the other processes, `workload` what is sent, `stage` a contestant with its lines
open, `loops` what its processes run, `contest` all contestants in turns, `report` figures, promises and their table.
"""
