"""Engines: started, shaken hands with, watched and stopped; the names are vLLM's.

What stands here is imported when it is first used: an engine's process needs no client, and none of the supervisor.
"""

from typing import TYPE_CHECKING

from aioshm.deferred import import_when_used as _import_when_used

if TYPE_CHECKING:
    from aioshm.engine.client.client import EngineClient
    from aioshm.engine.client.streams import OutputStream
    from aioshm.engine.core.core import EngineCore
    from aioshm.engine.core.joining import shake_hands
    from aioshm.engine.core.serving import run_engine_core
    from aioshm.engine.dp.coordinator import DPCoordinator
    from aioshm.engine.kv import bind_kv_cache, copy_slice
    from aioshm.engine.protocol.addresses import (
        ConstantList,
        CoreEngine,
        CoreEngineState,
        EngineHandshakeMetadata,
        EngineZmqAddresses,
    )
    from aioshm.engine.protocol.handshake import EngineHandshake, FrontEndHandshake
    from aioshm.engine.protocol.messages import EngineCoreOutputs, EngineCoreRequestType, SchedulerStats, UtilityOutput
    from aioshm.engine.protocol.progress import EngineReport, StartupProgress, StartupReport, Waiting
    from aioshm.engine.ray.manager import CoreEngineActorManager
    from aioshm.engine.ray.placement import EngineNeeds
    from aioshm.engine.security.keys import EngineCredentials, EngineKeys
    from aioshm.engine.startup.api_servers import APIServerProcessManager
    from aioshm.engine.startup.completion import wait_for_completion_or_failure
    from aioshm.engine.startup.coordinator import EngineStartupCoordinator
    from aioshm.engine.startup.launch import CoreEngineLaunch, launch_core_engines, wait_for_engine_startup
    from aioshm.engine.startup.layout import get_engine_client_zmq_addr
    from aioshm.engine.startup.processes import CoreEngineProcManager
    from aioshm.engine.startup.supervisor import EngineSupervisor
    from aioshm.engine.usage import report_usage_stats
    from aioshm.engine.workers.group import WorkerGroup
    from aioshm.process.manager import ProcessManager
    from aioshm.process.parent import die_with_parent
    from aioshm.process.restart import RankInfo, Restart
    from aioshm.process.stopping import ashutdown, shutdown
    from aioshm.process.watch import WatchedManager, WatchedProcess

__all__ = [
    "APIServerProcessManager",
    "ConstantList",
    "CoreEngine",
    "CoreEngineActorManager",
    "CoreEngineLaunch",
    "CoreEngineProcManager",
    "CoreEngineState",
    "DPCoordinator",
    "EngineClient",
    "EngineCore",
    "EngineCoreOutputs",
    "EngineCoreRequestType",
    "EngineCredentials",
    "EngineHandshake",
    "EngineHandshakeMetadata",
    "EngineKeys",
    "EngineNeeds",
    "EngineReport",
    "EngineStartupCoordinator",
    "EngineSupervisor",
    "EngineZmqAddresses",
    "FrontEndHandshake",
    "OutputStream",
    "ProcessManager",
    "RankInfo",
    "Restart",
    "SchedulerStats",
    "StartupProgress",
    "StartupReport",
    "UtilityOutput",
    "Waiting",
    "WatchedManager",
    "WatchedProcess",
    "WorkerGroup",
    "ashutdown",
    "bind_kv_cache",
    "copy_slice",
    "die_with_parent",
    "get_engine_client_zmq_addr",
    "launch_core_engines",
    "report_usage_stats",
    "run_engine_core",
    "shake_hands",
    "shutdown",
    "wait_for_completion_or_failure",
    "wait_for_engine_startup",
]

if not TYPE_CHECKING:  # to which any name would be one of the package's
    __getattr__, __dir__ = _import_when_used(
        __name__,
        {
            "aioshm.engine.client.client": ("EngineClient",),
            "aioshm.engine.client.streams": ("OutputStream",),
            "aioshm.engine.core.core": ("EngineCore",),
            "aioshm.engine.core.joining": ("shake_hands",),
            "aioshm.engine.core.serving": ("run_engine_core",),
            "aioshm.engine.dp.coordinator": ("DPCoordinator",),
            "aioshm.engine.kv": ("bind_kv_cache", "copy_slice"),
            "aioshm.engine.protocol.addresses": (
                "ConstantList",
                "CoreEngine",
                "CoreEngineState",
                "EngineHandshakeMetadata",
                "EngineZmqAddresses",
            ),
            "aioshm.engine.protocol.handshake": ("EngineHandshake", "FrontEndHandshake"),
            "aioshm.engine.protocol.messages": (
                "EngineCoreOutputs",
                "EngineCoreRequestType",
                "SchedulerStats",
                "UtilityOutput",
            ),
            "aioshm.engine.protocol.progress": ("EngineReport", "StartupProgress", "StartupReport", "Waiting"),
            "aioshm.engine.ray.manager": ("CoreEngineActorManager",),
            "aioshm.engine.ray.placement": ("EngineNeeds",),
            "aioshm.engine.security.keys": ("EngineCredentials", "EngineKeys"),
            "aioshm.engine.startup.api_servers": ("APIServerProcessManager",),
            "aioshm.engine.startup.completion": ("wait_for_completion_or_failure",),
            "aioshm.engine.startup.coordinator": ("EngineStartupCoordinator",),
            "aioshm.engine.startup.layout": ("get_engine_client_zmq_addr",),
            "aioshm.engine.startup.launch": ("CoreEngineLaunch", "launch_core_engines", "wait_for_engine_startup"),
            "aioshm.engine.startup.processes": ("CoreEngineProcManager",),
            "aioshm.engine.startup.supervisor": ("EngineSupervisor",),
            "aioshm.engine.usage": ("report_usage_stats",),
            "aioshm.engine.workers.group": ("WorkerGroup",),
            "aioshm.process.manager": ("ProcessManager",),
            "aioshm.process.parent": ("die_with_parent",),
            "aioshm.process.restart": ("RankInfo", "Restart"),
            "aioshm.process.stopping": ("ashutdown", "shutdown"),
            "aioshm.process.watch": ("WatchedManager", "WatchedProcess"),
        },
    )
