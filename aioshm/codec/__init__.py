"""Codecs: objects to buffers and back, without event loop, sockets and files."""

from aioshm.codec.base import Codec, Encoded, S, T, cannot_decode
from aioshm.codec.msgpack import MsgpackCodec
from aioshm.codec.pickle5 import PickleCodec
from aioshm.codec.registry import RawCodec, get_codec, loads_of, register_codec, typed_codec, view_of

__all__ = [
    "Codec",
    "Encoded",
    "MsgpackCodec",
    "PickleCodec",
    "RawCodec",
    "S",
    "T",
    "cannot_decode",
    "get_codec",
    "loads_of",
    "register_codec",
    "typed_codec",
    "view_of",
]
