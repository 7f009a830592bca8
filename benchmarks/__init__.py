"""What aioshm promises, measured against what Python programs use today, on this machine, in one run.

Each of these prints a table, or JSON with ``--json``, and fails with ``--check`` if a promise was missed:

    python -m benchmarks.throughput     messages/s to one reader
    python -m benchmarks.fanout         messages/s to 1 to 4 readers
    python -m benchmarks.latency        round trips, and waking a reader that is just going to sleep
    python -m benchmarks.idle           what a waiting reader costs
    python -m benchmarks.fairness       what a busy queue does to another task on its loop
    python -m benchmarks.writer_cost    what a message costs the writer of 1 to 64 readers
    python -m benchmarks.memory         what a million messages leave in memory
    python -m benchmarks.remote         messages/s to a reader over TCP, and what encryption costs
    python -m benchmarks.strangers      messages/s while strangers annoy every open port
    python -m benchmarks.workers        a step of an engine: a call of every worker, and all their answers
    python -m benchmarks.engine_roundtrip  from a request to an engine's first output
    python -m benchmarks.compare        all of that which other libraries can do too, against them (make bench-rivals)

`benchmarks.trees` compares two checkouts of aioshm instead. All of them are made of the parts in `benchmarks.framework`
and of `benchmarks.contestants`, each of which is written once.
"""
