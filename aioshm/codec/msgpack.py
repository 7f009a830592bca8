"""MessagePack: plain data and typed structs, with arrays, tensors and large bytes beside the stream instead of in it.

Two extension types stand for what MessagePack has no word for. Each begins with a 32-bit number: which buffer of the
message holds the memory, or `_INLINE` where it follows in the extension itself.

    101  bytes              number
    102  array or tensor    number | bytes of head u16 | head | memory if inline

A head is itself MessagePack, see array_heads.py. All numbers are little-endian. A message that is one array has no
extension, but a marker in front of the head.
"""

from __future__ import annotations

import builtins
import struct
from collections.abc import Callable, Sequence
from contextlib import suppress
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
from aioshm.codec.base import Encoded, T, cannot_decode, check_again
from aioshm.codec.buffers import OUT_OF_BAND_BYTES, flat, own_copy
from aioshm.codec.frames import MAX_BUFFERS
from aioshm.codec.walk import find_refused, substitute
from aioshm.errors import CodecError

_BYTES = 101
_ARRAY = 102
_INDEX = struct.Struct("<I")
_HEAD = struct.Struct("<IH")
_INLINE = 2**32 - 1

_WALKS_ON_SUSPICION = 16
"""So many messages without large bytes after the last one with them are still searched before they are encoded."""

_BUILTIN_TYPES = (bytes, bytearray, memoryview)


