"""Engines: started, shaken hands with, watched and stopped; the names are those of the field."""

from aioshm.engine.actors import CoreEngineActorManager
from aioshm.engine.addresses import (
    ConstantList,
    CoreEngine,
    CoreEngineState,
    EngineHandshakeMetadata,
    EngineZmqAddresses,
)
from aioshm.engine.api_servers import APIServerProcessManager
from aioshm.engine.client import EngineClient
from aioshm.engine.completion import wait_for_completion_or_failure
from aioshm.engine.coordinator import DPCoordinator
from aioshm.engine.core import EngineCore
from aioshm.engine.deaths import WatchedManager, WatchedProcess
from aioshm.engine.endpoints import get_engine_client_zmq_addr
from aioshm.engine.handshake import EngineHandshake, FrontEndHandshake
from aioshm.engine.joining import shake_hands
from aioshm.engine.keys import EngineCredentials, EngineKeys
from aioshm.engine.kv import bind_kv_cache, copy_slice
from aioshm.engine.launch import CoreEngineLaunch, launch_core_engines, wait_for_engine_startup
from aioshm.engine.messages import EngineCoreOutputs, EngineCoreRequestType, SchedulerStats, UtilityOutput
from aioshm.engine.parent import die_with_parent
from aioshm.engine.placement import EngineNeeds
from aioshm.engine.processes import CoreEngineProcManager, ProcessManager
from aioshm.engine.progress import EngineReport, StartupProgress, StartupReport, Waiting
from aioshm.engine.serving import run_engine_core
from aioshm.engine.startup import EngineStartupCoordinator
from aioshm.engine.stopping import ashutdown, shutdown
from aioshm.engine.streams import OutputStream
from aioshm.engine.usage import report_usage_stats
from aioshm.engine.workers import WorkerGroup

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
    "EngineZmqAddresses",
    "FrontEndHandshake",
    "OutputStream",
    "ProcessManager",
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
