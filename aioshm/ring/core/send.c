/* The writer's end: claiming a slot, filling it, publishing it. */

#include "core.h"

#define ROOM_AHEAD 64         /* slots that a writer spins for, if it has none: looking at those that its readers are at
                               * holds them up, and they have hundreds of messages to go on with */

/* Chunks */

static inline size_t n_free(const Pool *pool)
{
    return pool->count - (size_t)(pool->chunks->taken - pool->chunks->given);
}

/* How many free chunks have memory. Those that have none are the last ones to be taken. */
static inline size_t n_usable(const Pool *pool)
{
    size_t without = pool->count - pool->chunks->allocated, free = n_free(pool);
    return free > without ? free - without : 0;
}

/* Where the message stands that took a chunk as the so many-th one; the number of its chunk is `count` words further. */
static inline uint64_t *taken_at(const Pool *pool, uint64_t nth)
{
    return pool->chunks->lists + pool->count + nth % pool->count;
}

/* Take back the chunks whose messages were read by all; not while the claimed slot has one of them. */
static void reclaim(WriterEnd *self, Pool *pool)
{
    Chunks *chunks = pool->chunks;
    while (chunks->taken > chunks->given && is_finished(self, *taken_at(pool, chunks->given))) {
        chunks->lists[n_free(pool)] = taken_at(pool, chunks->given)[pool->count];
        chunks->given++;
    }
}

/* Claiming */

/* Take the next slot, and a chunk if need be, and note in its header which: where the body goes, or NULL. */
static uint8_t *claim(WriterEnd *self, size_t nbytes)
{
    End *end = &self->end;
    self->record->claimed = 0;
    if (!is_free(self, end->index))
        return NULL;
    uint8_t *slot = slot_of(end, end->index), *body = slot + SLOT_HEADER_BYTES;
    uint64_t words[2] = {end->seq, 0};
    Pool *pool = NULL;
    if (nbytes > end->inline_bytes) {
        pool = pool_for(end, nbytes);
        reclaim(self, pool);
        if (n_usable(pool) == 0)
            return NULL;  /* WriterControl.blocker allocates memory for a chunk that has none */
        words[1] = 1 + pool->chunks->lists[n_free(pool) - 1];
    }
    store_release(flags_of(end, end->index), 0);
    atomic_thread_fence(memory_order_release);  /* seen as not written before anything in it changes */
    if (pool != NULL) {
        uint8_t *chunk = chunk_of(end, pool, words[1] - 1);
        uint64_t stamp = end->seq + 1;
        memcpy(chunk, &stamp, sizeof stamp);
        body = chunk + CHUNK_HEADER_BYTES;
        self->record->claimed = 1 + (uint64_t)(pool - end->pools);
    }
    memcpy(slot + 8, &words[0], sizeof words[0]);
    memcpy(slot + CHUNK, &words[1], sizeof words[1]);
    self->claimed_bytes = nbytes;
    return body;
}

static PyObject *writer_finished(WriterEnd *self, PyObject *arg)
{
    unsigned long long seq = PyLong_AsUnsignedLongLong(arg);
    if ((seq == (unsigned long long)-1 && PyErr_Occurred()) || check_usable(&self->end) < 0)
        return NULL;
    return PyBool_FromLong(is_finished(self, seq));
}

static PyObject *writer_claim_slot(WriterEnd *self, PyObject *arg)
{
    size_t nbytes = PyLong_AsSize_t(arg);
    if ((nbytes == (size_t)-1 && PyErr_Occurred()) || check_unused(&self->end) < 0)
        return NULL;
    return PyBool_FromLong(claim(self, nbytes) != NULL);
}

/* Spin until there is room for a message; return whether there may be. */
static bool spin_for_room(WriterEnd *self, size_t size)
{
    End *end = &self->end;
    if (end->spin_ns <= 0)
        return false;
    Pool *pool = size > end->inline_bytes ? pool_for(end, size) : NULL;
    if (pool != NULL && n_free(pool) == 0)
        /* The slot is free by then if it is not now: it is an older message's. */
        self->awaited = *taken_at(pool, pool->chunks->given);
    else if (pool == NULL && end->n_slots >= 8 * ROOM_AHEAD)
        self->awaited = end->seq - end->n_slots + ROOM_AHEAD - 1;
    bool may = spin_unless(end, end->spin_ns);
    self->awaited = NONE;
    return may || may_go_on(end);
}

/* Publishing */

