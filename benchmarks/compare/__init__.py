"""aioshm and its rivals, in one run: throughput, fan-out, round trips, latency and CPU at a cadence, sizes.

    make bench-rivals                  builds .venv-rivals with every rival in its pinned version
    python -m benchmarks.compare       measures whatever is installed; says what is missing and how to get it

Every contestant carries the same objects and has each one checked on arrival. Every writer and every reader is a
process of its own, held to one core where there are enough of them. Contestants that are called without await run in
plain loops; those that are awaited run on uvloop, where it is installed. Repetitions go round all contestants, so that
whatever else happens on the machine happens to all of them.
"""
