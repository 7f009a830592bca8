"""The promises of aioshm, measured against what Python programs use today, on this machine, in one run.

Each of these prints a table, or JSON with ``--json``, and with ``--check`` fails if a promise was missed:

    python -m benchmarks.compare           queues, every case against every rival (make bench-rivals)
    python -m benchmarks.defaults          the promises of queues alone, with new processes for every repetition
    python -m benchmarks.churn             readers that join and die under full traffic
    python -m benchmarks.workers           a step of an engine: a call of every worker, and all their answers
    python -m benchmarks.engine_roundtrip  from a request to an engine's first output
    python -m benchmarks.events_publish    batches of KV-cache events
    python -m benchmarks.observe           messages lost to `aioshm top` and to scrapes
    python -m benchmarks.survival          engines and workers that are killed or hang
    python -m benchmarks.vllm_executor     a step of vLLM's executor on either queue (make vllm)

`benchmarks.before_after` compares two checkouts of aioshm. `benchmarks.throughput` measures the figures of README's
picture, and `benchmarks.pictures` draws it.
"""
