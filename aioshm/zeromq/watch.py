"""The name that `Pump` had: for the queue's sockets."""

from aioshm.zeromq.pump import Pump as Watch

__all__ = ["Watch"]
