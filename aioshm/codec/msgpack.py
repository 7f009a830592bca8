"""MessagePack: plain data and typed structs, with large arrays and tensors in out-of-band buffers.

Extension 102 stands for an array: ``number u32 | bytes of head u16 | head | elements if inline``,
little-endian. The number is the index of the buffer with the elements, or `_INLINE`. A message
that is one array has a marker before the head.
"""

from __future__ import annotations

import builtins
import struct
from collections.abc import Callable, Sequence
from typing import Any, Generic, Self, overload

import msgspec
from msgspec.msgpack import Ext

from aioshm.arguments import check_plain, shown
from aioshm.codec.array_heads import (
    decode_head,
    describers,
    encode_head,
    is_array,
    load_libraries,
    numbers,
    packers,
    rebuild,
    unpack_message,
)
from aioshm.codec.base import OUT_OF_BAND_BYTES, Encoded, T, cannot_decode, check_again, own_copy
from aioshm.codec.frames import MAX_BUFFERS
from aioshm.errors import CODE_ERRORS, CodecError, text_of

_ARRAY = 102
_HEAD = struct.Struct("<IH")
_INLINE = 2**32 - 1


class MsgpackCodec(Generic[T]):
    """Carries plain data that msgspec supports, NumPy arrays and dense torch tensors. Decoding runs no sender's code.

    Bytes-like objects arrive as ``bytes``, tuples and sets as lists, unless ``type`` says otherwise. Arrays keep dtype,
    shape and order, but not the metadata of the dtype. Tensors keep ``requires_grad``, being a ``Parameter`` and their
    device, but not Python attributes, hooks and ``.grad``. Identity is not kept: an object that a message contains
    twice arrives as two objects. The extension type 102 is this codec's own.

    Args:
        type: The type of decoded messages. None: the queue's ``type``, or else dicts, lists and other
            plain data.
        enc_hook: Converts an object of an unsupported type into a supported one, or raises.
        dec_hook: Called with a type of your own and plain data, if ``type`` contains that type.
    """

    name = "msgpack"
    code = 3

    @overload
    def __init__(
        self,
        type: type[T] | None = None,  # the name that msgspec gives it
        *,
        enc_hook: Callable[[Any], Any] | None = None,
        dec_hook: Callable[[type[Any], Any], Any] | None = None,
    ) -> None: ...

    @overload
    def __init__(  # a union, which is no `type` to type checkers
        self: MsgpackCodec[Any],
        type: Any,
        *,
        enc_hook: Callable[[Any], Any] | None = None,
        dec_hook: Callable[[type[Any], Any], Any] | None = None,
    ) -> None: ...

    def __init__(
        self,
        type: Any = None,  # noqa: A002
        *,
        enc_hook: Callable[[Any], Any] | None = None,
        dec_hook: Callable[[type[Any], Any], Any] | None = None,
    ) -> None:
        self._type = type
        self._enc_hook = check_plain("enc_hook", enc_hook)
        self._dec_hook = check_plain("dec_hook", dec_hook)
        self._pack = msgspec.msgpack.Encoder(enc_hook=self._encode_other).encode
        wanted: Any = type if type is not None else Any
        decoder: msgspec.msgpack.Decoder[T]
        decoder = msgspec.msgpack.Decoder(wanted, ext_hook=self._decode_extension, dec_hook=dec_hook)
        self.loads: Callable[[bytes | memoryview], T] = decoder.decode
        self._outgoing: list[memoryview] = []
        self._incoming: list[memoryview | None] = []
        self._in_place = False

    def of_type(self, type: Any) -> Self:  # noqa: A002  # as above
        """Return a codec with the same hooks that decodes messages as ``type``.

        Raises:
            TypeError: This codec cannot decode the type.
            ValueError: This codec already decodes another type.
        """
        if self._type is None:
            return builtins.type(self)(type, enc_hook=self._enc_hook, dec_hook=self._dec_hook)
        if self._type != type:
            raise ValueError(f"type is {shown(type)}, and the codec's is {shown(self._type)}: give one of the two")
        return self

    def encode(self, obj: Any) -> Encoded:
        """Encode an object.

        Raises:
            CodecError: A part of the object cannot be encoded; the text names its type.
        """
        pack = packers.get(type(obj))
        if pack is not None and (message := pack(obj)) is not None:
            return message
        try:
            main = self._pack(obj)
        except BaseException as error:
            try:
                if not isinstance(error, CODE_ERRORS):
                    raise
                self._outgoing.clear()
                check_again(error, self._pack, obj)
                raise CodecError(f"cannot encode {type(obj).__qualname__}: {text_of(error) or repr(error)}") from error
            finally:
                self._outgoing.clear()
        if not self._outgoing:
            return main
        buffers = tuple(self._outgoing)
        self._outgoing.clear()
        return (main,), buffers

    def decode(self, main: bytes | memoryview, buffers: Sequence[memoryview]) -> T:
        """Decode a message.

        Raises:
            CodecError: The message is damaged, or not of this codec's type.
        """
        try:
            return self._decoded(bytes(main), buffers, False)  # msgspec may return parts of its input
        except CODE_ERRORS as error:
            check_again(error, self._decoded, bytes(main), buffers, False)
            del main, buffers  # the error must not keep them alive, nor their memory
            raise cannot_decode(error, self.name) from error

    def view(self, main: memoryview, buffers: Sequence[memoryview]) -> Any:
        """Decode a message in place: large arrays and tensors are views of the buffers.

        Arrays of `OUT_OF_BAND_BYTES` and more are read-only. A tensor cannot be read-only: writing to it
        writes to the buffer. Smaller arrays and tensors, and ``bytes`` of any size, are copies. Where ``type`` says
        ``memoryview``, the bytes are a view of ``main``.

        Raises:
            CodecError: The message is damaged, or not of this codec's type.
        """
        try:
            return self._decoded(main.toreadonly(), buffers, True)
        except CODE_ERRORS as error:
            check_again(error, self._decoded, main.toreadonly(), buffers, True)
            del main, buffers
            raise cannot_decode(error, self.name) from error

    def _decoded(self, main: bytes | memoryview, buffers: Sequence[memoryview], in_place: bool) -> T:
        if not buffers:
            return self.loads(main)
        if is_array(main):
            if self._type is None:
                return unpack_message(main, buffers, in_place=in_place)  # type: ignore[no-any-return]
            # Not `msgspec.convert`: it takes the fields of a struct from the attributes of an array.
            main = msgspec.msgpack.encode(Ext(_ARRAY, _HEAD.pack(0, len(main) - 1) + main[1:]))
        outer_incoming = self._incoming  # a hook may decode with this codec
        outer_in_place = self._in_place
        incoming: list[memoryview | None] = list(buffers)
        self._incoming = incoming
        self._in_place = in_place
        try:
            obj = self.loads(main)
            if any(buffer is not None for buffer in incoming):
                raise ValueError("it has more buffers than it uses")
        finally:
            self._incoming = outer_incoming
            self._in_place = outer_in_place
            incoming.clear()
        return obj

    def _decode_extension(self, code: int, data: memoryview) -> Any:
        if code != _ARRAY:
            return Ext(code, bytes(data))
        index, head_bytes = _HEAD.unpack_from(data)
        start = _HEAD.size + head_bytes
        memory: Any
        if index == _INLINE:
            memory = bytearray(data[start:])
        elif self._in_place:
            memory = self._take_incoming(index).toreadonly()
        else:
            memory = own_copy(self._take_incoming(index))
        return rebuild(decode_head(data[_HEAD.size : start]), memory)

    def _take_incoming(self, index: int) -> memoryview:
        if index >= len(self._incoming):
            raise ValueError(f"it asks for buffer {index} of {len(self._incoming)}")
        buffer = self._incoming[index]
        if buffer is None:
            raise ValueError(f"it uses buffer {index} twice")
        self._incoming[index] = None
        return buffer

    def _encode_other(self, obj: Any) -> Any:
        """Return a substitute for an object of a type that msgspec does not support."""
        kind = type(obj)
        if kind not in describers and kind not in numbers:
            load_libraries()
        if kind in numbers:
            return obj.item()
        describe = describers.get(kind)
        if describe is None:
            return self._call_hook(obj)
        described, memory = describe(obj)
        head = encode_head(described)
        if memory.nbytes >= OUT_OF_BAND_BYTES and len(self._outgoing) < MAX_BUFFERS:
            self._outgoing.append(memory)
            return Ext(_ARRAY, _HEAD.pack(len(self._outgoing) - 1, len(head)) + head)
        return Ext(_ARRAY, b"".join((_HEAD.pack(_INLINE, len(head)), head, memory)))

    def _call_hook(self, obj: Any) -> Any:
        if self._enc_hook is None:
            raise TypeError(f"objects of type {type(obj).__qualname__} are not supported")
        outer = self._outgoing
        self._outgoing = []  # the hook may encode with this codec
        try:
            return self._enc_hook(obj)
        finally:
            self._outgoing = outer


def count_values(data: bytes | memoryview, most: int) -> int:
    """Count MessagePack values, including nested values, without decoding; stop at ``most`` + 1."""
    at = 0
    count = 0
    end = len(data)
    while at < end and count <= most:
        count += 1
        kind = data[at]
        width = _LENGTH_BYTES.get(kind)
        if width is None:
            at += _BYTES_OF[kind]
        else:
            at += 1 + width + (0xC7 <= kind <= 0xC9) + int.from_bytes(data[at + 1 : at + 1 + width], "big")
    return count


def _sizes() -> list[int]:
    """Return the bytes of each kind of MessagePack value, without the items of arrays and maps."""
    sizes = [1] * 256
    for kind in range(0xA0, 0xC0):  # short strings
        sizes[kind] += kind - 0xA0
    # float, double; unsigned and signed; the smallest extensions; arrays and maps with 2 and 4 bytes of length
    fixed = {0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
    fixed |= {0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17, 0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}
    for kind, more in fixed.items():
        sizes[kind] += more
    return sizes


# bin, ext and str with lengths of 1, 2 and 4 bytes
_LENGTH_BYTES = {first + n: 1 << n for first in (0xC4, 0xC7, 0xD9) for n in range(3)}
_BYTES_OF = _sizes()
