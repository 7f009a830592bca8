"""The contestants, in the order in which they are shown, each written once for every benchmark."""

from benchmarks.contestants import aioshm_ends, faster, iceoryx, nng, pyzmq, stdlib, vllm
from benchmarks.contestants.contestant import Contestant

CONTESTANTS: list[Contestant] = [
    *aioshm_ends.CONTESTANTS,
    *vllm.CONTESTANTS,
    *iceoryx.CONTESTANTS,
    *pyzmq.CONTESTANTS,
    *stdlib.CONTESTANTS,
    *faster.CONTESTANTS,
    *nng.CONTESTANTS,
]
OVER_TCP: list[Contestant] = [
    aioshm_ends.PLAIN,
    aioshm_ends.CURVE,
    aioshm_ends.LEASED,
    pyzmq.BARE,
    pyzmq.BARE_UNCOPIED,
]
EVERYWHERE = ("aioshm", "zmq.asyncio", "mp.Queue", "mp.Pipe")
"""The contestants that every installation has, which take part unless the command line says otherwise."""

__all__ = ["CONTESTANTS", "EVERYWHERE", "OVER_TCP", "Contestant"]
