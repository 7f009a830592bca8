"""What may be sent over connections that strangers can write to."""

from __future__ import annotations

from aioshm.codec import Codec
from aioshm.codec.pickle5 import PickleCodec
from aioshm.config import Options
from aioshm.errors import UnsafePayload


def check_safety(codec: Codec, encrypted: bool, options: Options) -> None:
    """Refuse to pickle over connections that strangers can write to.

    Raises:
        UnsafePayload: That is what would happen.
    """
    if isinstance(codec, PickleCodec) and not encrypted and not options.allow_insecure_pickle:
        raise UnsafePayload(
            "options.secure is False, so any process that reaches the port could run code by what they send: "
            "use codec='msgpack' or 'raw', or options.allow_insecure_pickle=True where nobody else does"
        )
