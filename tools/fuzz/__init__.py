"""Fuzzing of every decoder of what other processes, other users or other hosts may have written.

`python -m tools.fuzz` (``make fuzz SECONDS=60``) runs each target of ``targets/`` under atheris, the two with native
halves besides under libFuzzer with the address and undefined behaviour sanitizers. A target gets arbitrary bytes, and
returns; it raises where a decoder gives anything but a value or its documented errors, or where a round trip fails.
"""
