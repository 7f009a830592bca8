"""The index of blocks, and the aggregator of events."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aioshm.events import (
    AllBlocksCleared,
    BlockIndex,
    BlockRemoved,
    BlockStored,
    EventBatch,
    KVEventAggregator,
    KVEventBatch,
    Lost,
    Received,
    Restarted,
    Shelf,
    Source,
    UnknownEvent,
    follow,
)


def stored(*hashes: int | bytes, medium: str | None = "GPU", group: int | None = None) -> BlockStored:
    return BlockStored(list(hashes), None, [], 1, None, medium, group_idx=group)


def removed(*hashes: int | bytes, left: list[int] | None = None) -> BlockRemoved:
    return BlockRemoved(list(hashes), "GPU", remaining_copy_counts=left)


def holds(index: BlockIndex[Any], block: int | bytes) -> bool:
    return bool(index.holders(block)) and set(index.longest_prefix([block]).values()) == {1}


class TestBlockIndex:
    def test_stored_removed_cleared(self) -> None:
        index: BlockIndex[str] = BlockIndex()
        index.apply("a", EventBatch(0, [stored(1, 2, b"x"), BlockRemoved([2], "GPU")]))
        index.apply("b", EventBatch(0, [stored(1)]))
        assert index.blocks("a") == {Shelf("GPU", None): {1, b"x"}}
        index.apply("b", EventBatch(0, [UnknownEvent("X", ["X"])]))
        assert (len(index), index.unknown_events) == (3, 1)
        index.apply("a", EventBatch(0, [AllBlocksCleared()]))
        assert index.blocks("a") == {}
        assert index.publishers == ["a", "b"]
        assert index.holders(1) == {"b": [Shelf("GPU", None)]}

    def test_media_and_groups_are_kept_apart(self) -> None:
        index: BlockIndex[int] = BlockIndex()
        index.apply(
            0, EventBatch(0, [stored(1, 2), stored(1, medium="CPU"), stored(1, group=3), BlockRemoved([1], "GPU")])
        )
        assert index.blocks(0) == {Shelf("GPU", None): {2}, Shelf("CPU", None): {1}, Shelf("GPU", 3): {1}}
        assert index.longest_prefix([1, 2, 3]) == {0: 2}
        assert index.longest_prefix([1, 2], media=["CPU"]) == {0: 1}
        assert index.longest_prefix([1, 2], group_idx=3) == {0: 1}
        assert index.longest_prefix([1, 2], media=["STORAGE"]) == {0: 0}

    @pytest.mark.parametrize("forget", [False, True])
    def test_losses_and_restarts(self, forget: bool) -> None:
        source = Source("tcp://x:1", b"", 0)
        index: BlockIndex[Source] = BlockIndex(forget_on_loss=forget)
        assert not index.complete(source)
        follow(index, Received(source, 0, KVEventBatch(0, [stored(1)]), b"", False))
        assert index.complete(source)
        follow(index, Lost(source, 1, 2, "gone"))
        assert not index.complete(source)
        assert len(index) == (0 if forget else 1)
        follow(index, Restarted(source, 3))
        assert index.complete(source)
        assert len(index) == 0
        index.remove(source)
        assert index.publishers == []

    def test_removal_with_remaining_counts_sets_the_counts(self) -> None:
        index: BlockIndex[int] = BlockIndex()
        index.apply(0, EventBatch(0, [stored(7, 8), removed(7, 8, 9, left=[2, 0, 1])]))
        assert index.blocks(0) == {Shelf("GPU", None): {7, 9}}
        index.apply(0, EventBatch(0, [removed(7), removed(9)]))
        assert index.blocks(0) == {Shelf("GPU", None): {7}}
        index.apply(0, EventBatch(0, [removed(7, left=[0])]))
        assert index.blocks(0) == {}
        index.apply(0, EventBatch(0, [stored(7, 7, 8), removed(7, 8, left=[0])]))  # counts that do not fit are ignored
        assert index.blocks(0) == {Shelf("GPU", None): {7}}

    def test_block_known_before_a_loss_is_forgotten_at_its_next_removal(self) -> None:
        index: BlockIndex[int] = BlockIndex()
        index.apply(0, EventBatch(0, [stored(7, 7), stored(8)]))
        index.lost(0)  # maybe a removal of both
        assert holds(index, 7)
        index.apply(0, EventBatch(0, [stored(8), removed(7), removed(8), stored(9, 9), removed(9)]))
        assert index.blocks(0) == {Shelf("GPU", None): {9}}

    @given(st.lists(st.tuples(st.sampled_from("src"), st.integers(0, 5), st.sampled_from(["GPU", "CPU"])), max_size=60))
    def test_index_equals_a_count_of_pairs(self, steps: list[tuple[str, int, str]]) -> None:
        index: BlockIndex[int] = BlockIndex()
        model: Counter[tuple[str, int]] = Counter()
        for action, block, medium in steps:
            event: Any
            if action == "s":
                event = stored(block, medium=medium)
                model[medium, block] += 1
            elif action == "r":
                event = BlockRemoved([block], medium)
                model[medium, block] = max(0, model[medium, block] - 1)
            else:
                event = AllBlocksCleared()
                model.clear()
            index.apply(0, EventBatch(0, [event]))
        held = +model
        assert {(shelf.medium, block) for shelf, blocks in index.blocks(0).items() for block in blocks} == held.keys()
        assert len(index) == len(held)
        prefix = next((n for n in range(6) if not {("GPU", n), ("CPU", n)} & held.keys()), 6)
        assert index.longest_prefix(range(6)) == ({0: prefix} if steps else {})


class TestAggregator:
    def test_events_of_all_workers_are_common(self) -> None:
        workers: KVEventAggregator[BlockStored] = KVEventAggregator(2)
        workers.add_events([stored(1), stored(2), stored(2)])
        workers.add_events([stored(1)])
        assert workers.get_common_events() == [stored(1)]
        assert workers.get_all_events() == [stored(1), stored(1), stored(2), stored(2)]
        workers.increment_workers(2)
        assert workers.get_common_events() == []
        workers.decrement_workers()
        assert workers.get_number_of_workers() == 3
        workers.clear_events()
        assert workers.get_all_events() == workers.get_common_events() == []
        workers.reset_workers()
        workers.add_events([stored(1)])
        assert workers.get_common_events() == [stored(1)]
        assert "workers=1" in repr(workers)

    def test_bad_arguments(self) -> None:
        with pytest.raises(ValueError, match="num_workers"):
            KVEventAggregator(0)
        workers: KVEventAggregator[BlockStored] = KVEventAggregator(1)
        for bad, n in ((workers.increment_workers, 0), (workers.decrement_workers, 0), (workers.decrement_workers, 1)):
            with pytest.raises(ValueError, match="count"):
                bad(n)
        with pytest.raises(TypeError, match="tuple"):
            workers.add_events((stored(1),))  # type: ignore[arg-type]