static inline void publish(WriterEnd *self)
{
    End *end = &self->end;
    WriterRecord *record = self->record;
    uint8_t *slot = slot_of(end, end->index), *flags = flags_of(end, end->index);
    bool overflow = overflows(slot);
    if (!overflow)  /* an overflow message's marker has its size */
        memcpy(slot + SIZE, &self->claimed_bytes, 8);
    if (end->trace_at)
        memcpy(slot + end->trace_at, record->trace, TRACE_BYTES);
    if (record->claimed) {
        Pool *pool = &end->pools[record->claimed - 1];
        uint64_t *taken = taken_at(pool, pool->chunks->taken);
        taken[0] = end->seq;
        taken[pool->count] = pool->chunks->lists[n_free(pool) - 1];
        pool->chunks->taken++;
        record->claimed = 0;
    }
    atomic_thread_fence(memory_order_release);  /* what is cleared already was filled before; see is_ready */
    memcpy(flags + 1, record->unread, record->places);
    store_release(flags, 1);  /* last: readers may look the moment this is visible */
    add_to_word(end->own + BYTES, self->claimed_bytes);
    if (overflow)
        add_to_word(end->own + OVERFLOWS, 1);
    advance(end);
}

static inline bool readers_parked(const WriterEnd *self)
{
    full_fence();
    return !all_are(self->end.base + READERS_PARKED, self->record->places, 0);
}

static PyObject *writer_commit(WriterEnd *self, PyObject *Py_UNUSED(ignored))
{
    if (check_unused(&self->end) < 0)
        return NULL;
    publish(self);
    return PyBool_FromLong(readers_parked(self));
}

/* Put a message in the next slot, and a chunk if need be, and publish it; return whether there is room. */
static bool put_bytes(WriterEnd *self, const char *bytes, size_t size, uint64_t now)
{
    End *end = &self->end;
    uint8_t *body = claim(self, size);
    if (body == NULL)
        return false;
    uint64_t words[4] = {end->what, end->seq, now, size};
    memcpy(slot_of(end, end->index), words, sizeof words);
    memcpy(body, bytes, size);
    end->copied += size;
    publish(self);
    return true;
}

static bool put(WriterEnd *self, const char *bytes, size_t size)
{
    End *end = &self->end;
    if (size > end->room)
        return false;
    uint64_t now = now_ns();
    if (!put_bytes(self, bytes, size, now)) {
        if (!spin_for_room(self, size))
            return false;
        now = now_ns();
        if (!put_bytes(self, bytes, size, now))
            return false;
    }
    end->published_ns = now;
    spend(end, 1, now);
    if (readers_parked(self))
        notify(end);
    return true;
}

static PyObject *writer_put_many(WriterEnd *self, PyObject *const *args, Py_ssize_t nargs)
{
    End *end = &self->end;
    if (nargs != 2 || !PyList_CheckExact(args[0])) {
        PyErr_SetString(PyExc_TypeError, "put_many() takes a list and where to begin");
        return NULL;
    }
    Py_ssize_t start = PyLong_AsSsize_t(args[1]), length = PyList_Size(args[0]), n;
    if ((start == -1 && PyErr_Occurred()) || check_unused(end) < 0)
        return NULL;
    if (start < 0) {
        PyErr_SetString(PyExc_ValueError, "put_many() cannot begin before the list does");
        return NULL;
    }
    uint64_t now = now_ns();
    for (n = start; n < length; n++) {
        PyObject *message = PyList_GetItem(args[0], n);
        if (!PyBytes_CheckExact(message) || (size_t)PyBytes_Size(message) > end->room)
            break;
        if (!put_bytes(self, PyBytes_AsString(message), (size_t)PyBytes_Size(message), now))
            break;
    }
    if (n > start) {
        end->published_ns = now;
        spend(end, n - start, now_ns());
        if (readers_parked(self))
            notify(end);
    }
    return PyLong_FromSsize_t(n > start ? n - start : 0);
}

/* Encoding and sending */

/* Send an object that shows contiguous memory: 0 without an error if it does not, is too large, or there is no slot. */
static int send_memory(WriterEnd *self, PyObject *obj)
{
    Py_buffer memory;
    if (PyObject_GetBuffer(obj, &memory, PyBUF_SIMPLE) < 0) {
        if (!PyErr_ExceptionMatches(PyExc_Exception))
            return -1;
        PyErr_Clear();  /* encoding the object says what is wrong with it */
        return 0;
    }
    int sent = check_unused(&self->end) < 0 ? -1 : put(self, memory.buf, (size_t)memory.len);
    PyBuffer_Release(&memory);
    return sent;
}

