"""Options, and the only place where ``AIOSHM_*`` variables are read; docs/reference/environment.md lists them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, cast

import msgspec

from aioshm.arguments import check_bool, check_int, check_seconds, shown
from aioshm.process.limits import shortage

Backing = Literal["memfd", "named"]
Lifeline = Literal["abstract", "directory"]
OverflowWay = Literal["segments", "zmq"]
Wait = Literal["adaptive", "spin", "park"]
OnReaderDeath = Literal["raise", "evict", "hold"]
SlowReader = Literal["block", "evict", "skip"]
SLOW_READER: tuple[SlowReader, ...] = ("block", "evict", "skip")

MAX_SPIN_CPU = 0.10
STALL_WARNING_S = 60.0
PREFAULT_BYTES = 1 << 20
MAX_MESSAGE_BYTES = 1 << 36
LINGER_S = 10.0
REMOTE_TIMEOUT_S = 10.0
MIN_REMOTE_TIMEOUT_S = 0.1
MAX_REMOTE_TIMEOUT_S = 86_400.0
REMOTE_WINDOW = 4096
MAX_REMOTE_WINDOW = 1 << 20
REMOTE_WINDOW_BYTES = 64 << 20
ENGINE_READY_TIMEOUT_S = 600.0

MAX_READERS = 1 << 16
"""Readers of one queue: each has a cache line in the ring's header, and a flag in every slot."""

MAX_BYTES = (1 << 63) - 1
"""The largest size of a file, and in a handle."""


_ON_LINUX = sys.platform == "linux"
DEFAULT_BACKING: Backing = "memfd" if hasattr(os, "memfd_create") else "named"
DEFAULT_LIFELINE: Lifeline = "abstract" if _ON_LINUX else "directory"


