"""What a block of ``lease`` takes more than ``dequeue``, against what CPython takes for a block that does nothing.

``async with`` has to look up two methods, call one more of them than ``await``, and await it. What that takes by itself
is shown by an object of C that does nothing: it is awaited in one loop, entered and left in another. No lease can take
less than that beyond ``dequeue`` where it has nothing to save, as with small messages. One process has both ends, and
reads a ring of `COUNT` messages in rounds, each way in turn. Needs the compiler that CPython was made with, or ``CC``.
"""

from __future__ import annotations

import os
import random
import shlex
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable
from functools import partial
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from statistics import median
from typing import Any

from aioshm import MessageQueue
from benchmarks.framework.crew import BenchmarkError
from benchmarks.framework.harness import Settings, main
from benchmarks.framework.report import Report
from benchmarks.framework.workload import Workload, plain_bytes, small_dict

MOST = 1.5
"""What a block of `lease` takes more than `dequeue`, against what one that does nothing takes more than a call."""

COUNT = 400
"""Messages of a round, which a default ring holds."""

CALL, BLOCK = "awaited", "entered and left"
NOTHING, OURS = "CPython, nothing", "aioshm"

SOURCE = r"""
#include <Python.h>

static PyObject *itself(PyObject *self, PyObject *Py_UNUSED(ignored)) { return Py_NewRef(self); }

static PyObject *left(PyObject *self, PyObject *const *Py_UNUSED(args), Py_ssize_t Py_UNUSED(nargs))
{
    return Py_NewRef(self);
}

static PySendResult sent(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(value), PyObject **result)
{
    *result = Py_NewRef(Py_None);
    return PYGEN_RETURN;
}

static PyObject *next(PyObject *Py_UNUSED(self)) { return NULL; }

static PyMethodDef call = {"call", itself, METH_NOARGS, NULL};
static PyMethodDef enter = {"__aenter__", itself, METH_NOARGS, NULL};
static PyMethodDef leave = {"__aexit__", (PyCFunction)(void (*)(void))left, METH_FASTCALL, NULL};

static PyType_Slot slots[] = {
    {Py_tp_iter, PyObject_SelfIter},  {Py_tp_iternext, next}, {Py_am_await, PyObject_SelfIter},
    {Py_am_send, sent}, {0, NULL},
};
static PyType_Spec spec = {"nothing.Nothing", sizeof(PyObject), 0, Py_TPFLAGS_DEFAULT, slots};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "nothing", .m_size = -1};

/* As the core's: its methods are functions that need no binding. */
static int add(PyObject *to, PyMethodDef *method, PyObject *self)
{
    PyObject *function = PyCFunction_New(method, self);
    int failed = function == NULL ? -1 : PyObject_SetAttrString(to, method->ml_name, function);
    Py_XDECREF(function);
    return failed;
}

PyMODINIT_FUNC PyInit_nothing(void)
{
    PyObject *module = PyModule_Create(&definition), *type = PyType_FromSpec(&spec);
    PyObject *nothing = type == NULL ? NULL : PyObject_CallNoArgs(type);
    if (module == NULL || nothing == NULL || add(type, &enter, nothing) < 0 || add(type, &leave, nothing) < 0 ||
        add(module, &call, nothing) < 0)
        return NULL;
    return module;
}
"""


def nothing() -> Callable[[], Any]:
    """Return a call whose result can be awaited, and entered and left, and does nothing.

    Raises:
        BenchmarkError: There is no compiler.
    """
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    with tempfile.TemporaryDirectory() as directory:
        source, built = Path(directory, "nothing.c"), Path(directory, "nothing.so")
        source.write_text(SOURCE)
        flags = ["-O3", "-shared", "-fPIC", f"-I{sysconfig.get_path('include')}"]
        flags += ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []
        try:
            subprocess.run([*compiler, *flags, source, "-o", built], check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            said = getattr(error, "stderr", "")
            raise BenchmarkError(f"needs a C compiler and Python.h; set CC: {error}\n{said}".rstrip()) from error
        loader = ExtensionFileLoader("nothing", str(built))
        spec = spec_from_loader("nothing", loader)
        assert spec is not None
        module = module_from_spec(spec)
        loader.exec_module(module)
    return module.call  # type: ignore[no-any-return]


async def awaited(call: Callable[[], Awaitable[object]], count: int) -> float:
    """Await a call so many times; return the nanoseconds that one takes."""
    began = time.perf_counter_ns()
    for _ in range(count):
        await call()
    return (time.perf_counter_ns() - began) / count


async def entered(call: Callable[[], Any], count: int) -> float:
    """Enter and leave the block that a call returns so many times; return the nanoseconds that one takes."""
    began = time.perf_counter_ns()
    for _ in range(count):
        async with call():
            pass
    return (time.perf_counter_ns() - began) / count


async def run(settings: Settings, report: Report) -> None:
    """Measure, and hold the result against the promise."""
    call = nothing()
    for work in (plain_bytes(64), small_dict("pickle")):
        for _ in range(settings.repeat):
            await _repeat(settings, report, work, call)
        extra = {
            who: report.result(work.name, f"{who}, {BLOCK}").median("ns")
            - report.result(work.name, f"{who}, {CALL}").median("ns")
            for who in (NOTHING, OURS)
        }
        ours, least = extra[OURS], extra[NOTHING]
        report.remarks.append(f"{work.name}: a block takes {least:.0f} ns more by itself, of a lease {ours:.0f}")
        text = f"{work.name}: what a block of lease takes more than dequeue, against one that does nothing"
        report.hold(text, ours / least, "x", MOST)


async def _repeat(settings: Settings, report: Report, work: Workload, call: Callable[[], Any]) -> None:
    message = next(iter(work.numbered([0])))
    taken: dict[str, list[float]] = defaultdict(list)
    async with (
        MessageQueue(1, 1, codec=work.codec) as writer,
        MessageQueue.create_from_handle(writer.export_handle(), rank=0) as reader,
    ):
        ways: dict[str, Callable[[], Awaitable[float]]] = {
            f"{NOTHING}, {CALL}": partial(awaited, call, COUNT),
            f"{NOTHING}, {BLOCK}": partial(entered, call, COUNT),
            f"{OURS}, {CALL}": partial(awaited, reader.dequeue, COUNT),
            f"{OURS}, {BLOCK}": partial(entered, reader.lease, COUNT),
        }
        until = time.perf_counter() + settings.seconds
        while time.perf_counter() < until:
            for name, way in random.sample(list(ways.items()), len(ways)):
                if name.startswith(OURS):
                    for _ in range(COUNT):
                        await writer.enqueue(message)
                taken[name].append(await way())
    for name, ns in taken.items():
        report.result(work.name, name).add(ns=median(ns))


if __name__ == "__main__":
    sys.exit(main("blocks", __doc__, run, repeat=5, seconds=1.0, loop="uvloop"))
