"""Engines in lockstep or not, that die, hang, and are started again; requests, waves, handshakes, crash loops.

Real: `EngineRestarts` (the supervisor's decisions) with `RestartHistory`, `EngineStartupCoordinator` with both ends of
the handshake, `Waves`, `Lockstep`, `Engines` and `Pending`, `EnvelopeDecoder`. Made up: processes, sockets, and
the shells of client, engine and coordinator around these.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec

from aioshm.engine.client.engines import Engines
from aioshm.engine.client.requests import Inbox, Pending
from aioshm.engine.protocol.addresses import CoreEngine, CoreEngineState, EngineZmqAddresses
from aioshm.engine.protocol.handshake import EngineHandshake
from aioshm.engine.protocol.messages import EngineCoreOutputs, EnvelopeDecoder, SchedulerStats, StartWave
from aioshm.engine.protocol.waves import Lockstep, Waves
from aioshm.engine.startup import restarts
from aioshm.engine.startup.coordinator import EngineStartupCoordinator
from aioshm.engine.startup.processes import CoreEngineProcManager
from aioshm.errors import CodecError, EngineDead
from aioshm.process.restart import RankInfo, Restart
from aioshm.process.watch import ProcessExit
from tools.simulate.world import Process, World

_pack = msgspec.msgpack.encode


class Manager(CoreEngineProcManager):
    """Stands for the table of processes."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.table: dict[int, Engine] = {}
        self.incarnations: dict[int, int] = {}

    @property
    def processes(self) -> list[Any]:  # type: ignore[override]
        return [self.table[rank] for rank in sorted(self.table)]

    def next_incarnation(self, rank: int) -> int:
        return self.incarnations.get(rank, 0) + 1

    def start_engine(self, rank: int) -> Any:
        world = self.cluster.world
        old = self.table.get(rank)
        world.check(old is None or old.exitcode is not None, f"engine {rank} is started while it lives")
        self._check_policy(rank)
        if world.likely(0.03):
            raise OSError("no memory")
        self.incarnations[rank] = self.incarnations.get(rank, 0) + 1
        engine = self.table[rank] = Engine(self.cluster, rank, self.incarnations[rank])
        return engine

    def _check_policy(self, rank: int) -> None:
        world, policy = self.cluster.world, self.cluster.policy
        starts = self.cluster.starts_at.setdefault(rank, [])
        starts.append(world.now)
        if policy.within_s < 60:
            return
        world.check(len(starts) <= policy.max_restarts, f"engine {rank} is started {len(starts)} times")
        hurried = len(starts) > 1 and starts[-1] - starts[-2] < policy.backoff_s
        world.check(not hurried, f"engine {rank} is started twice at once")

    def last_lines(self, name: str, most: int = 5) -> list[str]:
        return ["the last line"][:most]

    def close(self, *_: Any) -> None:
        """Do nothing."""

    def __del__(self) -> None:
        """Do nothing."""


class Watch:
    """Stands for `ProcessWatch`."""

    current: Watch

    def __init__(self, *, manager: Any = None, on_exit: Callable[[], None]) -> None:
        self._exits: list[ProcessExit] = []
        self._on_exit = on_exit
        Watch.current = self

    def add(self, processes: Any, manager: Any = None) -> None:
        for process in processes:
            if process.exitcode is not None and not process.told:
                self.tell(process)

    def tell(self, process: Any) -> None:
        process.told = True
        self._exits.append(ProcessExit(process.name, process.pid, process.exitcode, managed=True))
        self._on_exit()

    def take(self) -> list[ProcessExit]:
        new, self._exits = self._exits, []
        return new

    def close(self) -> None:
        """Do nothing."""


async def _at_once(work: Callable[[], Any]) -> Any:
    await asyncio.sleep(0.001)
    return work()


def stand_in() -> None:
    """Have the supervisor use this table of processes, in this process, for good."""
    patched: Any = restarts
    patched.ProcessWatch = Watch
    patched.in_thread = _at_once