def default_runtime_dir() -> str:
    """Return ``$AIOSHM_RUNTIME_DIR``, ``$XDG_RUNTIME_DIR/aioshm``, or a per-user directory under the temporary one."""
    if own := os.environ.get("AIOSHM_RUNTIME_DIR"):
        return own
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        return str(Path(runtime) / "aioshm")
    try:
        import tempfile  # takes 6 ms, and only socket files and names need it

        temporary = tempfile.gettempdir()
    except OSError as error:  # no writable directory, or no descriptor for the import
        raise shortage("looking for the directory of temporary files") or error from None
    return str(Path(temporary) / f"aioshm-{os.getuid()}")


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a queue. The handle carries the writer's options to its readers.

    Attributes:
        backing: ``"memfd"``: memory without a name, which leaves nothing behind, and sealed against truncation.
            ``"named"``: a POSIX segment; if a process of the same user truncates the segment, all ends get SIGBUS.
        prefault_bytes: Bytes of the ring that both ends touch before use, spread over the slots. A reader that joins
            later touches none.
        lifeline: ``"abstract"``: a Linux abstract Unix socket, which ends with its process. ``"directory"``: a
            socket file in ``runtime_dir``, for hosts that share a directory but not a network namespace, and for macOS.
        runtime_dir: The directory of names and socket files, with mode 0700; refused if it belongs to another user.
            Default: ``AIOSHM_RUNTIME_DIR``, so that writers and readers agree.
        overflow: Carries messages that do not fit a chunk to local readers. ``"segments"``: shared memory; without
            memory for a segment, the call raises `SharedMemoryError`. ``"zmq"``: sockets with a file in
            ``runtime_dir``, several times slower.
        wait: ``"adaptive"`` spins while that is cheaper than sleeping, ``"spin"`` never sleeps, ``"park"`` always.
        max_spin_cpu: Share of a core (0 to 1) that an end may spend on spinning for messages with a steady period;
            spins for streams of messages do not count.
        stall_warning_s: Seconds without progress before a report names the stalled end, and between reports.
        on_reader_death: ``"raise"``: every ``enqueue`` raises `PeerDied` until the reader is replaced or dismissed.
            ``"evict"``: the queue continues without the reader, and the rank is vacant. ``"hold"``: rank and unread
            messages are kept for a replacement; the writer waits when the ring, or the window, is full. A remote
            replacement may receive messages again that the dead reader had finished with.
        linger_s: Seconds that closing waits for a replacement of a held reader; then a log line says what is lost.
        max_readers: Readers in all, including readers that come and go: ranks from ``n_reader`` on, which
            ``wait_until_ready()`` does not wait for. They are local; with remote readers, or ``connect_ip``, the first
            reader of either kind gets the rank. None: ``n_reader``.
        slow_reader: If a reader is a whole ring, or window, behind when the writer needs the room: ``"block"``: the
            writer waits. ``"evict"``: the reader is evicted (`ReaderEvicted`). ``"skip"``: the reader loses its oldest
            messages (`MessagesLost`). ``create_from_handle(slow_reader=)`` is for one reader.
        max_message_bytes: Larger encoded messages raise `MessageTooLarge`.
        trace_context: Whether each message carries the context of the OpenTelemetry span that is current where it is
            sent; see ``last_trace_context``. The writer needs ``aioshm[opentelemetry]``, and about 2 us per message.
        remote_timeout: Seconds of silence after which the peer of a network connection counts as dead.
        remote_window: Messages in flight to remote readers, or waiting there, before `enqueue` waits.
        remote_window_bytes: The same in bytes; a larger message goes alone.
        remote_history: Number of the latest messages kept for remote readers that ask for them (``history=``); within
            ``remote_window`` and ``remote_window_bytes``.
        secure: Whether connections are encrypted, and only holders of the handle admitted. Without, pickle is refused.
        allow_insecure_pickle: Unpickle from connections that are not encrypted: strangers can run code here.
    """

    # Segment
    backing: Backing = DEFAULT_BACKING
    prefault_bytes: int = PREFAULT_BYTES
    # Lifeline
    lifeline: Lifeline = DEFAULT_LIFELINE
    runtime_dir: str = msgspec.field(default_factory=default_runtime_dir)
    # What does not fit a chunk
    overflow: OverflowWay = "segments"
    # Waiting
    wait: Wait = "adaptive"
    max_spin_cpu: float = MAX_SPIN_CPU
    stall_warning_s: float = STALL_WARNING_S
    # Failure
    on_reader_death: OnReaderDeath = "raise"
    linger_s: float = LINGER_S
    max_readers: int | None = None
    slow_reader: SlowReader = "block"
    # Messages
    max_message_bytes: int = MAX_MESSAGE_BYTES
    trace_context: bool = False
    # Remote readers
    remote_timeout: float = REMOTE_TIMEOUT_S
    remote_window: int = REMOTE_WINDOW
    remote_window_bytes: int = REMOTE_WINDOW_BYTES
    remote_history: int = 0
    secure: bool = True
    allow_insecure_pickle: bool = False

    def __post_init__(self) -> None:
        _check_choice("backing", self.backing, ("memfd", "named"))
        _check_choice("lifeline", self.lifeline, ("abstract", "directory"))
        _check_choice("overflow", self.overflow, ("segments", "zmq"))
        _check_choice("wait", self.wait, ("adaptive", "spin", "park"))
        _check_choice("on_reader_death", self.on_reader_death, ("raise", "evict", "hold"))
        if self.max_readers is not None:
            check_int("max_readers", self.max_readers, minimum=0, maximum=MAX_READERS)
        check_slow("slow_reader", self.slow_reader, self.overflow)
        check_int("prefault_bytes", self.prefault_bytes, minimum=0, maximum=MAX_BYTES)
        check_int("max_message_bytes", self.max_message_bytes, minimum=1, maximum=MAX_BYTES)
        check_seconds("stall_warning_s", self.stall_warning_s)
        if self.linger_s != 0:
            check_seconds("linger_s", self.linger_s)
        check_seconds("remote_timeout", self.remote_timeout)
        if not MIN_REMOTE_TIMEOUT_S <= self.remote_timeout <= MAX_REMOTE_TIMEOUT_S:
            bounds = f"{MIN_REMOTE_TIMEOUT_S} to {MAX_REMOTE_TIMEOUT_S:.0f}"
            raise ValueError(f"remote_timeout must be {bounds} seconds, not {self.remote_timeout}")
        check_int("remote_window", self.remote_window, minimum=1, maximum=MAX_REMOTE_WINDOW)
        check_int("remote_window_bytes", self.remote_window_bytes, minimum=1, maximum=MAX_BYTES)
        check_int("remote_history", self.remote_history, minimum=0, maximum=MAX_REMOTE_WINDOW)
        check_bool("trace_context", self.trace_context)
        check_bool("secure", self.secure)
        check_bool("allow_insecure_pickle", self.allow_insecure_pickle)
        _check_share("max_spin_cpu", self.max_spin_cpu)
        _check_path("runtime_dir", self.runtime_dir)
        if not os.path.isabs(self.runtime_dir):  # readers, and this process later, may have other working directories
            msgspec.structs.force_setattr(self, "runtime_dir", os.path.abspath(self.runtime_dir))
        if self.backing == "memfd" and not hasattr(os, "memfd_create"):
            raise ValueError("backing='memfd' needs Linux; use backing='named' here")
        if self.lifeline == "abstract" and not _ON_LINUX:
            raise ValueError("lifeline='abstract' needs Linux; use lifeline='directory' here")

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Options:
        """Return the defaults, changed by ``AIOSHM_*`` variables.

        Args:
            environ: The variables; None: the environment of this process.

        Raises:
            ValueError: A variable has an invalid value; the text names the variable.
        """
        options = cls()
        for variable, (field, parse) in _VARIABLES.items():
            text = _environment(environ).get(variable)
            if text is None or text == "":
                continue
            try:
                options = msgspec.structs.replace(options, **{field: parse(text)})
            except ValueError as error:
                raise ValueError(f"{variable}={shown(text)}: {error}") from None
        return options


def _environment(given: Mapping[str, str] | None) -> Mapping[str, str]:
    """Return the given environment, or the environment of this process."""
    if given is None:
        return os.environ
    return given


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError("it must be a number") from None


_VARIABLES: dict[str, tuple[str, Callable[[str], Any]]] = {
    "AIOSHM_BACKING": ("backing", str),
    "AIOSHM_LIFELINE": ("lifeline", str),
    "AIOSHM_RUNTIME_DIR": ("runtime_dir", str),
    "AIOSHM_OVERFLOW": ("overflow", str),
    "AIOSHM_WAIT": ("wait", str),
    "AIOSHM_MAX_SPIN_CPU": ("max_spin_cpu", _number),
    "AIOSHM_STALL_WARNING_S": ("stall_warning_s", _number),
    "AIOSHM_REMOTE_TIMEOUT_S": ("remote_timeout", _number),
}


def native_wanted(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether to use the native core: unless ``AIOSHM_NATIVE`` is ``0``."""
    return _switch("AIOSHM_NATIVE", environ) != "0"


