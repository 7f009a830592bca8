/* A reader's end: copying and decoding a message, giving its slot back. */

#include "core.h"

/* Noting, finishing */

/* Note the trace context of the next message, or zeros where it is none. */
static void note_trace(ReaderEnd *self)
{
    const End *end = &self->end;
    if (self->record->noted == end->seq)
        return;  /* a block has it */
    self->record->noted = end->seq;
    uint8_t *kept = self->record->trail + TRACE_BYTES * (self->record->n_traces++ % TRAIL);
    const uint8_t *slot = slot_of(end, end->index) + end->trace_at;
    for (size_t n = 0; n < TRACE_BYTES; n++)
        kept[n] = atomic_load_explicit((const _Atomic uint8_t *)slot + n, memory_order_relaxed);
    if (kept[0] == 1 && !all_are(kept + 2, 16, 0) && !all_are(kept + 18, 8, 0))
        return;
    self->garbled += kept[0] != 0;
    memset(kept, 0, TRACE_BYTES);
}

/* Count the bytes of the next message, and note its trace context: it is finished with, or nearly. */
static inline void note(ReaderEnd *self)
{
    const End *end = &self->end;
    const uint8_t *slot = slot_of(end, end->index);
    uint64_t size;
    if (overflows(slot))
        memcpy(&size, slot + OVERFLOW_SIZE, sizeof size);
    else
        size = load_word(slot + SIZE);
    add_to_word(end->own + BYTES, size);
    if (end->trace_at)
        note_trace(self);
}

static inline void finish(ReaderEnd *self)
{
    End *end = &self->end;
    note(self);
    store_release(flags_of(end, end->index) + end->flag, 1);
    advance(end);
}

/* Count how long ago the message was published that has just been taken. */
static inline void note_latency(ReaderEnd *self, uint64_t now)
{
    uint64_t latency = now - self->end.published_ns;
    if (latency > INT64_MAX)  /* published after now: damage */
        latency = 0;
    size_t bucket = 0;
    if (latency >> LATENCY_FIRST_BIT) {
        bucket = (size_t)(64 - __builtin_clzll(latency)) - LATENCY_FIRST_BIT;
        if (bucket > LATENCY_BUCKETS - 1)
            bucket = LATENCY_BUCKETS - 1;
    }
    add_to_word(self->latencies + 8 * bucket, 1);
    add_to_word(self->end.own + LATENCY_NS, latency);
}

static inline bool writer_parked(const ReaderEnd *self)
{
    full_fence();
    return load_acquire(self->end.base + WRITER_PARKED) != 0;
}

/* Finish with a message that has been decoded, or could not be: then an error is set, and stays. */
static void finish_and_wake(ReaderEnd *self, bool took)
{
    End *end = &self->end;
    uint64_t now = now_ns();
    self->rushes = now - self->finished_ns < RUSH_NS;
    self->finished_ns = now;
    if (took && (!self->rushes || end->seq % LATENCY_EVERY == 0))
        note_latency(self, now);
    finish(self);
    spend(end, 1, now);
    if (writer_parked(self)) {
        PyObject *type, *error, *traceback;
        PyErr_Fetch(&type, &error, &traceback);
        notify(end);
        PyErr_Restore(type, error, traceback);
    }
}

/* Taking */

/* Where the next message lies, if it lies in a chunk of this number and of that room; else NULL. */
static const uint8_t *chunk_body(const End *end, uint64_t number, uint64_t seq, size_t size)
{
    for (size_t n = 0; n < end->n_pools; n++) {
        const Pool *pool = &end->pools[n];
        if (number < pool->first || number - pool->first >= pool->count)
            continue;
        const uint8_t *chunk = chunk_of(end, pool, number);
        return size <= pool->room && load_word(chunk) == seq + 1 ? chunk + CHUNK_HEADER_BYTES : NULL;
    }
    return NULL;
}

/* Whether the writer did not wait for this reader: it set the reader's flag, and may have filled the slot again since. */
static inline bool was_evicted(const ReaderEnd *self)
{
    const End *end = &self->end;
    atomic_thread_fence(memory_order_acquire);  /* after what was read */
    /* acquire: whoever sees the flag cleared for a later message sees that message's number, too */
    return atomic_load_explicit((_Atomic uint8_t *)(flags_of(end, end->index) + end->flag), memory_order_acquire)
        || load_word(slot_of(end, end->index) + 8) != end->seq;
}

