"""The contestants. All do the same work: the same objects, by pickle, each message to every reader."""

from benchmarks.rivals import aioshm_queue, mp_pipe, mp_queue, zmq_pubsub
from benchmarks.rivals.base import Line, ReaderEnd, Receiver, Rival, Sender, WriterEnd

RIVALS = [aioshm_queue.RIVAL, zmq_pubsub.RIVAL, mp_queue.RIVAL, mp_pipe.RIVAL]

__all__ = ["RIVALS", "Line", "ReaderEnd", "Receiver", "Rival", "Sender", "WriterEnd"]
