"""The contestants, in the order in which they are shown."""

from benchmarks.compare.contestant import Contestant
from benchmarks.compare.contestants import aioshm_ends, faster, iceoryx, nng, pyzmq, stdlib, vllm

CONTESTANTS: list[Contestant] = [
    *aioshm_ends.CONTESTANTS,
    *vllm.CONTESTANTS,
    *iceoryx.CONTESTANTS,
    *pyzmq.CONTESTANTS,
    *stdlib.CONTESTANTS,
    *faster.CONTESTANTS,
    *nng.CONTESTANTS,
]
