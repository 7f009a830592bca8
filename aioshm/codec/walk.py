"""Walks over objects for MessagePack: set large parts aside, find a refused part; count values that are encoded."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from msgspec.structs import force_setattr

from aioshm.codec.buffers import OUT_OF_BAND_BYTES

_ATOMS = frozenset((int, float, str, bool, type(None)))
_LABELS_SHOWN = 20  # of the path to a part that is deep down


def substitute(obj: Any, stand_in: Callable[[Any], Any]) -> Any:
    """Replace large bytes-like objects by ``stand_in``'s results; copy only their containers."""
    kind = type(obj)
    if kind in _ATOMS:
        return obj
    if kind is bytes or kind is bytearray:
        return stand_in(obj) if len(obj) >= OUT_OF_BAND_BYTES else obj
    if isinstance(obj, dict):
        changed = {}
        for key, value in obj.items():
            if type(value) not in _ATOMS:
                new = substitute(value, stand_in)
                if new is not value:
                    changed[key] = new
        return {**obj, **changed} if changed else obj
    if isinstance(obj, list | tuple | set | frozenset):
        if _ATOMS.issuperset(map(type, obj)):  # several times as quick as the loop
            return obj
        copied = None
        for index, value in enumerate(obj):
            if type(value) not in _ATOMS:
                new = substitute(value, stand_in)
                if new is not value:
                    if copied is None:
                        copied = list(obj)
                    copied[index] = new
        return obj if copied is None else copied
    if kind is memoryview:
        return stand_in(obj) if obj.nbytes >= OUT_OF_BAND_BYTES and obj.c_contiguous else obj
    if isinstance(obj, msgspec.Struct):
        return _with_fields(obj, obj.__struct_fields__, force_setattr, stand_in)
    if dataclasses.is_dataclass(kind):
        return _with_fields(obj, [field.name for field in dataclasses.fields(obj)], object.__setattr__, stand_in)
    return obj


def _with_fields(
    obj: Any, names: Any, set_field: Callable[[Any, str, Any], None], stand_in: Callable[[Any], Any]
) -> Any:
    copied = None
    for name in names:
        value = getattr(obj, name, None)
        if type(value) not in _ATOMS:
            new = substitute(value, stand_in)
            if new is not value:
                if copied is None:
                    copied = copy.copy(obj)
                set_field(copied, name, new)
    return obj if copied is None else copied


def find_refused(obj: Any, encode: Callable[[Any], object]) -> tuple[str, Any, str] | None:
    """Find the first part that cannot be encoded: path from ``$``, part, reason. Not recursive."""
    above = {id(obj)}
    stack: list[tuple[str, Any, Iterator[tuple[str, Any]]]] = [("$", obj, _parts(obj))]
    has_parts = False
    while stack:
        _, part, inside = stack[-1]
        for label, inner in inside:
            if id(inner) in above:
                return _path(stack, label), inner, "it contains itself"
            above.add(id(inner))
            stack.append((label, inner, _parts(inner)))
            has_parts = False
            break
        else:
            # What has parts can only be refused for one of them, or for its depth.
            why = None if has_parts else _refusal(part, encode)
            if why is not None:
                return _path(stack), part, why
            stack.pop()
            above.discard(id(part))
            has_parts = True
    return None


def _path(stack: list[tuple[str, Any, Any]], last: str = "") -> str:
    labels = [label for label, _, _ in stack] + [last]
    if len(labels) > _LABELS_SHOWN:
        labels[_LABELS_SHOWN // 2 : -_LABELS_SHOWN // 2] = [" ... "]
    return "".join(labels)


def _refusal(part: Any, encode: Callable[[Any], object]) -> str | None:
    try:
        encode(part)
    except Exception as error:
        return str(error) or type(error).__name__
    return None


def _parts(obj: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(obj, dict):
        for key, value in obj.items():
            yield f"[key {key!r:.50}]", key
            yield f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{key!r:.50}]", value
    elif isinstance(obj, list | tuple | set | frozenset):
        for index, value in enumerate(obj):
            yield f"[{index}]", value
    elif isinstance(obj, msgspec.Struct):
        for name in obj.__struct_fields__:
            yield f".{name}", getattr(obj, name, None)
    elif dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        for field in dataclasses.fields(obj):
            yield f".{field.name}", getattr(obj, field.name, None)


def count_values(data: bytes | memoryview, most: int) -> int:
    """Count MessagePack values, nested ones too, without decoding; stop at ``most`` + 1."""
    at, count, end = 0, 0, len(data)
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
    """Return how many bytes each kind of MessagePack object takes, without the items of arrays and maps."""
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
