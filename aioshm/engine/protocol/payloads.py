"""The encoding of requests, outputs and calls: MessagePack, with arrays and tensors beside it, as in vLLM. No I/O.

An array is ``[dtype, shape, memory]``. Small memory is an extension of type 3; other memory is the number of the frame
that has it. Frame 0 is the MessagePack itself. The dtype of a NumPy array is its ``dtype.str`` (``"<f4"``), the dtype
of a tensor torch's name for it (``"bfloat16"``), which distinguishes the two.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, TypeVar, get_type_hints

import msgspec
from msgspec.msgpack import Ext

from aioshm.codec.base import is_loaded, own_copy
from aioshm.codec.msgpack import count_values
from aioshm.errors import CodecError, MessageTooLarge

Frame: TypeAlias = "bytes | memoryview"

INLINE_BYTES = 256
"""Larger arrays have a frame of their own, while there are fewer than `MAX_FRAMES`."""

MAX_FRAMES = 1 << 16
MAX_DIMENSIONS = 64
"""The limit of NumPy arrays."""

MAX_STRANGE_FRAMES = 1 << 12
MAX_STRANGE_OBJECTS = 50_000
"""The limits of payloads from peers without keys: decoding that many objects takes a few milliseconds."""

T = TypeVar("T")

_RAW_VIEW = 3
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
# dtype.str without Python objects and fields: other strings would let a sender choose what np.dtype() does.
_PLAIN_DTYPE = re.compile(r"[<>|=][biufcSUmM]\d{1,9}(\[\w{1,20}\])?")


class PayloadEncoder:
    """Encodes payloads; for one thread."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._pack = msgspec.msgpack.Encoder(enc_hook=self._stand_in).encode
        self._aside: list[Frame] = []

    def encode(self, payload: Any) -> list[Frame]:
        try:
            main = self._pack(payload)
        except Exception as error:
            self._aside = []
            raise CodecError(f"cannot encode {type(payload).__qualname__}: {error}") from error
        frames: list[Frame] = [main]
        if self._aside:
            frames += self._aside
            self._aside = []
        size = len(main) if len(frames) == 1 else sum(map(len, frames))
        if size > self._max_bytes:
            raise MessageTooLarge(f"a message of {size} bytes, more than {self._max_bytes}")
        return frames

    def _stand_in(self, obj: Any) -> Any:
        if is_loaded("numpy"):
            import numpy as np

            if isinstance(obj, np.ndarray) and obj.dtype.kind not in "OV":
                return self._describe(obj.dtype.str, obj, inline=not obj.shape)
            if isinstance(obj, np.generic):
                return obj.item()
        if is_loaded("torch"):
            import torch

            if isinstance(obj, torch.Tensor):
                from aioshm.codec.tensors import array_of

                if not obj.is_cpu and not obj.is_meta:
                    obj = obj.detach().cpu()
                found = array_of(obj)
                if found is not None:
                    return self._describe(*found, inline=False)
        if isinstance(obj, slice):
            return obj.start, obj.stop, obj.step
        raise TypeError(f"objects of type {type(obj).__qualname__} are not supported")

    def _describe(self, dtype: str, array: Any, *, inline: bool) -> tuple[str, tuple[int, ...], Any]:
        import numpy as np

        shape = array.shape
        memory = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        if inline or memory.nbytes < INLINE_BYTES or len(self._aside) == MAX_FRAMES - 1:
            return dtype, shape, Ext(_RAW_VIEW, bytes(memory))
        self._aside.append(memory)
        return dtype, shape, len(self._aside)