def vllm_wanted(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether vLLM uses this library's queue: if ``AIOSHM_VLLM`` is ``1``."""
    return _switch("AIOSHM_VLLM", environ) == "1"


def _switch(variable: str, environ: Mapping[str, str] | None) -> str:
    """Return the value of a variable, ``0``, ``1`` or empty; raise `ValueError` for other values."""
    text = _environment(environ).get(variable, "")
    if text not in {"", "0", "1"}:
        raise ValueError(f"{variable}={shown(text)}: it must be 0 or 1")
    return text


def vllm_options(max_spin_cpu: float, environ: Mapping[str, str] | None = None) -> Options:
    """Return the options of vLLM's queues: `Options.from_env`, with vLLM's interval of warnings as a default.

    Args:
        max_spin_cpu: The default of ``AIOSHM_MAX_SPIN_CPU``.
        environ: The variables. ``VLLM_RINGBUFFER_WARNING_INTERVAL`` is the default of ``AIOSHM_STALL_WARNING_S``.

    Raises:
        ValueError: A variable has an invalid value; the text names the variable.
    """
    environ = _environment(environ)
    options = Options.from_env(environ)
    changes: dict[str, float] = {}
    if not environ.get("AIOSHM_MAX_SPIN_CPU"):
        changes["max_spin_cpu"] = max_spin_cpu
    text = environ.get("VLLM_RINGBUFFER_WARNING_INTERVAL")
    if text and not environ.get("AIOSHM_STALL_WARNING_S"):
        try:
            changes["stall_warning_s"] = check_seconds("the interval", float(text))
        except ValueError as error:
            raise ValueError(f"VLLM_RINGBUFFER_WARNING_INTERVAL={text!r}: {error}") from None
    return msgspec.structs.replace(options, **changes)


def engine_ready_timeout(environ: Mapping[str, str] | None = None) -> float:
    """Return the seconds without progress after which a startup of engines has failed.

    Raises:
        ValueError: ``AIOSHM_ENGINE_READY_TIMEOUT_S`` is invalid.
    """
    text = _environment(environ).get("AIOSHM_ENGINE_READY_TIMEOUT_S", "")
    if not text:
        return ENGINE_READY_TIMEOUT_S
    try:
        return check_seconds("the timeout", _number(text))
    except ValueError as error:
        raise ValueError(f"AIOSHM_ENGINE_READY_TIMEOUT_S={shown(text)}: {error}") from None


def engine_keys_path(environ: Mapping[str, str] | None = None) -> str | None:
    """Return the file with the engine keys of this process, ``AIOSHM_ENGINE_KEYS``, if set."""
    return _environment(environ).get("AIOSHM_ENGINE_KEYS") or None


def usage_stats_path(environ: Mapping[str, str] | None = None) -> str | None:
    """Return the file for usage reports, ``AIOSHM_USAGE_STATS``; None: no reports.

    Raises:
        ValueError: The path is not absolute.
    """
    text = _environment(environ).get("AIOSHM_USAGE_STATS", "")
    if text and not Path(text).is_absolute():
        raise ValueError(f"AIOSHM_USAGE_STATS={shown(text)}: it must be an absolute path")
    return text or None


def _check_share(name: str, value: object) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number, not {shown(value)}")
    if not 0 <= value <= 1:
        raise ValueError(f"{name} must be a share of a core, 0 to 1, not {shown(value)}")


def check_slow(name: str, value: object, overflow: OverflowWay) -> SlowReader:
    """Return ``value`` if it is a `SlowReader` that goes with ``overflow``, or raise `ValueError`."""
    _check_choice(name, value, SLOW_READER)
    if value != "block" and overflow == "zmq":  # ZeroMQ would queue messages that the reader should lose
        raise ValueError(f"{name}={value!r} does not go with overflow='zmq': use overflow='segments'")
    return cast(SlowReader, value)


def _check_path(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a path as a str, not {shown(value)}")
    if not value or "\0" in value:
        raise ValueError(f"{name} must be a path, not {shown(value)}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name} must be a path in UTF-8, which a handle can carry, not {shown(value)}") from None


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, not {shown(value)}")