class MsgpackCodec(Generic[T]):
    """Carries what msgspec does, NumPy arrays and dense torch tensors. Decoding runs no code of the sender's choice.

    Bytes-like objects arrive as ``bytes``, tuples and sets as lists, unless ``type`` says otherwise. Arrays keep dtype,
    shape and order, but not the metadata of the dtype; tensors keep ``requires_grad``, being a ``Parameter`` and their
    device, but not Python attributes, hooks and ``.grad``. Identity is not kept: what is in a message twice arrives
    as two. Where a typed message has buffers beside it, it cannot have ``msgspec.Raw`` in it. The extension types
    101 and 102 are this codec's own.

    Args:
        type: What messages are decoded as; None for what the queue's ``type`` says, or else for dicts, lists and other
            plain data.
        enc_hook: Turns an object of a type that is not supported into one that is, or raises.
        dec_hook: Called with a type of your own and plain data, where ``type`` names that type.
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
        self._pack = msgspec.msgpack.Encoder(enc_hook=self._stand_in).encode
        self._unpack = msgspec.msgpack.Decoder(ext_hook=self._arrive).decode
        self.loads: Callable[[bytes | memoryview], T] = self._unpack
        if type is not None:
            self.loads = msgspec.msgpack.Decoder(type, ext_hook=self._arrive, dec_hook=dec_hook).decode
        self._leaving: list[memoryview] = []
        self._arriving: list[memoryview | None] = []
        self._show = False
        self._suspicion = 0

    def of_type(self, type: Any) -> Self:  # noqa: A002  # as above
        """Return a codec like this one, hooks included, that decodes messages as ``type``.

        Raises:
            TypeError: It cannot decode this type.
            ValueError: It decodes another one already.
        """
        if self._type is None:
            return builtins.type(self)(type, enc_hook=self._enc_hook, dec_hook=self._dec_hook)
        if self._type != type:
            raise ValueError(f"type is {shown(type)}, and the codec's is {shown(self._type)}: give one of the two")
        return self

    def encode(self, obj: Any) -> Encoded:
        """Encode an object.

        Raises:
            CodecError: A part of it cannot be encoded; the text has its type and the path to it.
        """
        pack = packers.get(type(obj))
        if pack is not None and (message := pack(obj)) is not None:
            return message
        main = b""
        beside: tuple[memoryview, ...] = ()
        try:
            if not self._suspicion:
                main = self._pack(obj)
                beside = self._take_leaving() if self._leaving else ()
                # Large bytes begin with one of these two; a search for them is much quicker than a walk.
                if len(main) < OUT_OF_BAND_BYTES or (b"\xc5" not in main and b"\xc6" not in main):
                    return ((main,), beside) if beside else main
            walked = substitute(obj, self._set_aside)
            if walked is not obj:
                self._suspicion = _WALKS_ON_SUSPICION
            elif self._suspicion:
                self._suspicion -= 1
            if walked is not obj or not main:
                main = self._pack(walked)
                beside = self._take_leaving()
        except Exception as error:
            raise self._refusal(obj, error) from error
        except BaseException:
            self._leaving.clear()
            raise
        return ((main,), beside) if beside else main

    def decode(self, main: bytes | memoryview, buffers: Sequence[memoryview]) -> T:
        """Decode a message.

        Raises:
            CodecError: This is damaged, or not of the type that this codec decodes.
        """
        try:
            return self._decoded(main, buffers)
        except Exception as error:
            check_again(error, self._decoded, main, buffers)
            del main, buffers  # the error shall not keep them alive, nor the memory that they show
            raise cannot_decode(error, self.name) from error

    def view(self, main: memoryview, buffers: Sequence[memoryview]) -> Any:
        """Decode a message whose large parts stay where they are.

        Arrays of `OUT_OF_BAND_BYTES` and more are read-only, ``bytes`` of that size arrive as a read-only
        ``memoryview``, unless ``type`` asks for ``bytes``. A tensor cannot be read-only: what is written to it is
        written to the memory. Smaller ones are copies.

        Raises:
            CodecError: This is damaged, or not of the type that this codec decodes.
        """
        try:
            return self._seen(main, buffers)
        except Exception as error:
            check_again(error, self._seen, main, buffers)
            del main, buffers
            raise cannot_decode(error, self.name) from error

    def _decoded(self, main: bytes | memoryview, buffers: Sequence[memoryview]) -> T:
        own = bytes(main)  # what msgspec returns may point into it
        return self._decode_all(own, buffers, show=False) if buffers else self.loads(own)

    def _seen(self, main: memoryview, buffers: Sequence[memoryview]) -> Any:
        return self._decode_all(main, buffers, show=True) if buffers else self.loads(main.toreadonly())

    def _decode_all(self, main: bytes | memoryview, buffers: Sequence[memoryview], *, show: bool) -> Any:
        if is_array(main):
            array = unpack_message(main, buffers, show=show)
            return array if self._type is None else self._converted(array)
        before = self._arriving, self._show
        arriving: list[memoryview | None] = list(buffers)
        self._arriving, self._show = arriving, show
        try:
            obj = self._unpack(main)
            if any(buffer is not None for buffer in arriving):
                raise ValueError("it has more buffers than it uses")
        finally:
            self._arriving, self._show = before
            arriving.clear()
        if self._type is None:
            return obj
        # Not at once: where a type says bytes, msgspec refuses an extension without calling the hook.
        return self._converted(obj)

    def _converted(self, obj: Any) -> Any:
        return msgspec.convert(obj, self._type, builtin_types=_BUILTIN_TYPES, dec_hook=self._dec_hook)

    def _arrive(self, code: int, data: memoryview) -> Any:
        """Decode an extension: an array, a tensor or large bytes."""
        if code == _BYTES:
            (index,) = _INDEX.unpack(data)
            buffer = self._take_arriving(index)
            return buffer.toreadonly() if self._show else bytes(buffer)
        if code != _ARRAY:
            return Ext(code, bytes(data))
        index, head_bytes = _HEAD.unpack_from(data)
        start = _HEAD.size + head_bytes
        memory: Any
        if index == _INLINE:
            memory = bytearray(data[start:])
        else:
            memory = self._take_arriving(index)
            memory = memory.toreadonly() if self._show else own_copy(memory)
        return rebuild(decode_head(data[_HEAD.size : start]), memory)

    def _take_arriving(self, index: int) -> memoryview:
        if index >= len(self._arriving):
            raise ValueError(f"it asks for buffer {index} of {len(self._arriving)}")
        buffer = self._arriving[index]
        if buffer is None:
            raise ValueError(f"it uses buffer {index} twice")
        self._arriving[index] = None
        return buffer

    def _stand_in(self, obj: Any) -> Any:
        """Replace an object that msgspec does not know by an extension."""
        kind = type(obj)
        if kind not in describers and kind not in numbers:
            load_libraries()
        describe = describers.get(kind)
        if describe is None:
            return obj.item() if kind in numbers else self._ask_the_user(obj)
        described, memory = describe(obj)
        head = encode_head(described)
        if memory.nbytes >= OUT_OF_BAND_BYTES and len(self._leaving) < MAX_BUFFERS:
            self._leaving.append(memory)
            return Ext(_ARRAY, _HEAD.pack(len(self._leaving) - 1, len(head)) + head)
        return Ext(_ARRAY, b"".join((_HEAD.pack(_INLINE, len(head)), head, memory)))

    def _ask_the_user(self, obj: Any) -> Any:
        if self._enc_hook is None:
            raise TypeError("its type is not supported")
        before, self._leaving = self._leaving, []  # the hook may encode something with this codec
        try:
            return self._enc_hook(obj)
        finally:
            self._leaving = before

    def _set_aside(self, obj: Any) -> Any:
        """Set large bytes aside as an out-of-band buffer."""
        if len(self._leaving) == MAX_BUFFERS:
            return obj
        self._leaving.append(flat(obj))
        return Ext(_BYTES, _INDEX.pack(len(self._leaving) - 1))

    def _take_leaving(self) -> tuple[memoryview, ...]:
        taken = tuple(self._leaving)
        self._leaving.clear()
        return taken

    def _refusal(self, obj: Any, error: Exception) -> CodecError:
        """Return the error that names the part of an object that cannot be encoded."""
        self._leaving.clear()
        try:
            check_again(error, self._pack, obj)
        finally:
            self._leaving.clear()
        found = None
        with suppress(Exception):  # whatever a property or a hook raises now, the first error is the one to tell
            found = find_refused(obj, self._pack)
        self._leaving.clear()
        path, part, why = found or ("$", obj, str(error))
        return CodecError(f"cannot encode {type(part).__qualname__} at {path}: {why}")
