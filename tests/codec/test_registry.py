from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from aioshm.codec import Encoded, get_codec, loads_of, register_codec, registry, view_of


class Text:
    name = "text"
    code = 16

    def encode(self, obj: Any) -> Encoded:
        return str(obj).encode()

    def decode(self, main: bytes | memoryview, buffers: Any) -> str:
        return bytes(main).decode()


def with_changes(**changes: Any) -> Any:
    return type("Changed", (Text,), changes)


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "_factories", dict(registry._factories))
    monkeypatch.setattr(registry, "_codes", dict(registry._codes))
    return


@pytest.mark.parametrize(("name", "code"), [("pickle", 1), ("raw", 2), ("msgpack", 3)])
def test_known_name_returns_a_new_codec(name: str, code: int) -> None:
    codec = get_codec(name)
    assert (codec.name, codec.code) == (name, code)
    assert codec is not get_codec(name)


def test_registered_codecs_are_known_by_name() -> None:
    register_codec("text", Text)
    register_codec("text", Text)  # again: nothing happens
    codec = get_codec("text")
    assert isinstance(codec, Text)
    assert codec is not get_codec("text")
    assert get_codec(codec) is codec
    with pytest.raises(ValueError, match="calls itself 'text', not 'other'"):
        register_codec("other", Text)


@pytest.mark.parametrize("name", ["other", "", "Pickle"])
def test_unknown_names(name: str) -> None:
    register_codec("text", Text)
    with pytest.raises(ValueError, match=r"known are msgpack, pickle, raw, text;.*register_codec in every process"):
        get_codec(name)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"code": 17}, r"'text' \(code 17\).*'text' \(code 16\)"),
        ({"name": "other"}, r"'other' \(code 16\).*'text' \(code 16\)"),
        ({"name": "pickle", "code": 20}, r"'pickle' \(code 20\).*'pickle' \(code 1\)"),
    ],
)
def test_collisions_name_both(changes: dict[str, Any], text: str) -> None:
    register_codec("text", Text)
    codec = with_changes(**changes)
    with pytest.raises(ValueError, match=text):
        register_codec(codec.name, codec)
    with pytest.raises(ValueError, match=text):
        get_codec(codec())


@pytest.mark.parametrize("code", [0, 1, 15, 256, -1])
def test_reserved_codes_are_refused(code: int) -> None:
    for act in (lambda codec: register_codec("text", codec), lambda codec: get_codec(codec())):
        with pytest.raises(ValueError, match=f"code of codec 'text' is {code}, not 16 to 255"):
            act(with_changes(code=code))


@pytest.mark.parametrize(
    ("codec", "text"),
    [
        (None, "NoneType, which has no name, code, encode, decode"),
        (object(), "no name, code, encode, decode"),
        (Text, "class Text, not an instance"),
        (with_changes(code="16")(), "code of codec 'text' is '16'"),
        (with_changes(code=True)(), "is True, not an int"),
        (with_changes(name=7)(), "is 7, not a text"),
        (with_changes(decode=None)(), "decode of codec Changed cannot be called"),
        (with_changes(view=1)(), "view of codec Changed cannot be called"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_objects_that_are_no_codec_are_refused(codec: Any, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        get_codec(codec)


def test_optional_parts() -> None:
    assert loads_of(Text())(b"abc") == "abc"
    assert view_of(Text())(memoryview(b"abc"), ()) == "abc"
    changed = with_changes(loads=staticmethod(len), view=lambda self, main, buffers: main)()
    assert loads_of(changed)(b"abc") == 3
    assert view_of(changed)(memoryview(b"abc"), ()) == b"abc"
    assert loads_of(get_codec("raw")) is bytes
