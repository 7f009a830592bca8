"""The contestants, in the order in which they are shown."""

from benchmarks.contestants import aioshm_ends, iceoryx, pyzmq, stdlib, vllm
from benchmarks.contestants.contestant import Contestant

CONTESTANTS: list[Contestant] = [
    *aioshm_ends.CONTESTANTS,
    *vllm.CONTESTANTS,
    *iceoryx.CONTESTANTS,
    *pyzmq.CONTESTANTS,
    *stdlib.CONTESTANTS,
]

__all__ = ["CONTESTANTS", "Contestant"]
