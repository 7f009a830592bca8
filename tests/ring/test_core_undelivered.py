"""What was received, but not returned yet: it comes first, and is kept where telling the writer may be interrupted."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
from pairs_of_cores import NewPair


class Undelivered(list[Any]):
    """A list that can be referred to weakly; not one that a core takes."""


class TestNext:
    """One class for every kind of core."""

    def test_without_a_list_it_is_what_receive_returns(self, new_pair: NewPair) -> None:
        pair = new_pair(1, 4)
        assert pair.reader.next is pair.cores.module.NOTHING
        for owes in (False, True):
            pair.writer.put(b"x")
            pair.reader.owes = owes
            assert pair.reader.next == b"x"

    def test_takes_none_while_there_is_one(self, new_pair: NewPair) -> None:
        pair, undelivered = new_pair(1, 4), [b"earlier"]
        pair.reader.bind_undelivered(undelivered)
        pair.writer.put(b"x")
        assert pair.reader.next is pair.cores.module.ELSEWHERE
        assert (undelivered, pair.reader.seq) == ([b"earlier"], 0)
        del undelivered[0]
        assert pair.reader.next == b"x"
        assert pair.reader.next is pair.cores.module.NOTHING
        assert undelivered == []

    def test_where_the_writer_has_to_be_told_the_message_is_put_there(self, new_pair: NewPair) -> None:
        pair, undelivered = new_pair(1, 4), []
        pair.reader.bind_undelivered(undelivered)
        pair.reader.quiet = pair.reader.owes = True
        assert pair.reader.next is pair.cores.module.NOTHING
        pair.writer.put_many([b"x", b"y"], 0)
        for _ in range(2):
            assert pair.reader.next is pair.cores.module.ELSEWHERE
            assert (undelivered, pair.reader.seq, pair.reader.owes) == ([b"x"], 1, True)
        pair.reader.owes = False
        assert undelivered.pop() == b"x"
        assert pair.reader.next == b"y"
        assert undelivered == []

    def test_errors_pass(self, new_pair: NewPair) -> None:
        pair, undelivered = new_pair(1, 4, raw=False), []
        pair.reader.bind_undelivered(undelivered)
        pair.reader.owes = True
        pair.writer.put(b"\xff")
        with pytest.raises(UnicodeDecodeError):
            _ = pair.reader.next
        assert undelivered == []

    @pytest.mark.parametrize("wrong", [None, (), {}, "list", Undelivered()])
    def test_nothing_but_a_list_is_taken(self, new_pair: NewPair, wrong: Any) -> None:
        with pytest.raises(TypeError, match="list"):
            new_pair().reader.bind_undelivered(wrong)

    def test_a_cycle_through_it_is_collected(self, new_pair: NewPair) -> None:
        reader, undelivered = new_pair().reader, []
        undelivered += [reader.bind_undelivered, (marker := Undelivered())]
        reader.bind_undelivered(undelivered)
        alive = weakref.ref(marker)
        reader.bind_undelivered([])
        del undelivered, marker
        gc.collect()
        assert alive() is None
