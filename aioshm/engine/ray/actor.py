"""An engine as a Ray actor: the code on the node, and the state in the launching process."""

from __future__ import annotations

import multiprocessing
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aioshm.engine.ray.cluster import require_ray
from aioshm.engine.security.keys import AnyKeys, as_attributes
from aioshm.errors import EngineStartupError

_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


class EngineCoreActor:
    """Ray's actor: the process on a node that runs one engine."""

    def where(self) -> tuple[str, int]:
        """Return the address of the node, and the process id."""
        return require_ray().util.get_node_ip_address(), os.getpid()

    def run(
        self, target: Callable[..., object], args: Sequence[Any], kwargs: Mapping[str, Any], keys: AnyKeys | None = None
    ) -> int:
        """Run an engine; return the exit code."""
        vars(multiprocessing.current_process()).update(as_attributes(keys))
        try:
            target(*args, **kwargs)
        except SystemExit as error:
            if isinstance(error.code, int):
                return error.code
            if isinstance(error.code, str):
                print(error.code, file=sys.stderr)
            return int(error.code is not None)
        return 0


class EngineActor:
    """The state of an engine's actor in the launching process; a `WatchedProcess`."""

    def __init__(self, rank: int, local: bool, group: Any, runtime_env: Mapping[str, Any] | None) -> None:
        self.rank = rank
        self.name: str = f"EngineCore_{rank}"
        self.local = local
        self.group = group  # the placement group
        self.handle: Any = _create(group, runtime_env)  # Ray's
        self.where_ref: Any = self.handle.where.remote()
        self.host: str = ""  # the address of the node
        self.node_id: str = ""
        self.pid: int = 0
        self.local_rank: int = -1  # the rank on the node; -1: undecided
        self.reason: str = ""  # why it was killed
        self.run_ref: Any = None  # Ray's reference to the result of the run; None before
        self.exitcode: int | None = None  # 1 if the engine raised; None while it runs, and after a kill or a crash
        self._ended = threading.Event()
        self.sentinel: int  # readable when the run is over
        self.sentinel, self._held = os.pipe()
        self._lock = threading.Lock()
        self._error: BaseException | None = None

    def await_process(self, timeout: float) -> bool:
        """Wait until the process runs, and note address and pid; return False after the timeout."""
        ray = require_ray()
        try:
            self.host, self.pid = ray.get(self.where_ref, timeout=max(0.0, timeout))
        except ray.exceptions.GetTimeoutError:
            return False
        except ray.exceptions.RayError as error:
            raise EngineStartupError(f"the actor of {self.name} could not be started: {error}") from error
        return True

    def run(
        self, target: Callable[..., object], args: Sequence[Any], kwargs: Mapping[str, Any], keys: AnyKeys | None
    ) -> None:
        """Run an engine with these keys."""
        self.run_ref = self.handle.run.remote(target, args, kwargs, keys)
        self.run_ref.future().add_done_callback(self._note)  # called by a thread of Ray's

    def kill(self) -> None:
        """Kill the process."""
        require_ray().kill(self.handle)

    @property
    def last_words(self) -> list[str]:
        """Ray's report about the failure."""
        if self._error is None:
            return []
        return _COLOUR.sub("", str(self._error)).splitlines()

    @property
    def ended(self) -> bool:
        """Whether the run is over."""
        return self._ended.is_set()

    def wait(self, deadline: float) -> bool:
        """Block until the run is over; return False after the deadline."""
        return self.run_ref is None or self._ended.wait(max(0.0, deadline - time.monotonic()))

    def release(self) -> None:
        """Close the descriptors; the run counts as over. Idempotent."""
        self._end()
        with self._lock:
            if self.sentinel >= 0:
                os.close(self.sentinel)
                self.sentinel = -1

    def _note(self, outcome: Any) -> None:
        self._error = outcome.exception()
        if self._error is None:
            self.exitcode = outcome.result()
        elif not isinstance(self._error, require_ray().exceptions.RayActorError):
            self.exitcode = 1
        self._end()

    def _end(self) -> None:
        with self._lock:
            if not self.ended:
                self._ended.set()  # first: a watcher of the sentinel may restart the engine immediately
                os.close(self._held)

    def __str__(self) -> str:
        if not self.pid:
            return self.name
        return f"{self.name} (pid {self.pid} on {self.host})"


def _create(group: Any, runtime_env: Mapping[str, Any] | None) -> Any:
    """Return Ray's handle of a new actor, which takes all of the last bundle of a placement group."""
    ray = require_ray()
    last = len(group.bundle_specs) - 1
    resources = dict(group.bundle_specs[last])
    strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(
        placement_group=group, placement_group_bundle_index=last, placement_group_capture_child_tasks=True
    )
    options = {
        "num_cpus": resources.pop("CPU", 0),
        "num_gpus": resources.pop("GPU", 0),
        "memory": resources.pop("memory", None),
        "resources": resources,
        "scheduling_strategy": strategy,
        "runtime_env": runtime_env and dict(runtime_env),
    }
    return ray.remote(EngineCoreActor).options(**options).remote()