class PayloadDecoder:
    """Decodes payloads; for one thread. The caller owns the result, and arrays are writable.

    Arrays are found where the type says ``np.ndarray`` or ``torch.Tensor``. In plain data, also in untyped fields of
    structs, a list is an array if its form and the size of its memory fit.
    """

    def __init__(self, type: Any = None) -> None:  # noqa: A002  # msgspec's name
        self._typed = msgspec.msgpack.Decoder(
            Any if type is None else type, ext_hook=self._arrive, dec_hook=self._rebuild_as
        ).decode
        self._frames: Sequence[Frame] = ()
        self._taken: set[int] = set()
        self._saw_raw = False

    def decode(self, frames: Sequence[Frame], *, more: bool = False) -> Any:
        """Decode a payload; ``more``: one that shares its frames with the payload before."""
        if len(frames) > MAX_FRAMES:
            raise CodecError(f"a message of {len(frames)} frames, more than {MAX_FRAMES}")
        self._frames = frames
        self._saw_raw = False
        if not more:
            self._taken.clear()
        try:
            payload = self._typed(frames[0])
            return self._revived(payload) if self._saw_raw or len(frames) > 1 else payload
        except CodecError:
            raise
        except Exception as error:
            raise CodecError(f"cannot decode a payload: {error}") from error
        finally:
            self._frames = ()

    def _revived(self, payload: Any) -> Any:
        """Return plain data with its arrays rebuilt, in place where possible."""
        kind = type(payload)
        if kind is list:
            if _looks_like_array(payload):
                found = self._array(*payload)
                if found is not None:
                    return found
            for number, item in enumerate(payload):
                payload[number] = self._revived(item)
        elif kind is dict:
            for key, item in payload.items():
                payload[key] = self._revived(item)
        elif kind is tuple:
            return tuple(self._revived(item) for item in payload)
        elif isinstance(payload, msgspec.Struct):  # untyped fields may have arrays
            for name in payload.__struct_fields__:
                value = getattr(payload, name)
                revived = self._revived(value)
                if revived is not value:
                    msgspec.structs.force_setattr(payload, name, revived)
        return payload

    def _arrive(self, code: int, data: memoryview) -> Any:
        if code != _RAW_VIEW:
            raise ValueError(f"extension type {code} is not supported")
        self._saw_raw = True
        return Ext(code, bytes(data))

    def _rebuild_as(self, wanted: Any, payload: Any) -> Any:
        name = getattr(wanted, "__name__", "")
        if wanted is slice:
            return slice(*payload)
        if name not in ("ndarray", "Tensor") or not _looks_like_array(payload):
            raise NotImplementedError(f"{wanted} is not supported")
        found = self._array(*payload)
        if found is None:
            raise ValueError(f"no array: dtype {payload[0]!r} and shape {payload[1]!r} do not fit its memory")
        return found

    def _array(self, dtype: str, shape: list[int], where: Ext | int) -> Any:
        """Return the array; None if the list is no array."""
        if isinstance(where, Ext):
            memory: Any = bytearray(where.data)
        elif 0 < where < len(self._frames):
            if where in self._taken:  # a few bytes must not make the receiver copy a frame many times
                raise CodecError(f"two arrays have the same memory, frame {where}")
            memory = memoryview(self._frames[where])
        else:
            return None
        try:
            make = _numpy_array if _PLAIN_DTYPE.fullmatch(dtype) else _tensor
            found = make(dtype, shape, memory)
            if found is not None and not isinstance(where, Ext):
                self._taken.add(where)
            return found
        except ModuleNotFoundError as error:
            raise CodecError(f"a message with arrays needs {error.name}: pip install 'aioshm[torch]'") from None


_items_of = msgspec.msgpack.Decoder(dict[str, msgspec.Raw] | list[msgspec.Raw]).decode


def readable(frame: Frame) -> Any:
    """Return a map or an array with None for each item that is not readable; None for anything else."""
    found = _read(_items_of, frame)
    if isinstance(found, list):
        return [_read(msgspec.msgpack.decode, each) for each in found]
    return found and {name: _read(msgspec.msgpack.decode, each) for name, each in found.items()}


def _read(decode: Callable[[Any], Any], frame: Frame) -> Any:
    try:
        return decode(frame)
    except (ValueError, TypeError, RecursionError):
        return None


def convert(payload: Any, kind: type[T]) -> T:
    """Return plain data as a type."""
    try:
        return msgspec.convert(payload, kind)
    except ValueError as error:
        raise CodecError(f"no {kind.__name__}: {error}") from None


def convert_arguments(method: Callable[..., Any], args: list[Any]) -> list[Any]:
    """Return the arguments of a call, with plain data converted to the structs of the method's annotations."""
    try:
        hints = get_type_hints(method)
        parameters = inspect.signature(method).parameters.values()
    except (TypeError, ValueError, NameError):
        return args
    wanted = [hints.get(each.name) for each in parameters if each.kind in _POSITIONAL]
    wanted += [None] * (len(args) - len(wanted))
    return [
        msgspec.convert(arg, kind) if isinstance(kind, type) and issubclass(kind, msgspec.Struct) else arg
        for arg, kind in zip(args, wanted, strict=False)
    ]


def check_stranger(frames: Sequence[Frame]) -> None:
    """Raise if a payload has many frames, or its MessagePack many objects, without decoding it."""
    if len(frames) > MAX_STRANGE_FRAMES:
        raise CodecError(f"a message of more than {MAX_STRANGE_FRAMES} frames, from a peer without keys")
    main = frames[0]  # each object takes a byte at least
    if len(main) > MAX_STRANGE_OBJECTS and count_values(main, MAX_STRANGE_OBJECTS) > MAX_STRANGE_OBJECTS:
        raise CodecError(f"a message of more than {MAX_STRANGE_OBJECTS} objects, from a peer without keys")


def _looks_like_array(payload: Any) -> bool:
    if type(payload) is not list or len(payload) != 3:
        return False
    dtype, shape, where = payload
    return (
        type(dtype) is str
        and type(shape) is list
        and len(shape) <= MAX_DIMENSIONS
        and all(type(length) is int and length >= 0 for length in shape)
        and (type(where) is int or type(where) is Ext)
    )


def _numpy_array(name: str, shape: list[int], memory: Any) -> Any:
    import numpy as np

    dtype = np.dtype(name)
    if math.prod(shape) * dtype.itemsize != len(memory):
        return None
    return np.ndarray(shape, dtype, memory if isinstance(memory, bytearray) else own_copy(memory))


def _tensor(name: str, shape: list[int], memory: Any) -> Any:
    from aioshm.codec.tensors import itemsize_of, rebuild_tensor

    itemsize = itemsize_of(name)
    if itemsize is None or math.prod(shape) * itemsize != len(memory):
        return None
    return rebuild_tensor(memory if isinstance(memory, bytearray) else own_copy(memory), name, tuple(shape))