class Engine:
    """The process of an engine."""

    def __init__(self, cluster: Cluster, rank: int, incarnation: int) -> None:
        self.cluster, self.world, self.rank, self.incarnation = cluster, cluster.world, rank, incarnation
        self.name, self.pid = f"EngineCore_DP{rank}", 1000 * incarnation + rank
        self.exitcode: int | None = None
        self.told = False
        self.process = Process(self.world, self.name)
        self.shake = EngineHandshake(rank)
        self.lockstep = Lockstep(rank)
        self.running: dict[str, int] = {}  # tokens to go
        self.is_ready = False
        world = self.world
        world.note(f"engine {rank}, incarnation {incarnation}, is started")
        fate = world.chance.random()
        if fate < cluster.early_deaths:
            self._after(world.between(0, 0.5), lambda: self.exit(1))
        elif fate < 2 * cluster.early_deaths:
            return  # it hangs, and never says anything
        self._after(world.between(0.01, 0.3), lambda: self._say(self.shake.hello()))

    def _after(self, seconds: float, what: Callable[[], object]) -> None:
        self.world.loop.call_later(seconds, self.process.does, what)

    def kill(self) -> None:
        """Kill it."""
        self.exit(-9)

    def exit(self, code: int) -> None:
        """Let it exit."""
        if self.exitcode is not None:
            return
        self.world.note(f"engine {self.rank}, incarnation {self.incarnation}, exits: {code}")
        self.exitcode = code
        self.process.die()
        self.world.loop.call_later(self.world.between(0, 0.1), self._noticed)

    def _noticed(self) -> None:
        self.cluster.engine_died(self)
        if not self.told and self.cluster.watched(self):
            Watch.current.tell(self)

    def _say(self, payload: bytes) -> None:
        self._later(lambda: self.cluster.startup.take(self.shake.identity, [payload], self.name))

    def _later(self, what: Callable[[], object]) -> None:
        self.world.loop.call_later(self.world.between(0.001, 0.02), what)

    def answered(self, payload: bytes) -> None:
        """Take what the front end sends."""
        self.world.check(self.shake.state is CoreEngineState.NEW, f"engine {self.rank} gets a second INIT")
        self.shake.receive([payload])

        def ready() -> None:
            self.is_ready = True
            self._say(self.shake.ready({"num_gpu_blocks": 1}))

        self._after(self.world.between(0.01, 0.3), ready)

    # Requests

    def add(self, request_id: str, wave: int) -> None:
        """Get a request."""
        self.running[request_id] = self.world.chance.randint(1, 4)
        if self.cluster.lockstep:
            start = self.lockstep.add(wave)
            if start is not None:
                self._later(lambda: self.cluster.starts(self, start))
        else:
            self._after(self.world.between(0.001, 0.05), lambda: self.step())

    def told_to_start(self, start: StartWave) -> None:
        """Be sent what the coordinator says of a wave."""
        self._later(lambda: self.process.does(lambda: self.lockstep.start(start)))

    def step(self) -> None:
        """Make a token for each request."""
        outputs = []
        for request_id in list(self.running):
            self.running[request_id] -= 1
            last = not self.running[request_id]
            outputs.append([request_id, [1], None, None, None, "stop" if last else None])
            if last:
                del self.running[request_id]
        if outputs:
            frames = [_pack(EngineCoreOutputs(self.rank, outputs, timestamp=1.0))]
            self.cluster.from_engine(self, frames)
        if self.running and not self.cluster.lockstep:
            self._after(self.world.between(0.001, 0.05), self.step)


