/* Making and unmaking the two ends: every number of a layout is checked before memory is touched */

#include "core.h"

static int number(PyObject *layout, const char *name, size_t *value)
{
    PyObject *attribute = PyObject_GetAttrString(layout, name);
    if (attribute == NULL)
        return -1;
    *value = PyLong_AsSize_t(attribute);
    Py_DECREF(attribute);
    return *value == (size_t)-1 && PyErr_Occurred() ? -1 : 0;
}

/* Whether so many things of one size fit between two places. */
bool fit(size_t begin, size_t amount, size_t each, size_t end)
{
    return begin <= end && (each == 0 || amount <= (end - begin) / each);
}

/* Whether every place that is ever touched lies within the memory, whatever the numbers are. */
static bool lies_straight(const Core *self, size_t line, size_t total_bytes)
{
    if ((size_t)self->buffer.len < total_bytes || (uintptr_t)self->buffer.buf % 8 != 0 || line % 8 != 0
        || self->slots_at % 8 != 0 || self->slot_bytes % 8 != 0 || self->n_slots < 1
        || !fit(line, 1, 64, self->slots_at) || !fit(READERS_PARKED, self->n_reader, 1, self->slots_at)
        || !fit(self->slots_at, self->n_slots, self->slot_bytes, self->flags_at)
        || !fit(self->flags_at, self->n_slots, self->flag_bytes, total_bytes)
        || self->n_pools < 1 || self->flag_bytes != 1 + self->n_reader || !fit(SLOT_HEADER_BYTES, self->inline_bytes, 1, self->slot_bytes)
        || (self->trace_at && (!fit(SLOT_HEADER_BYTES, self->inline_bytes, 1, self->trace_at) || !fit(self->trace_at, 1, TRACE_BYTES, self->slot_bytes))))
        return false;
    size_t end = self->slots_at + self->n_slots * self->slot_bytes, number = 0, room = SIZE_MAX;
    for (size_t n = 0; n < self->n_pools; n++) {
        const Pool *pool = &self->pools[n];
        if (pool->start < end || pool->start % 8 != 0 || pool->stride % 8 != 0 || pool->count < 1 || pool->room > room
            || pool->first != number || !fit(CHUNK_HEADER_BYTES, pool->room, 1, pool->stride)
            || !fit(pool->start, pool->count, pool->stride, self->flags_at))
            return false;
        end = pool->start + pool->count * pool->stride;
        number += pool->count;
        room = pool->room;
    }
    return self->room <= self->pools[0].room && self->inline_bytes <= self->room;
}

static int ask_pool(PyObject *numbers, Pool *pool)
{
    size_t *fields[] = {&pool->start, &pool->room, &pool->stride, &pool->count, &pool->first};
    PyObject *tuple = PySequence_Tuple(numbers);
    if (tuple == NULL)
        return -1;
    if (PyTuple_Size(tuple) != 5) {
        PyErr_SetString(PyExc_ValueError, "a pool has five numbers");
        Py_DECREF(tuple);
        return -1;
    }
    for (int n = 0; n < 5; n++) {
        *fields[n] = PyLong_AsSize_t(PyTuple_GetItem(tuple, n));
        if (*fields[n] == (size_t)-1 && PyErr_Occurred())
            break;
    }
    Py_DECREF(tuple);
    return PyErr_Occurred() ? -1 : 0;
}

static int ask_pools(Core *self, PyObject *layout)
{
    PyObject *attribute = PyObject_GetAttrString(layout, "pools");
    PyObject *pools = attribute == NULL ? NULL : PySequence_Tuple(attribute);
    Py_XDECREF(attribute);
    if (pools == NULL)
        return -1;
    Py_ssize_t amount = PyTuple_Size(pools);
    int failed = 0;
    if (amount > MAX_POOLS) {
        PyErr_SetString(PyExc_ValueError, "there are too many pools");
        failed = -1;
    }
    for (Py_ssize_t n = 0; n < amount && !failed; n++)
        failed = ask_pool(PyTuple_GetItem(pools, n), &self->pools[n]);
    if (!failed)
        self->n_pools = (size_t)amount;
    Py_DECREF(pools);
    return failed;
}

/* What a writer keeps of its chunks; the counts are those of a memory that is there. */
static int make_stacks(Core *self)
{
    for (size_t n = 0; n < self->n_pools; n++) {
        Pool *pool = &self->pools[n];
        pool->free = calloc(pool->count, sizeof *pool->free);
        pool->used = calloc(pool->count, sizeof *pool->used);
        if (pool->free == NULL || pool->used == NULL)
            return -1;
        for (size_t more = pool->count; more > 0; more--)
            pool->free[pool->n_free++] = pool->first + more - 1;
        pool->allocated = pool->count;
    }
    return 0;
}

static void free_stacks(Core *self)
{
    for (size_t n = 0; n < MAX_POOLS; n++) {
        free(self->pools[n].free);
        free(self->pools[n].used);
    }
    free(self->unread);
    free(self->trail);
}

