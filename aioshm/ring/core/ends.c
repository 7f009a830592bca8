/* Making and unmaking the two ends. Every number of a layout is checked before any memory is touched. */

#include "core.h"

/* Whether so many things of one size fit between two places. */
static bool fit(size_t begin, size_t amount, size_t each, size_t end)
{
    return begin <= end && (each == 0 || amount <= (end - begin) / each);
}

/* Whether every offset that is ever used lies within the memory, for any numbers. */
static bool is_consistent(const End *end, size_t line, size_t total_bytes)
{
    if ((size_t)end->buffer.len < total_bytes || (uintptr_t)end->buffer.buf % 8 != 0 || line % 8 != 0
        || end->slots_at % 8 != 0 || end->slot_bytes % 8 != 0 || end->n_slots < 1
        || !fit(line, 1, 64, end->slots_at) || !fit(READERS_PARKED, end->n_reader, 1, end->slots_at)
        || !fit(end->slots_at, end->n_slots, end->slot_bytes, end->flags_at)
        || !fit(end->flags_at, end->n_slots, end->flag_bytes, total_bytes)
        || end->n_pools < 1 || end->flag_bytes != 1 + end->n_reader
        || !fit(SLOT_HEADER_BYTES, end->inline_bytes, 1, end->trace_at ? end->trace_at : end->slot_bytes)
        || (end->trace_at && !fit(end->trace_at, 1, TRACE_BYTES, end->slot_bytes)))
        return false;
    size_t behind = end->slots_at + end->n_slots * end->slot_bytes, number = 0, room = SIZE_MAX;
    for (size_t n = 0; n < end->n_pools; n++) {
        const Pool *pool = &end->pools[n];
        if (pool->start < behind || pool->start % 8 != 0 || pool->stride % 8 != 0 || pool->count < 1
            || pool->room > room || pool->first != number || !fit(CHUNK_HEADER_BYTES, pool->room, 1, pool->stride)
            || !fit(pool->start, pool->count, pool->stride, end->flags_at))
            return false;
        behind = pool->start + pool->count * pool->stride;
        number += pool->count;
        room = pool->room;
    }
    return end->room <= end->pools[0].room && end->inline_bytes <= end->room;
}

/* Find the parts of the writer's record; whether it has room for all of them. */
static bool open_writer_record(WriterEnd *self)
{
    End *end = &self->end;
    size_t at = UNREAD + (end->n_reader + 7) / 8 * 8, size = (size_t)end->record.len;
    for (size_t n = 0; n < end->n_pools; n++) {
        Pool *pool = &end->pools[n];
        if (!fit(at, 1, CHUNK_LISTS, size) || !fit(at + CHUNK_LISTS, pool->count, 3 * sizeof(uint64_t), size))
            return false;
        pool->chunks = (Chunks *)((uint8_t *)end->record.buf + at);
        at += CHUNK_LISTS + pool->count * 3 * sizeof(uint64_t);
    }
    self->record = end->record.buf;
    return at <= size && self->record->places <= end->n_reader;
}

static bool open_reader_record(ReaderEnd *self)
{
    self->record = self->end.record.buf;
    return fit(TRACES, self->end.trace_at ? TRAIL : 0, TRACE_BYTES, (size_t)self->end.record.len);
}

static int take_pools(End *end, PyObject *pools)
{
    end->n_pools = (size_t)PyTuple_Size(pools);
    if (end->n_pools > MAX_POOLS) {
        PyErr_SetString(PyExc_ValueError, "there are too many pools");
        return -1;
    }
    for (size_t n = 0; n < end->n_pools; n++) {
        Pool *pool = &end->pools[n];
        PyObject *numbers = PyTuple_GetItem(pools, (Py_ssize_t)n);
        if (!PyTuple_Check(numbers)) {
            PyErr_SetString(PyExc_TypeError, "a pool is a tuple");
            return -1;
        }
        if (!PyArg_ParseTuple(numbers, "nnnnn", &pool->start, &pool->room, &pool->stride, &pool->count, &pool->first))
            return -1;
    }
    return 0;
}