/* Send a message that is not bytes; return None, or the message if it is no ordinary one, or has no slot. */
static PyObject *send_out_of_band(WriterEnd *self, PyObject *message)
{
    End *end = &self->end;
    if (end->out_of_band == NULL || end->out_of_band == Py_None)
        return Py_NewRef(message);
    PyObject *size = call(end->measure, message);
    if (size == NULL)
        return NULL;
    size_t nbytes = PyLong_AsSize_t(size);
    Py_DECREF(size);
    if ((nbytes == (size_t)-1 && PyErr_Occurred()) || check_unused(end) < 0)  /* measuring and encoding run any code */
        return NULL;
    if (nbytes > end->room
        || (claim(self, nbytes) == NULL && (!spin_for_room(self, nbytes) || claim(self, nbytes) == NULL)))
        return Py_NewRef(message);
    PyObject *fill = Py_NewRef(end->out_of_band);
    end->in_use++;
    PyObject *filled = PyObject_CallFunction(fill, "nOK", (Py_ssize_t)(end->slots_at + end->index * end->slot_bytes),
                                             message, (unsigned long long)end->seq);
    end->in_use--;
    Py_DECREF(fill);
    if (filled == NULL)
        return NULL;
    Py_DECREF(filled);
    if (filled != Py_True)  /* which is never freed, nor is False */
        return Py_NewRef(message);
    end->published_ns = load_word(slot_of(end, end->index) + 16);
    end->copied += nbytes;
    publish(self);
    spend(end, 1, now_ns());
    if (readers_parked(self))
        notify(end);
    Py_RETURN_NONE;
}

/* Publish what encoding has returned, whoever may send; return whether that was done. */
static PyObject *writer_put(WriterEnd *self, PyObject *message)
{
    if (check_unused(&self->end) < 0)
        return NULL;
    if (PyBytes_CheckExact(message))
        return PyBool_FromLong(put(self, PyBytes_AsString(message), (size_t)PyBytes_Size(message)));
    if (self->end.out_of_band == NULL || self->end.out_of_band == Py_None) {
        PyErr_SetString(PyExc_TypeError, "put() takes bytes");
        return NULL;
    }
    PyObject *answer = send_out_of_band(self, message);
    if (answer == NULL)
        return NULL;
    Py_DECREF(answer);
    return PyBool_FromLong(answer == Py_None);
}

static PyObject *send_passed(WriterEnd *self, PyObject *obj)
{
    End *end = &self->end;
    PyObject *message;
    if (end->raw && PyBytes_CheckExact(obj)) {
        message = Py_NewRef(obj);
    } else {
        int sent = end->raw ? send_memory(self, obj) : 0;
        if (sent != 0)
            return sent < 0 ? NULL : Py_NewRef(Py_None);
        message = call(end->code, obj);
        if (message == NULL)
            return NULL;
        if (!PyBytes_CheckExact(message)) {
            PyObject *answer = send_out_of_band(self, message);
            Py_DECREF(message);
            return answer;
        }
        if (check_unused(end) < 0) {  /* encoding runs any code */
            Py_DECREF(message);
            return NULL;
        }
    }
    if (!put(self, PyBytes_AsString(message), (size_t)PyBytes_Size(message)))
        return message;
    Py_DECREF(message);
    Py_RETURN_NONE;
}

PyObject *writer_send(WriterEnd *self, PyObject *obj)
{
    unsigned long before;
    int passed = passes(&self->end);
    if (passed <= 0 || !acquire_lock(&self->end, &before))
        return passed < 0 ? NULL : Py_NewRef(Py_False);
    PyObject *result = send_passed(self, obj);
    release_lock(&self->end, before);
    return result;
}

/* The type */

static PyMethodDef methods[] = {
    BOTH_ENDS,
    {"finished", CALL writer_finished, METH_O, "Return whether all have read a message, or its slot has another one."},
    {"claim_slot", CALL writer_claim_slot, METH_O, "Claim the next slot for so many bytes; return whether it is free."},
    {"commit", CALL writer_commit, METH_NOARGS, "Publish the claimed slot; return whether a reader is parked."},
    {"put", CALL writer_put, METH_O, "Publish what encoding returned; return whether that was done."},
    {"put_many", FAST writer_put_many, METH_FASTCALL, "Publish messages of a list, from one on; return how many."},
    {"send", CALL writer_send, METH_O, "Encode and publish: None, or False if shut, or what was encoded."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    END_MEMBERS,
    {"claimed_bytes", T_ULONGLONG, offsetof(WriterEnd, claimed_bytes), 0, "Bytes of the message in the claimed slot."},
    {"awaited", T_ULONGLONG, offsetof(WriterEnd, awaited), 0, "The message that all have to read before a spin ends."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "The hot calls of a writer's end; see reference.py."},
    {Py_tp_init, writer_init},
    {Py_tp_dealloc, end_dealloc},
    {Py_tp_traverse, end_traverse},
    {Py_tp_clear, end_clear},
    {Py_tp_methods, methods},
    {Py_tp_members, members},
    {0, NULL},
};

PyType_Spec writer_spec = {
    "aioshm.ring._native.WriterBase", sizeof(WriterEnd), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE, slots,
};
