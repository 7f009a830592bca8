from __future__ import annotations

import array
import contextlib
import copyreg
import dataclasses
import decimal
import enum
import gc
import mmap
import pickle
import threading
import weakref
from collections.abc import Callable
from pickle import PickleBuffer
from typing import Any

import pytest
from codec_helpers import Refuses, encode, plain
from hypothesis import given
from hypothesis import strategies as st

from aioshm.codec import Codec, get_codec, pickle5
from aioshm.codec.base import HUGE_PAGE_BYTES, OUT_OF_BAND_BYTES
from aioshm.errors import CodecError

Carry = Callable[[Codec, Any], Any]
PICKLE = get_codec("pickle")
LARGE = 3 * OUT_OF_BAND_BYTES


class Colour(enum.Enum):
    RED = 1


@dataclasses.dataclass
class Request:
    name: str
    payload: Any = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


class Nested:
    """Encodes something of its own while it is being encoded."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __reduce__(self) -> Any:
        try:
            main, buffers = encode(PICKLE, self.inner)
        except CodecError:
            return str, ("refused",)
        return _decode_nested, (main, [bytes(buffer) for buffer in buffers])


def _decode_nested(main: bytes, buffers: list[bytes]) -> Any:
    return PICKLE.decode(memoryview(main), [memoryview(buffer) for buffer in buffers])


class TestRoundTrip:
    @given(plain)
    def test_plain_objects(self, obj: Any) -> None:
        main, buffers = encode(PICKLE, obj)
        assert type(main) is bytes
        assert buffers == ()
        assert PICKLE.decode(memoryview(main), buffers) == obj

    @pytest.mark.parametrize(
        "obj",
        [
            Request("a", Request("b", [1, 2]), {"k": (1, 2.5, None)}),
            Colour.RED,
            decimal.Decimal("1.10"),
            2**5000,
            "\ud800 lone surrogate",
            Request,
            array.array("i", [1, 2, 3]),
            pickle.PicklingError("an error"),
        ],
        ids=repr,
    )
    def test_other_objects(self, carry: Carry, obj: Any) -> None:
        result = carry(PICKLE, obj)
        assert type(result) is type(obj)
        assert result == obj or repr(result) == repr(obj)

    @pytest.mark.parametrize("size", [0, 4095, 65_536, 300_000])
    def test_bytes_stay_bytes(self, carry: Carry, size: int) -> None:
        data = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
        text = "ä" * size
        result = carry(PICKLE, [data, bytearray(data), text, 1, data])
        assert [type(part) for part in result] == [bytes, bytearray, str, int, bytes]
        assert result == [data, data, text, 1, data]
        assert result[0] is result[4]

    def test_copyreg_is_asked_also_when_registered_later(self, carry: Carry, monkeypatch: pytest.MonkeyPatch) -> None:
        import numpy  # noqa: F401  # so that there is a table of our own

        table = copyreg.dispatch_table
        carry(PICKLE, Request("before"))
        monkeypatch.setitem(table, Request, lambda request: (Request, ("registered",)))
        assert carry(PICKLE, Request("after")) == Request("registered")


class TestBuffers:
    @pytest.mark.parametrize("size", [OUT_OF_BAND_BYTES, 1_000_000, HUGE_PAGE_BYTES])
    def test_large_ones_travel_beside_it(self, size: int) -> None:
        source = bytearray(b"x" * size)
        main, buffers = encode(PICKLE, [PickleBuffer(source), "and more"])
        assert len(main) < 100
        [buffer] = buffers
        assert (buffer.format, buffer.ndim, buffer.c_contiguous, buffer.nbytes) == ("B", 1, True, size)
        assert buffer.obj is source  # not a copy

    @pytest.mark.parametrize("size", [10, LARGE, HUGE_PAGE_BYTES])
    @pytest.mark.parametrize("kind", [bytes, bytearray])
    def test_memory_is_writable_where_the_sources_was(
        self, carry: Carry, size: int, kind: Callable[[bytes], Any]
    ) -> None:
        result = carry(PICKLE, PickleBuffer(kind(b"x" * size)))
        with memoryview(result) as view:
            assert view.readonly is (kind is bytes)
            assert view == b"x" * size

    def test_any_contiguous_memory(self, carry: Carry) -> None:
        numbers = array.array("d", range(5000))
        assert carry(PICKLE, PickleBuffer(numbers)) == numbers.tobytes()
        assert carry(PICKLE, PickleBuffer(memoryview(numbers).cast("B").cast("d", (50, 100)))) == numbers.tobytes()

    def test_memory_with_gaps_is_refused(self) -> None:
        with pytest.raises(CodecError, match=r"PickleBuffer.*contiguous"):
            encode(PICKLE, PickleBuffer(memoryview(bytearray(LARGE))[::2]))

    def test_more_than_a_body_takes_stay_in_the_stream(self, monkeypatch: pytest.MonkeyPatch, carry: Carry) -> None:
        monkeypatch.setattr(pickle5, "MAX_BUFFERS", 3)
        sources = [bytearray([number]) * LARGE for number in range(5)]
        assert len(encode(PICKLE, [PickleBuffer(source) for source in sources])[1]) == 3
        assert carry(PICKLE, [PickleBuffer(source) for source in sources]) == sources

    def test_nothing_is_kept_after_the_message(self) -> None:
        class Memory(bytearray):
            pass

        codec = get_codec("pickle")
        memory = Memory(LARGE)
        gone = weakref.ref(memory)
        main, buffers = encode(codec, [PickleBuffer(memory)])
        del memory
        assert gone() is not None  # the buffers keep it alive until they have been copied
        del main, buffers
        assert gone() is None


class TestReentrancy:
    def test_encoding_while_encoding(self, carry: Carry) -> None:
        inner = {"numbers": list(range(100)), "memory": PickleBuffer(bytearray(b"i" * LARGE))}
        outer = ["before", PickleBuffer(bytearray(b"o" * LARGE)), Nested(inner), "before", b"y" * 100_000]
        result = carry(PICKLE, outer)
        assert result[0] is result[3]
        assert result[1] == b"o" * LARGE
        assert result[2] == {"numbers": list(range(100)), "memory": b"i" * LARGE}
        assert result[4] == outer[4]

    def test_failing_while_encoding(self, carry: Carry) -> None:
        assert carry(PICKLE, ["before", Nested(Refuses()), "after"]) == ["before", "refused", "after"]
        assert carry(PICKLE, "next") == "next"


class Holder:
    def __init__(self, held: Any) -> None:
        self.held = held


class Explodes:
    """Raises while it is being decoded, with its buffer in the raising frame."""

    def __init__(self, buffer: Any = None) -> None:
        self.buffer = buffer

    def __reduce__(self) -> Any:
        return _explode, (PickleBuffer(self.buffer) if self.buffer is not None else None,)


def _explode(buffer: Any) -> Any:
    kept = memoryview(buffer) if buffer is not None else None
    raise ZeroDivisionError(f"on purpose: {kept is None}")


class TestEncodeErrors:
    @pytest.mark.parametrize(
        ("obj", "name"),
        [
            (threading.Lock(), "lock"),
            (lambda: None, "function"),
            (Refuses(), "Refuses"),
            ([Refuses()], "list"),
            (Holder(threading.Lock()), "Holder"),
            ((number for number in ()), "generator"),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_names_the_type_and_the_cause(self, obj: Any, name: str) -> None:
        with pytest.raises(CodecError, match=f"^cannot pickle {name}: ") as caught:
            encode(PICKLE, obj)
        assert caught.value.__cause__ is not None

    def test_too_deep(self) -> None:
        deep: list[Any] = []
        for _ in range(100_000):
            deep = [deep]
        with pytest.raises(CodecError, match="list") as caught:
            encode(PICKLE, deep)
        assert isinstance(caught.value.__cause__, RecursionError)
        while deep:  # one by one: freeing them all at once would recurse too
            deep = deep.pop()

    def test_message_after_a_failure_is_complete(self, carry: Carry) -> None:
        codec = get_codec("pickle")
        shared = ["in", "both"]
        for _ in range(3):
            with pytest.raises(CodecError):
                encode(codec, [shared, b"x" * 200_000, PickleBuffer(bytearray(LARGE)), Refuses()])
            main, buffers = encode(codec, [shared, 1])
            assert buffers == ()
            assert codec.decode(memoryview(main), buffers) == [shared, 1]
            assert carry(codec, [PickleBuffer(bytearray(LARGE))]) == [bytes(LARGE)]


class TestDecodeErrors:
    def test_missing_and_extra_buffers(self) -> None:
        main, buffers = encode(PICKLE, [PickleBuffer(bytearray(LARGE)), PickleBuffer(bytearray(LARGE))])
        plain_main, _ = encode(PICKLE, "plain")
        one = memoryview(b"one more")
        for damaged, given_buffers in ((main, ()), (main, buffers[:1]), (main, [*buffers, one]), (plain_main, [one])):
            for decode in (PICKLE.decode, PICKLE.view):
                with pytest.raises(CodecError, match="buffers"):
                    decode(memoryview(damaged), given_buffers)

    @pytest.mark.parametrize(
        "data", [b"", b".", b"\x80\x05", b"\x80\xff.", b"garbage", b"\x8e" + b"\xff" * 8, b"\x96" + b"\xff" * 8 + b"."]
    )
    def test_damaged(self, data: bytes) -> None:
        with pytest.raises(CodecError, match="cannot unpickle a message: "):
            PICKLE.decode(memoryview(data), ())

    @given(plain, st.data())
    def test_truncated(self, obj: Any, data: st.DataObject) -> None:
        main, _ = encode(PICKLE, obj)
        with pytest.raises(CodecError):
            PICKLE.decode(memoryview(main)[: data.draw(st.integers(0, len(main) - 1))], ())

    @given(
        st.binary(max_size=200) | st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), min_size=1), st.data()
    )
    def test_garbage_and_changed_bytes(self, garbage: bytes | list[tuple[int, int]], data: st.DataObject) -> None:
        damaged, _ = encode(
            PICKLE, {"k1": [1, 2.5, None], "k2": (b"v", "w" * 20), "k3": PickleBuffer(bytearray(LARGE))}
        )
        if isinstance(garbage, bytes):
            damaged = garbage
        else:
            for at, value in garbage:
                damaged = damaged[:at] + bytes([value]) + damaged[at + 1 :]
        # PUT and LONG_BINPUT make the unpickler grow a table to any number that they name: gigabytes for a few bytes.
        # Only trusting the sender helps against that, so the test leaves these two out.
        damaged = damaged.replace(b"p", b"").replace(b"r", b"")
        with contextlib.suppress(CodecError):
            PICKLE.decode(memoryview(damaged), [memoryview(bytes(10))] * data.draw(st.integers(0, 2)))


@pytest.mark.parametrize(
    "obj",
    [
        Explodes(),
        Explodes(bytearray(LARGE)),
        Explodes(bytes(LARGE)),
        [PickleBuffer(bytearray(LARGE)), Explodes(bytearray(HUGE_PAGE_BYTES))],
    ],
    ids=["in band", "writable", "read-only", "two"],
)
@pytest.mark.parametrize("kind", ["decode", "view"])
def test_an_error_holds_no_memory(obj: Any, kind: str) -> None:
    main, buffers = encode(PICKLE, obj)
    memories = [mmap.mmap(-1, len(part)) for part in (main, *buffers)]
    memories[0][:] = main
    views = [memoryview(memory) for memory in memories]
    gc.disable()  # nothing here may depend on the collector
    try:
        with pytest.raises(CodecError) as caught:
            getattr(PICKLE, kind)(views[0], views[1:])
        for view, memory in zip(views, memories, strict=True):
            view.release()
            memory.close()  # a BufferError here is an export that the error holds
    finally:
        gc.enable()
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert caught.value.__cause__.__traceback__ is not None