class Cluster:
    """The front end, its supervisor and coordinator, and the engines."""

    def __init__(self, world: World) -> None:
        chance = world.chance
        self.world = world
        self.lockstep = chance.random() < 0.4
        count = chance.randint(1, 3)
        self.policy = Restart(
            max_restarts=chance.choice([1, 3, 50]),
            within_s=chance.choice([2.0, 60.0]),
            backoff_s=0.1,
            backoff_max_s=1.0,
        )
        self.early_deaths = chance.choice([0.0, 0.0, 0.1, 0.3])
        self.start_timeout = 2.0
        addresses = EngineZmqAddresses(["tcp://a"], ["tcp://b"])
        self.startup = EngineStartupCoordinator("ipc://none", [CoreEngine(rank) for rank in range(count)], addresses)
        self.handshake = self.startup.handshake
        self.manager = Manager(self)
        self.ranks = list(range(count))
        self.engines = Engines(self.ranks)
        self.pending = Pending(self.engines, EnvelopeDecoder())
        self.down: set[int] = set()
        self.outcomes: dict[str, str] = {}
        self.failure: EngineDead | None = None
        self.streams: dict[str, Any] = {}
        self.waves = Waves(count, lockstep=self.lockstep)
        for rank in self.ranks:
            self.waves.subscribe(rank)
        self.starts_at: dict[int, list[float]] = {}
        router: Any = SimpleNamespace(
            answer=self._answer, protection=SimpleNamespace(void=lambda *_: None), address="ipc://none"
        )
        self.startup._router = router
        self.startup._closed = True  # nothing to close
        self.startup._reads = True
        self.startup._on_ready = self._ready
        self.handshake.allow_restarts()
        self.states: dict[int, str] = {}
        for rank in self.ranks:
            engine = self.manager.table[rank] = Engine.__new__(Engine)
            early, self.early_deaths = self.early_deaths, 0.0
            engine.__init__(self, rank, 0)  # type: ignore[misc]
            self.early_deaths = early

    def watched(self, engine: Engine) -> bool:
        return hasattr(self, "supervisor")

    def _answer(self, reply: list[bytes]) -> None:
        rank = int.from_bytes(reply[0], "little")
        engine = self.manager.table[rank]
        engine._later(lambda: engine.process.does(lambda: engine.answered(reply[1])))

    def _ready(self, rank: int) -> None:
        engine = self.manager.table[rank]
        self.world.check(self.handshake.engines[rank].state is CoreEngineState.READY, f"engine {rank} is not ready")
        self.down.discard(rank)
        self.engines[rank].registration = {}
        if hasattr(self, "supervisor"):
            self.supervisor.ready(rank)
        if engine.exitcode is not None:  # what it said was on its way when it died
            self.engine_died(engine)

    # The supervisor

    def supervise(self) -> None:
        """Let the supervisor begin: all are ready."""
        client: Any = SimpleNamespace(
            void_keys=lambda *_: None, watch=lambda *_: None, give_up=self._give_up, ranks=self.ranks
        )
        startup = SimpleNamespace(
            stay_open=lambda _: None,
            void_keys=self.startup.void_keys,
            handshake=self.handshake,
            retry=self.startup.retry,
        )
        launch: Any = SimpleNamespace(
            engine_manager=self.manager,
            members=client,
            coordinator=None,
            startup=startup,
            watch=lambda _: None,
            watch_progress=lambda *_, **__: None,
        )
        rules = restarts.RestartRules(
            restart=self.policy,
            lockstep=self.lockstep,
            start_timeout=self.start_timeout,
            on_change=self._changed,
        )
        self.supervisor = restarts.EngineRestarts(launch, rules)

    def _changed(self, info: RankInfo) -> None:
        self.states[info.rank] = info.state
        self.world.note(f"engine {info.rank} is {info.state}")

    def _give_up(self, error: EngineDead) -> None:
        self.failure = error
        self.pending.fail(error)

    def engine_died(self, engine: Engine) -> None:
        """Let the client notice it."""
        if self.manager.table.get(engine.rank) is not engine:
            return
        self.down.add(engine.rank)
        self.engines[engine.rank].registration = None
        self.waves.forget(engine.rank, self.world.now)
        self.pending.fail(EngineDead("dead", engine=engine.rank), self.engines[engine.rank])
        if self.lockstep:  # the coordinator starts anew with them
            self.waves = Waves(len(self.ranks), lockstep=True)
            for rank in self.ranks:
                self.waves.subscribe(rank)

    # Requests

    def send(self, request_id: str) -> None:
        """Send a request to an engine."""
        serving = {each.rank for each in self.engines if each.serves}
        self.world.check(not serving & self.down, "a dead engine gets requests")
        if not serving or self.failure is not None:
            return
        chosen = self.engines.choose()
        generation, _ = self.pending.new_generation(chosen, [])
        self.streams[request_id] = self.pending.add(Inbox(request_id), chosen, generation)
        engine, wave = self.manager.table[chosen.rank], self.waves.wave
        engine._later(lambda: engine.process.does(lambda: engine.add(request_id, wave)))

    def from_engine(self, engine: Engine, frames: list[bytes]) -> None:
        """Take outputs, in order, also late ones of a dead engine."""

        def take() -> None:
            try:
                self.pending.take(list(frames), engine.rank)
            except CodecError as error:
                self.world.check(False, f"outputs are refused: {error}")

        if engine.exitcode is None:
            self.world.loop.call_soon(take)

    # Waves

    def starts(self, engine: Engine, wave: int) -> None:
        """Take what an engine says to the coordinator."""
        try:
            start = self.waves.start(engine.rank, wave)
        except ValueError:
            return
        if start is not None:
            self._start_all(start)

    def _start_all(self, start: StartWave) -> None:
        for engine in self.manager.table.values():
            if engine.exitcode is None:
                engine.told_to_start(start)

    def step_together(self) -> None:
        """Let the engines of a wave make a step, as the collective that ties them does."""
        engines = [engine for engine in self.manager.table.values() if engine.exitcode is None and engine.is_ready]
        if len(engines) < len(self.ranks) or not all(engine.lockstep.running for engine in engines):
            return
        for engine in engines:
            engine.step()
        unfinished = any(engine.running for engine in engines)
        for engine in engines:
            complete = engine.lockstep.stepped(unfinished)
            if complete is not None:
                incarnation = self.waves

                def tell(complete: int = complete, waves: Waves = incarnation) -> None:
                    if waves is self.waves:
                        waves.complete(0, complete)

                engine._later(tell)
            stats = SchedulerStats(len(engine.running), 0, engine.lockstep.step, min(engine.lockstep.wave, 1 << 9))
            try:
                self.waves.load(engine.rank, stats, self.world.now)
            except ValueError:
                pass  # of the coordinator before
        if self.waves.due() <= self.world.now:
            counts = self.waves.publish(self.world.now).counts
            self.world.check(counts is not None and len(counts) == len(self.ranks), "counts of other engines")
            self.engines.update(counts or [])


