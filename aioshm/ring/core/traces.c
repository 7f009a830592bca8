/* Trace contexts: those of the next message, and of the messages taken last */

#include "core.h"

/* Note the trace context of the next message, or zeros where it is none. */
void note_trace(Core *self)
{
    if (self->noted == self->seq)
        return;  /* a block has it */
    self->noted = self->seq;
    uint8_t *kept = self->trail + TRACE_BYTES * (self->n_trail++ % TRAIL);
    const uint8_t *slot = slot_of(self, self->index) + self->trace_at;
    for (size_t n = 0; n < TRACE_BYTES; n++)  /* once each, see above */
        kept[n] = atomic_load_explicit((const _Atomic uint8_t *)slot + n, memory_order_relaxed);
    if (kept[0] == 1 && !all_are(kept + 2, 16, 0) && !all_are(kept + 18, 8, 0))
        return;
    self->garbled += kept[0] != 0;
    memset(kept, 0, TRACE_BYTES);
}

PyObject *reader_note_trace(Core *self, PyObject *Py_UNUSED(ignored))
{
    if (check_unused(self) < 0)
        return NULL;
    if (self->trace_at)
        note_trace(self);
    Py_RETURN_NONE;
}

PyObject *reader_traces(Core *self, PyObject *arg)
{
    size_t most = PyLong_AsSize_t(arg), there = self->n_trail < TRAIL ? (size_t)self->n_trail : TRAIL;
    if (most == (size_t)-1 && PyErr_Occurred())
        return NULL;
    if (most > there)
        most = there;
    PyObject *traces = PyList_New((Py_ssize_t)most);
    for (size_t n = 0; traces != NULL && n < most; n++) {
        const uint8_t *kept = self->trail + TRACE_BYTES * ((self->n_trail - most + n) % TRAIL);
        PyObject *trace = PyBytes_FromStringAndSize((const char *)kept, TRACE_BYTES);
        if (trace == NULL || PyList_SetItem(traces, (Py_ssize_t)n, trace) < 0)
            Py_CLEAR(traces);
    }
    return traces;
}

PyObject *writer_trace(Core *self, void *Py_UNUSED(closure))
{
    return PyBytes_FromStringAndSize((const char *)self->trace, TRACE_BYTES);
}

int writer_set_trace(Core *self, PyObject *trace, void *Py_UNUSED(closure))
{
    if (trace == NULL || !PyBytes_CheckExact(trace)) {
        PyErr_SetString(PyExc_TypeError, "a trace context is bytes");
        return -1;
    }
    if (PyBytes_Size(trace) != TRACE_BYTES) {
        PyErr_Format(PyExc_ValueError, "a trace context has %d bytes", TRACE_BYTES);
        return -1;
    }
    memcpy(self->trace, PyBytes_AsString(trace), TRACE_BYTES);
    return 0;
}