static int core_init(Core *self, PyObject *layout, PyObject *view, PyObject *slots, size_t line)
{
    size_t total_bytes;
    if (self->made) {
        PyErr_SetString(PyExc_RuntimeError, "this was made already");
        return -1;
    }
    self->made = true;  /* or tried to: what is asked from here on runs any code */
    if (number(layout, "n_reader", &self->n_reader) < 0 || number(layout, "max_chunk_bytes", &self->room) < 0
        || number(layout, "slots", &self->n_slots) < 0 || number(layout, "inline_bytes", &self->inline_bytes) < 0 || number(layout, "slot_bytes", &self->slot_bytes) < 0
        || number(layout, "flag_bytes", &self->flag_bytes) < 0 || number(layout, "header_bytes", &self->slots_at) < 0
        || number(layout, "metadata_offset", &self->flags_at) < 0 || number(layout, "trace_at", &self->trace_at) < 0
        || number(layout, "total_bytes", &total_bytes) < 0 || ask_pools(self, layout) < 0)
        return -1;
    Py_ssize_t amount = PyObject_Size(slots);
    if (amount < 0 || (size_t)amount != self->n_slots) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "slots must be all slots, by index");
        return -1;
    }
    State *state = PyType_GetModuleState(Py_TYPE((PyObject *)self));
    if (state == NULL || PyObject_GetBuffer(view, &self->buffer, PyBUF_WRITABLE) < 0)
        return -1;
    if (!lies_straight(self, line, total_bytes)) {
        PyBuffer_Release(&self->buffer);
        PyErr_SetString(PyExc_ValueError, "the memory is smaller than the layout says, or lies crooked");
        return -1;
    }
    self->n_places = self->n_reader;
    self->unread = calloc(self->n_reader + 1, 1);  /* never nothing */
    self->trail = line == WRITER_LINE || !self->trace_at ? NULL : calloc(TRAIL, TRACE_BYTES);
    self->noted = NONE;
    if (self->unread == NULL || (line == WRITER_LINE ? make_stacks(self) < 0 : self->trace_at && self->trail == NULL)) {
        PyBuffer_Release(&self->buffer);
        PyErr_NoMemory();
        return -1;
    }
    self->awaited = NONE;
    self->slots = Py_NewRef(slots);
    self->nothing = Py_NewRef(state->nothing);
    self->elsewhere = Py_NewRef(state->elsewhere);
    self->code = Py_NewRef(Py_None);
    self->on_parked = Py_NewRef(Py_None);
    self->beside = Py_NewRef(Py_None);
    self->measure = Py_NewRef(Py_None);
    self->runs = Py_NewRef((PyObject *)&PyBool_Type);  /* bool() is False */
    self->base = self->buffer.buf;
    self->own = self->base + line;
    return 0;
}

int no_keywords(PyObject *kwargs)
{
    if (kwargs == NULL || PyDict_Size(kwargs) == 0)
        return 0;
    PyErr_SetString(PyExc_TypeError, "this takes no keyword arguments");
    return -1;
}

int writer_init(Core *self, PyObject *args, PyObject *kwargs)
{
    PyObject *layout, *view, *slots;
    if (no_keywords(kwargs) < 0 || !PyArg_ParseTuple(args, "OOO:WriterCore", &layout, &view, &slots))
        return -1;
    return core_init(self, layout, view, slots, WRITER_LINE);
}

int reader_init(Core *self, PyObject *args, PyObject *kwargs)
{
    PyObject *layout, *view, *slots;
    Py_ssize_t reader;
    size_t n_reader, lines, latencies;
    if (no_keywords(kwargs) < 0 || !PyArg_ParseTuple(args, "OOOn:ReaderCore", &layout, &view, &slots, &reader))
        return -1;
    if (number(layout, "n_reader", &n_reader) < 0 || number(layout, "reader_lines", &lines) < 0)
        return -1;
    if (reader < 0 || (size_t)reader >= n_reader) {
        PyErr_Format(PyExc_IndexError, "there is no reader %zd", reader);
        return -1;
    }
    if ((size_t)reader > (SIZE_MAX - lines) / 64) {
        PyErr_SetString(PyExc_ValueError, "the line of this reader lies nowhere");
        return -1;
    }
    if (core_init(self, layout, view, slots, lines + 64 * (size_t)reader) < 0)
        return -1;
    self->reader = 1 + (size_t)reader;
    latencies = lines + 64 * n_reader;
    if (!fit(lines, n_reader, 64, self->slots_at) || !fit(latencies, n_reader, 8 * LATENCY_BUCKETS, self->slots_at)) {
        self->base = NULL;
        PyBuffer_Release(&self->buffer);
        PyErr_SetString(PyExc_ValueError, "the histogram of this reader lies nowhere");
        return -1;
    }
    self->latencies = self->base + latencies + 8 * LATENCY_BUCKETS * (size_t)reader;
    if (self->reader <= self->n_reader)
        return 0;
    self->base = NULL;  /* the layout said something else when it was asked again */
    PyBuffer_Release(&self->buffer);
    PyErr_SetString(PyExc_ValueError, "the layout changed");
    return -1;
}

int core_traverse(Core *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE((PyObject *)self));
    /* Not buffer.obj: CPython's collector clears a memoryview that it finds in garbage although others have its memory,
     * and crashes (seen in 3.11). Unseen it is no garbage; it knows nobody that could know this object. */
    Py_VISIT(self->slots);
    Py_VISIT(self->code);
    Py_VISIT(self->on_parked);
    Py_VISIT(self->beside);
    Py_VISIT(self->measure);
    Py_VISIT(self->allocate);
    Py_VISIT(self->undelivered);
    Py_VISIT(self->runs);
    return 0;
}

int core_clear(Core *self)
{
    /* Not the buffer: what is cleared may still be used by others in the same cycle, and the memory must outlast it. */
    Py_CLEAR(self->slots);
    Py_CLEAR(self->code);
    Py_CLEAR(self->on_parked);
    Py_CLEAR(self->beside);
    Py_CLEAR(self->measure);
    Py_CLEAR(self->allocate);
    Py_CLEAR(self->undelivered);
    Py_CLEAR(self->runs);
    self->open = 0;
    return 0;
}

void core_dealloc(Core *self)
{
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    PyObject_GC_UnTrack(self);
    core_clear(self);
    Py_CLEAR(self->nothing);
    Py_CLEAR(self->elsewhere);
    if (self->base != NULL)
        PyBuffer_Release(&self->buffer);
    free_stacks(self);
    freefunc release = PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}
