"""Engines: their startup, handshake, client, supervision and end; the names are vLLM's.

Names are imported at their first use: an engine's process needs neither client nor supervisor.
"""

from typing import TYPE_CHECKING

from aioshm.deferred import import_when_used as _import_when_used

if TYPE_CHECKING:  # "as" marks exported names
    from aioshm.engine.client.client import ClientOptions as ClientOptions
    from aioshm.engine.client.client import EngineClient as EngineClient
    from aioshm.engine.client.requests import OutputStream as OutputStream
    from aioshm.engine.core.core import EngineCore as EngineCore
    from aioshm.engine.core.process import HandshakeOptions as HandshakeOptions
    from aioshm.engine.core.process import run_engine_core as run_engine_core
    from aioshm.engine.core.process import shake_hands as shake_hands
    from aioshm.engine.dp.coordinator import DPCoordinator as DPCoordinator
    from aioshm.engine.endpoints import get_engine_client_zmq_addr as get_engine_client_zmq_addr
    from aioshm.engine.kv import bind_kv_cache as bind_kv_cache
    from aioshm.engine.kv import copy_slice as copy_slice
    from aioshm.engine.protocol.addresses import ConstantList as ConstantList
    from aioshm.engine.protocol.addresses import CoreEngine as CoreEngine
    from aioshm.engine.protocol.addresses import CoreEngineState as CoreEngineState
    from aioshm.engine.protocol.addresses import EngineHandshakeMetadata as EngineHandshakeMetadata
    from aioshm.engine.protocol.addresses import EngineReport as EngineReport
    from aioshm.engine.protocol.addresses import EngineZmqAddresses as EngineZmqAddresses
    from aioshm.engine.protocol.addresses import StartupProgress as StartupProgress
    from aioshm.engine.protocol.addresses import StartupReport as StartupReport
    from aioshm.engine.protocol.addresses import Waiting as Waiting
    from aioshm.engine.protocol.handshake import EngineHandshake as EngineHandshake
    from aioshm.engine.protocol.handshake import FrontEndHandshake as FrontEndHandshake
    from aioshm.engine.protocol.messages import EngineCoreOutputs as EngineCoreOutputs
    from aioshm.engine.protocol.messages import EngineCoreRequestType as EngineCoreRequestType
    from aioshm.engine.protocol.messages import SchedulerStats as SchedulerStats
    from aioshm.engine.protocol.messages import UtilityOutput as UtilityOutput
    from aioshm.engine.ray.manager import CoreEngineActorManager as CoreEngineActorManager
    from aioshm.engine.ray.placement import EngineNeeds as EngineNeeds
    from aioshm.engine.security.keys import EngineCredentials as EngineCredentials
    from aioshm.engine.security.keys import EngineKeys as EngineKeys
    from aioshm.engine.startup.api_servers import APIServerProcessManager as APIServerProcessManager
    from aioshm.engine.startup.api_servers import wait_for_completion_or_failure as wait_for_completion_or_failure
    from aioshm.engine.startup.coordinator import EngineStartupCoordinator as EngineStartupCoordinator
    from aioshm.engine.startup.coordinator import wait_for_engine_startup as wait_for_engine_startup
    from aioshm.engine.startup.launch import CoreEngineLaunch as CoreEngineLaunch
    from aioshm.engine.startup.launch import launch_core_engines as launch_core_engines
    from aioshm.engine.startup.options import EngineLayout as EngineLayout
    from aioshm.engine.startup.options import StartupOptions as StartupOptions
    from aioshm.engine.startup.processes import CoreEngineProcManager as CoreEngineProcManager
    from aioshm.engine.startup.supervisor import EngineSupervisor as EngineSupervisor
    from aioshm.engine.usage import report_usage_stats as report_usage_stats
    from aioshm.engine.workers.group import WorkerGroup as WorkerGroup
    from aioshm.process.manager import ProcessManager as ProcessManager
    from aioshm.process.orphans import adopt_orphans as adopt_orphans
    from aioshm.process.parent import die_with_parent as die_with_parent
    from aioshm.process.placement import Placement as Placement
    from aioshm.process.restart import RankInfo as RankInfo
    from aioshm.process.restart import Restart as Restart
    from aioshm.process.stopping import ashutdown as ashutdown
    from aioshm.process.stopping import shutdown as shutdown
    from aioshm.process.watch import WatchedManager as WatchedManager
    from aioshm.process.watch import WatchedProcess as WatchedProcess

if not TYPE_CHECKING:  # with __getattr__ a type checker would accept any name
    _homes = {
        "aioshm.engine.client.client": ("ClientOptions", "EngineClient"),
        "aioshm.engine.client.requests": ("OutputStream",),
        "aioshm.engine.core.core": ("EngineCore",),
        "aioshm.engine.core.process": ("HandshakeOptions", "run_engine_core", "shake_hands"),
        "aioshm.engine.dp.coordinator": ("DPCoordinator",),
        "aioshm.engine.kv": ("bind_kv_cache", "copy_slice"),
        "aioshm.engine.protocol.addresses": (
            "ConstantList",
            "CoreEngine",
            "CoreEngineState",
            "EngineHandshakeMetadata",
            "EngineReport",
            "EngineZmqAddresses",
            "StartupProgress",
            "StartupReport",
            "Waiting",
        ),
        "aioshm.engine.protocol.handshake": ("EngineHandshake", "FrontEndHandshake"),
        "aioshm.engine.protocol.messages": (
            "EngineCoreOutputs",
            "EngineCoreRequestType",
            "SchedulerStats",
            "UtilityOutput",
        ),
        "aioshm.engine.ray.manager": ("CoreEngineActorManager",),
        "aioshm.engine.ray.placement": ("EngineNeeds",),
        "aioshm.engine.security.keys": ("EngineCredentials", "EngineKeys"),
        "aioshm.engine.startup.api_servers": ("APIServerProcessManager", "wait_for_completion_or_failure"),
        "aioshm.engine.startup.coordinator": (
            "EngineStartupCoordinator",
            "wait_for_engine_startup",
        ),
        "aioshm.engine.endpoints": ("get_engine_client_zmq_addr",),
        "aioshm.engine.startup.options": ("EngineLayout", "StartupOptions"),
        "aioshm.engine.startup.launch": ("CoreEngineLaunch", "launch_core_engines"),
        "aioshm.engine.startup.processes": ("CoreEngineProcManager",),
        "aioshm.engine.startup.supervisor": ("EngineSupervisor",),
        "aioshm.engine.usage": ("report_usage_stats",),
        "aioshm.engine.workers.group": ("WorkerGroup",),
        "aioshm.process.manager": ("ProcessManager",),
        "aioshm.process.orphans": ("adopt_orphans",),
        "aioshm.process.parent": ("die_with_parent",),
        "aioshm.process.placement": ("Placement",),
        "aioshm.process.restart": ("RankInfo", "Restart"),
        "aioshm.process.stopping": ("ashutdown", "shutdown"),
        "aioshm.process.watch": ("WatchedManager", "WatchedProcess"),
    }
    __all__ = sorted(name for names in _homes.values() for name in names)
    __getattr__, __dir__ = _import_when_used(__name__, _homes)