/* Copy the next message, which is there, or return NULL without an error if it is not an ordinary one, or if the writer
 * may have overwritten it meanwhile: a torn message is not to be decoded. */
static PyObject *copy_plain(ReaderEnd *self)
{
    End *end = &self->end;
    const uint64_t most = end->raw ? TAKE_MAX : COPY_MAX;
    const uint8_t *slot = slot_of(end, end->index), *body = slot + SLOT_HEADER_BYTES;
    const uint64_t words[4] = {load_word(slot), load_word(slot + 8), load_word(slot + 16), load_word(slot + 24)};
    const uint64_t chunk = load_word(slot + CHUNK), size = words[3];
    if (words[0] != end->what || words[1] != end->seq || size > most)
        return NULL;
    if (chunk != 0)
        body = chunk_body(end, chunk - 1, words[1], size);
    else if (size > end->inline_bytes)
        return NULL;
    if (body == NULL)
        return NULL;
    end->published_ns = words[2];
    PyObject *message = PyBytes_FromStringAndSize((const char *)body, (Py_ssize_t)size);
    if (message != NULL && was_evicted(self))
        Py_CLEAR(message);
    return message;
}

/* Decode a message. A CancelledError of the message's own code becomes another error: it has cancelled no task. */
static PyObject *load(PyObject *callable, PyObject *message)
{
    PyObject *obj = call(callable, message), *type, *error, *traceback;
    if (obj != NULL || PyErr_ExceptionMatches(PyExc_Exception))
        return obj;
    PyErr_Fetch(&type, &error, &traceback);
    PyErr_NormalizeException(&type, &error, &traceback);
    PyObject *asyncio = PyImport_ImportModule("asyncio");
    PyObject *cancelled = asyncio == NULL ? NULL : PyObject_GetAttrString(asyncio, "CancelledError");
    if (cancelled != NULL && PyErr_GivenExceptionMatches(type, cancelled)) {
        PyErr_Format(PyExc_RuntimeError, "%R", error);
        Py_DECREF(type);
        Py_DECREF(error);
        Py_XDECREF(traceback);
    } else {
        PyErr_Restore(type, error, traceback);
    }
    Py_XDECREF(cancelled);
    Py_XDECREF(asyncio);
    return NULL;
}

/* Decode the next message, which is there and stays where it is; `slow_path` if it is no ordinary one. */
static PyObject *decode(ReaderEnd *self)
{
    End *end = &self->end;
    PyObject *obj = copy_plain(self), *arg = obj, *callable = end->code;
    if (obj == NULL) {
        if (PyErr_Occurred())
            return NULL;
        callable = end->out_of_band;
        if (callable == NULL || callable == Py_None)
            return Py_NewRef(end->slow_path);
        arg = PyLong_FromSize_t(end->slots_at + end->index * end->slot_bytes);
        if (arg == NULL)
            return NULL;
    } else if (end->raw) {
        return obj;
    }
    end->in_use++;
    obj = load(callable, arg);
    end->in_use--;
    Py_DECREF(arg);
    return obj;
}

/* Whether decoding failed because of the message, with the error set: it fails again. What a signal's handler raises
 * does not, as a rule; it says nothing about the message, and is raised as it is. */
static bool is_damaged(ReaderEnd *self)
{
    PyObject *type, *error, *traceback, *obj = NULL;
    self->damaged = 0;
    if (!PyErr_ExceptionMatches(PyExc_Exception))
        return false;
    PyErr_Fetch(&type, &error, &traceback);
    for (int tries = 1; tries < DECODINGS && obj == NULL; tries++) {
        PyErr_Clear();
        obj = decode(self);
        if (obj == NULL && !PyErr_ExceptionMatches(PyExc_Exception))
            break;
    }
    self->damaged = obj == NULL && PyErr_ExceptionMatches(PyExc_Exception);
    if (obj != NULL || self->damaged) {
        PyErr_Restore(type, error, traceback);
    } else {
        Py_XDECREF(type);
        Py_XDECREF(error);
        Py_XDECREF(traceback);
    }
    Py_XDECREF(obj);
    return self->damaged;
}

/* Return what stands for no message instead of one, or of the error, that an evicted reader has made of a slot. */
static PyObject *dropped(ReaderEnd *self, PyObject *obj)
{
    PyErr_Clear();
    self->damaged = 0;
    Py_XDECREF(obj);
    return Py_NewRef(self->end.empty);
}