/* Take what both ends have; -1 with an error, and then nothing of the memory is kept. */
static int end_init(End *end, PyObject *sizes, PyObject *pools, PyObject *view, PyObject *record, size_t line, size_t flag)
{
    size_t total_bytes;
    if (end->made) {
        PyErr_SetString(PyExc_RuntimeError, "this was made already");
        return -1;
    }
    end->made = true;
    if (!PyArg_ParseTuple(sizes, "nnnnnnnnn", &end->n_reader, &end->room, &end->n_slots, &end->inline_bytes,
                          &end->slot_bytes, &end->slots_at, &end->flags_at, &end->trace_at, &total_bytes)
        || take_pools(end, pools) < 0)
        return -1;
    State *state = state_of((PyObject *)end);
    end->flag_bytes = 1 + end->n_reader;
    end->own = NULL;
    if (state == NULL || PyObject_GetBuffer(view, &end->buffer, PyBUF_WRITABLE) < 0)
        return -1;
    if (PyObject_GetBuffer(record, &end->record, PyBUF_WRITABLE) < 0) {
        PyBuffer_Release(&end->buffer);
        return -1;
    }
    if (flag > end->n_reader || !is_consistent(end, line, total_bytes) || (uintptr_t)end->record.buf % 8 != 0
        || !(flag ? open_reader_record((ReaderEnd *)end) : open_writer_record((WriterEnd *)end))) {
        PyBuffer_Release(&end->buffer);
        PyBuffer_Release(&end->record);
        PyErr_SetString(PyExc_ValueError, "the memory is smaller than the layout says, or is misaligned");
        return -1;
    }
    end->flag = flag;
    end->empty = Py_NewRef(state->empty);
    end->slow_path = Py_NewRef(state->slow_path);
    end->code = Py_NewRef(Py_None);
    end->out_of_band = Py_NewRef(Py_None);
    end->on_parked = Py_NewRef(Py_None);
    end->runs = Py_NewRef((PyObject *)&PyBool_Type);  /* bool() is False */
    end->base = end->buffer.buf;
    end->own = end->base + line;
    return 0;
}

int no_keywords(PyObject *kwargs)
{
    if (kwargs == NULL || PyDict_Size(kwargs) == 0)
        return 0;
    PyErr_SetString(PyExc_TypeError, "this takes no keyword arguments");
    return -1;
}

int writer_init(WriterEnd *self, PyObject *args, PyObject *kwargs)
{
    PyObject *sizes, *pools, *view, *record;
    PyTypeObject *tuple = &PyTuple_Type;
    if (no_keywords(kwargs) < 0
        || !PyArg_ParseTuple(args, "O!O!OO:WriterBase", tuple, &sizes, tuple, &pools, &view, &record))
        return -1;
    self->awaited = NONE;
    return end_init(&self->end, sizes, pools, view, record, WRITER_LINE, 0);
}

int reader_init(ReaderEnd *self, PyObject *args, PyObject *kwargs)
{
    PyObject *sizes, *pools, *view, *record;
    PyTypeObject *tuple = &PyTuple_Type;
    Py_ssize_t reader, line, histogram;
    if (no_keywords(kwargs) < 0
        || !PyArg_ParseTuple(args, "O!O!OOnnn:ReaderBase", tuple, &sizes, tuple, &pools, &view, &record, &reader, &line,
                             &histogram))
        return -1;
    if (reader < 0 || line < 0 || histogram < 0 || histogram % 8 != 0) {
        PyErr_SetString(PyExc_ValueError, "a reader's line and histogram lie in the memory");
        return -1;
    }
    if (end_init(&self->end, sizes, pools, view, record, (size_t)line, 1 + (size_t)reader) < 0)
        return -1;
    if (!fit((size_t)histogram, LATENCY_BUCKETS, 8, self->end.slots_at)) {
        Py_XDECREF(end_close(&self->end, NULL));
        PyErr_SetString(PyExc_ValueError, "the histogram of this reader lies nowhere");
        return -1;
    }
    self->latencies = self->end.base + histogram;
    return 0;
}

/* The state of the module: that of the one class among the bases of a type that is of the module itself. */
State *state_of(PyObject *self)
{
    for (PyTypeObject *type = Py_TYPE(self); type != NULL; type = PyType_GetSlot(type, Py_tp_base)) {
        State *state = PyType_GetModuleState(type);
        if (state != NULL)
            return state;
        PyErr_Clear();
    }
    PyErr_SetString(PyExc_TypeError, "this is no core");
    return NULL;
}

/* buffer.obj is not visited: CPython's collector clears a memoryview that it finds in garbage although others have its
 * memory, and crashes (seen in 3.11). Unseen it is no garbage; it knows nobody that could know this object. */
int end_traverse(End *end, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE((PyObject *)end));
    Py_VISIT(end->code);
    Py_VISIT(end->out_of_band);
    Py_VISIT(end->measure);
    Py_VISIT(end->on_parked);
    Py_VISIT(end->runs);
    return 0;
}

/* The buffers stay: others in the same cycle may still use what is cleared, and the memory must outlast that. */
int end_clear(End *end)
{
    Py_CLEAR(end->code);
    Py_CLEAR(end->out_of_band);
    Py_CLEAR(end->measure);
    Py_CLEAR(end->on_parked);
    Py_CLEAR(end->runs);
    end->open = 0;
    return 0;
}

void end_dealloc(End *end)
{
    PyTypeObject *type = Py_TYPE((PyObject *)end);
    PyObject_GC_UnTrack(end);
    end_clear(end);
    Py_CLEAR(end->empty);
    Py_CLEAR(end->slow_path);
    if (end->base != NULL) {
        PyBuffer_Release(&end->buffer);
        PyBuffer_Release(&end->record);
    }
    PyBuffer_Release(&end->lock);
    freefunc release = PyType_GetSlot(type, Py_tp_free);
    release(end);
    Py_DECREF(type);
}
