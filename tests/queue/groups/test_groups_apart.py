"""Queues from process groups whose ranks are processes: torch.distributed's with gloo, and stateless ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from support import HELPERS
from test_stateless_group import free_port

pytestmark = pytest.mark.slow

CHILD = HELPERS / "group_child.py"
COUNT = 1_000


class Crew:
    """Three processes, one for each rank; they stay for all tests of this file, because torch takes long to import."""

    def __init__(self) -> None:
        self._kept = ExitStack()  # nobody else is given its ports
        ports = [str(self._kept.enter_context(free_port())) for _ in range(2)]
        # gloo would listen at whatever the host's name means; for the other one see test_stateless_group.
        environ = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "RES_OPTIONS": "timeout:1"}
        self._children = [
            subprocess.Popen(
                [sys.executable, str(CHILD), "rank", str(rank), "3", *ports],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=environ,
            )
            for rank in range(3)
        ]

    def wait(self) -> None:
        for child in self._children:
            assert child.stdout is not None
            if child.stdout.readline() != "ready\n":
                child.kill()
                pytest.fail(child.communicate()[1])

    def do(self, scenario: str, loop: str, **how: Any) -> None:
        for child in self._children:
            assert child.stdin is not None
            child.stdin.write(json.dumps({"do": scenario, "loop": loop, "how": how}) + "\n")
            child.stdin.flush()

    def answers(self) -> list[dict[str, Any]]:
        return [json.loads(child.stdout.readline()) for child in self._children]  # type: ignore[union-attr]

    def returned(self) -> list[Any]:
        answers = self.answers()
        assert all("returned" in answer for answer in answers), answers
        return [answer["returned"] for answer in answers]

    def end(self) -> list[tuple[int, str]]:
        for child in self._children:
            assert child.stdin is not None
            child.stdin.close()
            child.stdin = None  # or `communicate` would flush it
        return [(child.wait(20), complaints) for child in self._children for _, complaints in [child.communicate()]]

    def kill(self) -> None:
        self._kept.close()
        for child in self._children:
            with child:
                child.kill()


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    crew = Crew()
    try:
        crew.wait()
        yield crew
        assert crew.end() == [(0, "")] * 3, "no traceback, no warning"
    finally:
        crew.kill()


@pytest.mark.parametrize(("group", "loop"), [("gloo", "uvloop"), ("stateless", "asyncio")])
def test_every_array_arrives_at_every_reader(crew: Crew, group: str, loop: str) -> None:
    crew.do("arrays", loop, group=group, writer=2, count=COUNT)
    assert crew.returned() == [COUNT, COUNT, 0]


def test_ranks_are_the_subgroups(crew: Crew) -> None:
    crew.do("ranks", "asyncio")
    outsider, *members = crew.answers()
    assert members == [{"returned": [0]}] * 2
    assert outsider == {"raised": "ValueError", "text": "pg is a process group that this process is no member of"}


@pytest.mark.parametrize(("group", "members"), [("gloo", [0, 1, 2]), ("some", [1, 2])])
def test_vllms_interface_from_all_to_one(crew: Crew, group: str, members: list[int]) -> None:
    crew.do("vllm_to_one", "asyncio", group=group, reader=2, count=20)  # by its rank among all
    received = [[[rank, number] for number in range(20)] for rank in members]
    assert crew.returned() == [[], [], received]


def test_groups_that_cannot_be_used(crew: Crew) -> None:
    only = "this group has only 'cuda:gloo': pass one made with torch.distributed.new_group"
    for group, text in (("deaf", only), ("destroyed", "is not registered")):
        crew.do("same", "asyncio", group=group)
        for answer in crew.answers():
            assert (answer["raised"], text in answer["text"]) == ("ValueError", True)


def test_a_rank_that_does_not_come(crew: Crew) -> None:
    crew.do("missing", "asyncio")
    answers = crew.answers()
    assert answers[1] == {"returned": None}
    for rank in (0, 2):
        # Whoever times out first closes its connections, which the others may see before their own time is up.
        assert answers[rank]["raised"] in ("TimeoutError", "GroupBroken")
        assert answers[rank]["text"].startswith("a collective of the process group ")
    assert "TimeoutError" in [answer.get("raised") for answer in answers]