/* Take the next message, which is there: return it, or None if it is appended to a list. */
static PyObject *take(ReaderEnd *self, PyObject *list)
{
    End *end = &self->end;
    PyObject *obj = decode(self);
    if (obj == end->slow_path || (obj == NULL && !is_damaged(self)))
        return obj;  /* interrupted: the next call returns the same message */
    if (was_evicted(self))
        return dropped(self, obj);
    if (obj != NULL && list != NULL) {
        int failed = PyList_Append(list, obj);
        Py_DECREF(obj);
        if (failed < 0)
            return NULL;
        obj = Py_NewRef(Py_None);
    }
    finish_and_wake(self, obj != NULL);
    return obj;
}

static PyObject *reader_take(ReaderEnd *self, PyObject *Py_UNUSED(ignored))
{
    End *end = &self->end;
    if (check_unused(end) < 0)
        return NULL;
    return is_ready(end, end->index) ? take(self, NULL) : Py_NewRef(end->empty);
}

/* Whether the next message is there: 1, 0, or -1 with an error; spins for it if that is worth it. */
static int message_is_there(ReaderEnd *self)
{
    End *end = &self->end;
    if (is_ready(end, end->index))
        return 1;
    if (end->spin_ns <= 0 || !spin_unless(end, end->spin_ns))
        return 0;
    if (PyErr_CheckSignals() < 0)  /* before the message is taken: an error afterwards would lose it */
        return -1;
    if (check_unused(end) < 0)  /* a handler is any code */
        return -1;
    return is_ready(end, end->index);
}

static PyObject *take_if_there(ReaderEnd *self, PyObject *list)
{
    int there = message_is_there(self);
    return there > 0 ? take(self, list) : there < 0 ? NULL : Py_NewRef(self->end.empty);
}

PyObject *reader_receive(ReaderEnd *self, PyObject *Py_UNUSED(ignored))
{
    End *end = &self->end;
    int passed = self->kept ? 0 : passes(end);  /* slots go back in order */
    if (passed <= 0)
        return passed < 0 ? NULL : Py_NewRef(end->empty);
    return take_if_there(self, NULL);
}

/* Append the next message to a list, whoever may receive: one call, in which no signal's handler runs between the
 * append and the slot's release. */
static PyObject *reader_receive_into(ReaderEnd *self, PyObject *list)
{
    if (!PyList_CheckExact(list)) {
        PyErr_SetString(PyExc_TypeError, "receive_into() takes a list");
        return NULL;
    }
    if (check_unused(&self->end) < 0)
        return NULL;
    return self->kept ? Py_NewRef(self->end.empty) : take_if_there(self, list);
}

/* The same where the end is open and no other thread holds the lock. */
static PyObject *reader_receive_next(ReaderEnd *self, PyObject *list)
{
    unsigned long before;
    if (!self->end.open || !acquire_lock(&self->end, &before))
        return Py_NewRef(self->end.empty);
    PyObject *result = reader_receive_into(self, list);
    release_lock(&self->end, before);
    return result;
}

static PyObject *reader_take_many(ReaderEnd *self, PyObject *arg)
{
    End *end = &self->end;
    Py_ssize_t most = PyLong_AsSsize_t(arg), n = 0;
    if (most == -1 && PyErr_Occurred())
        return NULL;
    PyObject *batch = PyList_New(0);
    if (batch == NULL || check_unused(end) < 0) {  /* in this order: making a list may collect garbage first */
        Py_XDECREF(batch);
        return NULL;
    }
    end->in_use++;
    while (n < most && is_ready(end, end->index)) {
        PyObject *obj = copy_plain(self);
        if (obj == NULL)
            break;
        if (!end->raw) {
            PyObject *message = obj;
            obj = load(end->code, message);
            Py_DECREF(message);
            if (obj == NULL) {
                if (n == 0 && is_damaged(self)) {
                    if (was_evicted(self))
                        Py_DECREF(dropped(self, NULL));
                    else
                        finish(self);  /* the next call returns the message behind it */
                }
                break;
            }
        }
        if (was_evicted(self)) {
            Py_DECREF(obj);
            break;
        }
        int failed = PyList_Append(batch, obj);
        Py_DECREF(obj);
        if (failed < 0)
            break;
        finish(self);
        n++;
        if (n % BATCH_LOOKS == 0) {
            uint64_t now = now_ns();
            note_latency(self, now);
            if ((long long)now >= end->budget_ends_ns)
                break;
        }
    }
    end->in_use--;
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    uint64_t now = now_ns();
    if (n % BATCH_LOOKS != 0)
        note_latency(self, now);
    spend(end, n, now);
    if (writer_parked(self))
        notify(end);
    if (type != NULL && n > 0 && PyErr_GivenExceptionMatches(type, PyExc_Exception)) {
        Py_CLEAR(type);  /* it is the next call's, which meets the same message again */
        Py_CLEAR(error);
        Py_CLEAR(traceback);
    }
    if (type != NULL) {
        PyErr_Restore(type, error, traceback);
        Py_CLEAR(batch);
    }
    return batch;
}