async def run(world: World) -> dict[str, int]:
    """Run a cluster; return what there was."""
    cluster, chance = Cluster(world), world.chance
    await world.until(lambda: cluster.handshake.complete, 10, "all engines are ready")
    cluster.supervise()
    deaths = chance.choice([0.0, 0.01, 0.03])
    end, sent = world.now + 4, 0
    while world.now < end:
        await asyncio.sleep(0.02)
        if world.likely(0.5):
            sent += 1
            cluster.send(f"request {sent}")
        if world.likely(deaths):
            chance.choice(list(cluster.manager.table.values())).kill()
        if cluster.lockstep:
            cluster.step_together()
        _check(cluster)
    cluster.early_deaths = 0.0
    deadline = world.now + 60

    def settled() -> bool:
        if cluster.lockstep:
            cluster.step_together()
        _check(cluster)
        return cluster.failure is not None or (
            not cluster.pending.inboxes
            and all(life.state == "running" for life in cluster.supervisor.lives.values())
            and not cluster.down
        )

    await world.until(settled, deadline - world.now, "all engines run again, and each request has come to an end")
    for request_id, inbox in cluster.streams.items():
        finals = [output for output in inbox.outputs if output[5] is not None]
        if inbox.error is None:
            world.check(len(finals) == 1 and inbox.ended, f"{request_id} is answered {len(finals)} times")
        else:
            world.check(not finals, f"{request_id} is answered, and failed")
            world.check(str(inbox.error), f"{request_id} fails without a word")
        world.check(all(output[0] == request_id for output in inbox.outputs), f"{request_id} gets another's output")
    in_flight = [each.in_flight for each in cluster.engines]
    world.check(not any(in_flight), f"{in_flight} are in flight")
    for rank, life in cluster.supervisor.lives.items():
        if cluster.failure is None:
            known = cluster.handshake.engines[rank].state
            world.check(known is CoreEngineState.READY, f"engine {rank} runs, and is {known}")
            world.check(life.pid == cluster.manager.table[rank].pid, f"engine {rank} is taken for another process")
    restarts = sum(life.history.restarts for life in cluster.supervisor.lives.values())
    await cluster.supervisor.aclose()
    return {"requests": sent, "restarts": restarts, "crash loops": int(cluster.failure is not None)}


def _check(cluster: Cluster) -> None:
    world = cluster.world
    counted = {each.rank: each.in_flight for each in cluster.engines}
    in_flight = dict.fromkeys(cluster.ranks, 0)
    for inbox in cluster.pending.inboxes.values():
        in_flight[inbox.rank] += 1
    world.check(in_flight == counted, f"{counted} are counted, {in_flight} in flight")
    if cluster.failure is not None:
        world.check("crash loop" in str(cluster.failure), f"given up, and not for a crash loop: {cluster.failure}")
        world.check(not cluster.pending.inboxes, "given up, and a request waits")
    for life in cluster.supervisor.lives.values():
        world.check(
            life.history.restarts <= cluster.manager.incarnations.get(life.rank, 0) + 40, "restarts are miscounted"
        )
