"""Engines: started, shaken hands with, watched and stopped; the names are vLLM's."""

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
from aioshm.engine.startup.endpoints import get_engine_client_zmq_addr
from aioshm.engine.startup.launch import CoreEngineLaunch, launch_core_engines, wait_for_engine_startup
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