static PyObject *reader_ready(ReaderEnd *self, PyObject *Py_UNUSED(ignored))
{
    End *end = &self->end;
    return check_usable(end) < 0 ? NULL : PyBool_FromLong(is_ready(end, end->index));
}

static PyObject *reader_release(ReaderEnd *self, PyObject *Py_UNUSED(ignored))
{
    if (check_unused(&self->end) < 0)
        return NULL;
    finish(self);
    return PyBool_FromLong(writer_parked(self));
}

static PyObject *reader_start_at(ReaderEnd *self, PyObject *arg)
{
    End *end = &self->end;
    unsigned long long seq = PyLong_AsUnsignedLongLong(arg);
    if ((seq == (unsigned long long)-1 && PyErr_Occurred()) || check_unused(end) < 0)
        return NULL;
    end->seq = seq;
    end->index = seq % end->n_slots;
    store_count(end->own, seq);
    Py_RETURN_NONE;
}

static PyObject *reader_skip(ReaderEnd *self, PyObject *Py_UNUSED(ignored))
{
    if (check_unused(&self->end) < 0)
        return NULL;
    note(self);
    advance(&self->end);
    self->kept = 1;
    Py_RETURN_NONE;
}

static PyObject *reader_taken(ReaderEnd *self, PyObject *arg)
{
    unsigned long long published_ns = PyLong_AsUnsignedLongLong(arg);
    if ((published_ns == (unsigned long long)-1 && PyErr_Occurred()) || check_usable(&self->end) < 0)
        return NULL;
    self->end.published_ns = published_ns;
    note_latency(self, now_ns());
    Py_RETURN_NONE;
}

static PyObject *reader_note_trace(ReaderEnd *self, PyObject *Py_UNUSED(ignored))
{
    if (check_unused(&self->end) < 0)
        return NULL;
    if (self->end.trace_at)
        note_trace(self);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    BOTH_ENDS,
    {"ready", CALL reader_ready, METH_NOARGS, "Return whether a message waits."},
    {"release", CALL reader_release, METH_NOARGS, "Finish with the slot; return whether the writer is parked."},
    {"start_at", CALL reader_start_at, METH_O, "Continue at a message, whatever lies before it."},
    {"skip", CALL reader_skip, METH_NOARGS, "Continue with the next message, but keep the slot."},
    {"taken", CALL reader_taken, METH_O, "Note when the message was published that was taken just now."},
    {"take", CALL reader_take, METH_NOARGS, "Return the next message, EMPTY or SLOW_PATH."},
    {"take_many", CALL reader_take_many, METH_O, "Return a list of at most so many of the next messages."},
    {"receive_into", CALL reader_receive_into, METH_O, "Append the next message to a list, whoever may receive."},
    {"receive_next", CALL reader_receive_next, METH_O, "The same where this thread may receive now."},
    {"receive", CALL reader_receive, METH_NOARGS, "Take the next message, if this thread may receive now."},
    {"note_trace", CALL reader_note_trace, METH_NOARGS, "Note the trace context of the next message."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef members[] = {
    END_MEMBERS,
    {"damaged", T_BOOL, offsetof(ReaderEnd, damaged), 0, "Whether what could not be decoded was finished with."},
    {"kept", T_BOOL, offsetof(ReaderEnd, kept), 0, "Whether a slot was skipped and not given back."},
    {"garbled", T_ULONGLONG, offsetof(ReaderEnd, garbled), READONLY, "Messages whose trace context was none."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot slots[] = {
    {Py_tp_doc, "The hot calls of a reader's end; see reference.py."},
    {Py_tp_init, reader_init},
    {Py_tp_dealloc, end_dealloc},
    {Py_tp_traverse, end_traverse},
    {Py_tp_clear, end_clear},
    {Py_tp_methods, methods},
    {Py_tp_members, members},
    {0, NULL},
};

PyType_Spec reader_spec = {
    "aioshm.ring._native.ReaderBase", sizeof(ReaderEnd), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE, slots,
};
