/* A reader's end: peeking at a message, copying and decoding it, giving its slot back */

#include "core.h"

/* The same as `fetch_to_write` for the next message but a few; only if it is there, for else the writer is about to write to those lines. */
static inline void fetch_to_read(const Core *self)
{
    if (self->n_slots <= READER_AHEAD)
        return;
    size_t index = index_ahead(self, READER_AHEAD);
    if (is_ready(self, index)) {
        __builtin_prefetch(slot_of(self, index));
        __builtin_prefetch(slot_of(self, index) + SLOT_HEADER_BYTES);
    }
}

static PyObject *reader_start_at(Core *self, PyObject *arg)
{
    unsigned long long seq = PyLong_AsUnsignedLongLong(arg);
    if ((seq == (unsigned long long)-1 && PyErr_Occurred()) || check_unused(self) < 0)
        return NULL;
    self->seq = seq;
    self->index = seq % self->n_slots;
    store_count(self->own, seq);
    Py_RETURN_NONE;
}

static PyObject *reader_ready(Core *self, PyObject *Py_UNUSED(ignored))
{
    return check_usable(self) < 0 ? NULL : PyBool_FromLong(is_ready(self, self->index));
}

static PyObject *reader_peek(Core *self, PyObject *Py_UNUSED(ignored))
{
    if (check_unused(self) < 0)
        return NULL;
    if (!is_ready(self, self->index))
        Py_RETURN_NONE;
    return slot_at(self);
}

/* Count the bytes of the next message, and note its trace context: it is finished with, or nearly. */
static inline void note(Core *self)
{
    const uint8_t *slot = slot_of(self, self->index);
    uint64_t size;
    if (is_elsewhere(slot))
        memcpy(&size, slot + OVERFLOW_SIZE, sizeof size);
    else
        size = load_word(slot + SIZE);
    add_to_word(self->own + BYTES, size);
    if (self->trace_at)
        note_trace(self);
}

static inline void finish(Core *self)
{
    note(self);
    store_release(flags_of(self, self->index) + self->reader, 1);
    advance(self);
    store_count(self->own, self->seq);
}

/* Count how long ago the message was published that has just been taken. */
static inline void note_latency(Core *self, uint64_t now)
{
    uint64_t latency = now - self->published_ns;
    if (latency > INT64_MAX)  /* published after now: damage */
        latency = 0;
    size_t bucket = 0;
    if (latency >> LATENCY_FIRST_BIT) {
        bucket = (size_t)(64 - __builtin_clzll(latency)) - LATENCY_FIRST_BIT;
        if (bucket > LATENCY_BUCKETS - 1)
            bucket = LATENCY_BUCKETS - 1;
    }
    add_to_word(self->latencies + 8 * bucket, 1);
    add_to_word(self->own + LATENCY_NS, latency);
}

/* Whether the next message is one of those whose latency is counted. */
static inline bool counts(const Core *self)
{
    return !self->rushes || self->seq % LATENCY_EVERY == 0;
}

static PyObject *reader_taken(Core *self, PyObject *arg)
{
    unsigned long long published_ns = PyLong_AsUnsignedLongLong(arg);
    if ((published_ns == (unsigned long long)-1 && PyErr_Occurred()) || check_usable(self) < 0)
        return NULL;
    self->published_ns = published_ns;
    note_latency(self, now_ns());
    Py_RETURN_NONE;
}

static inline bool writer_parked(const Core *self)
{
    full_fence();
    return load_acquire(self->base + WRITER_PARKED) != 0;
}

static PyObject *reader_release(Core *self, PyObject *Py_UNUSED(ignored))
{
    if (check_unused(self) < 0)
        return NULL;
    finish(self);
    return PyBool_FromLong(writer_parked(self));
}

static PyObject *reader_skip(Core *self, PyObject *Py_UNUSED(ignored))
{
    if (check_unused(self) < 0)
        return NULL;
    note(self);
    advance(self);
    store_count(self->own, self->seq);
    self->kept = 1;
    Py_RETURN_NONE;
}

static PyObject *reader_give_back(Core *self, PyObject *arg)
{
    Py_ssize_t index = PyLong_AsSsize_t(arg);
    if ((index == -1 && PyErr_Occurred()) || check_unused(self) < 0)
        return NULL;
    if (index < 0 || (size_t)index >= self->n_slots) {
        PyErr_Format(PyExc_IndexError, "there is no slot %zd", index);
        return NULL;
    }
    store_release(flags_of(self, (size_t)index) + self->reader, 1);
    self->kept = 0;
    return PyBool_FromLong(writer_parked(self));
}

/* Where the next message lies, if it lies in a chunk of this number and of that room; else NULL. */
static const uint8_t *chunk_body(const Core *self, uint64_t number, uint64_t seq, size_t size)
{
    for (size_t n = 0; n < self->n_pools; n++) {
        const Pool *pool = &self->pools[n];
        if (number < pool->first || number - pool->first >= pool->count)
            continue;
        const uint8_t *chunk = chunk_of(self, pool, number);
        return size <= pool->room && load_word(chunk) == seq + 1 ? chunk + CHUNK_HEADER_BYTES : NULL;
    }
    return NULL;
}

/* Copy the next message, which is there, or return NULL without an error if it is not an ordinary one. */
static PyObject *copy_plain(Core *self)
{
    const uint64_t most = self->raw ? TAKE_MAX : COPY_MAX;
    fetch_to_read(self);
    const uint8_t *slot = slot_of(self, self->index), *body = slot + SLOT_HEADER_BYTES;
    const uint64_t words[4] = {load_word(slot), load_word(slot + 8), load_word(slot + 16), load_word(slot + 24)};
    const uint64_t chunk = load_word(slot + CHUNK), size = words[3];
    if (words[0] != self->what || words[1] != self->seq || size > most)
        return NULL;
    if (chunk != 0)
        body = chunk_body(self, chunk - 1, words[1], size);
    else if (size > self->inline_bytes)
        return NULL;
    if (body == NULL)
        return NULL;
    self->published_ns = words[2];
    return PyBytes_FromStringAndSize((const char *)body, (Py_ssize_t)size);
}

/* Whether the error that decoding ended in says nothing about the message: a signal's handler raised it. */
static bool interrupted(void)
{
    if (!PyErr_ExceptionMatches(PyExc_Exception))
        return true;
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    PyErr_NormalizeException(&type, &error, &traceback);
    if (traceback != NULL)
        PyException_SetTraceback(error, traceback);
    PyObject *module = PyImport_ImportModule("aioshm.process.interrupts"), *answer = NULL;
    if (module != NULL)
        answer = PyObject_CallMethod(module, "from_handler", "O", error);
    Py_XDECREF(module);
    bool yes = answer == NULL || answer == Py_True;  /* where that cannot be said, another one has just interrupted it */
    PyErr_Clear();
    Py_XDECREF(answer);
    PyErr_Restore(type, error, traceback);
    return yes;
}

/* Decode the next message, which is there and stays where it is; `elsewhere` if it is no ordinary one. */
static PyObject *decode(Core *self)
{
    PyObject *obj = copy_plain(self), *arg = obj, *callable = self->code;
    if (obj == NULL) {
        if (PyErr_Occurred())
            return NULL;
        callable = self->beside;
        if (callable == NULL || callable == Py_None)
            return Py_NewRef(self->elsewhere);
        arg = begin_at(self);
        if (arg == NULL)
            return NULL;
    } else if (self->raw) {
        return obj;
    }
    self->in_use++;
    obj = call(callable, arg);
    self->in_use--;
    Py_DECREF(arg);
    return obj;
}

/* Finish with a message that has been decoded, or could not be: then an error is set, and stays. */
static void finish_and_tell(Core *self, bool took)
{
    uint64_t now = now_ns();
    self->rushes = now - self->finished_ns < RUSH_NS;
    self->finished_ns = now;
    if (took && counts(self))
        note_latency(self, now);
    finish(self);
    count_turn(self, 1, now);
    if (writer_parked(self)) {
        PyObject *type, *error, *traceback;
        PyErr_Fetch(&type, &error, &traceback);
        notify(self);
        PyErr_Restore(type, error, traceback);
    }
}

/* Whether the writer goes on without this reader: then it may have filled the slot again while that was read. */
static inline bool was_evicted(const Core *self)
{
    atomic_thread_fence(memory_order_acquire);  /* after what was read */
    return atomic_load_explicit((_Atomic uint8_t *)(flags_of(self, self->index) + self->reader), memory_order_relaxed);
}

/* Return what stands for no message instead of one, or of the error, that an evicted reader has made of a slot. */
static PyObject *dropped(Core *self, PyObject *obj)
{
    PyErr_Clear();
    Py_XDECREF(obj);
    return Py_NewRef(self->nothing);
}

static PyObject *take(Core *self)
{
    PyObject *obj = decode(self);
    if (obj == self->elsewhere || (obj == NULL && interrupted()))
        return obj;  /* interrupted: the next call returns the same message */
    if (was_evicted(self))
        return dropped(self, obj);
    finish_and_tell(self, obj != NULL);
    return obj;
}

static PyObject *reader_take(Core *self, PyObject *Py_UNUSED(ignored))
{
    if (check_unused(self) < 0)
        return NULL;
    return is_ready(self, self->index) ? take(self) : Py_NewRef(self->nothing);
}

/* Whether the next message is there: 1, 0, or -1 with an error; spins for it if that is worth it. */
static int message_is_there(Core *self)
{
    if (is_ready(self, self->index))
        return 1;
    if (self->spin_ns <= 0 || !spin_unless(self, self->spin_ns))
        return 0;
    if (PyErr_CheckSignals() < 0)  /* before the message is taken: an error afterwards would lose it */
        return -1;
    if (check_unused(self) < 0)  /* a handler is any code */
        return -1;
    return is_ready(self, self->index);
}

static PyObject *receive_passed(Core *self)
{
    int there = message_is_there(self);
    return there > 0 ? take(self) : there < 0 ? NULL : Py_NewRef(self->nothing);
}

PyObject *reader_receive(Core *self, PyObject *Py_UNUSED(ignored))
{
    int passed = self->kept ? 0 : passes(self);  /* slots go back in order */
    if (passed <= 0)
        return passed < 0 ? NULL : Py_NewRef(self->nothing);
    unsigned long before = begin_use(self);
    PyObject *answer = receive_passed(self);
    end_use(self, before);
    return answer;
}

static PyObject *reader_bind_undelivered(Core *self, PyObject *arg)
{
    if (!PyList_CheckExact(arg)) {
        PyErr_SetString(PyExc_TypeError, "what was not delivered is in a list");
        return NULL;
    }
    PyObject *old = self->undelivered;
    self->undelivered = Py_NewRef(arg);
    Py_XDECREF(old);
    Py_RETURN_NONE;
}

/* Whether there is a message that no call has returned yet: it comes before those in the ring. */
static inline bool has_undelivered(const Core *self)
{
    return self->undelivered != NULL && PyList_Size(self->undelivered) > 0;
}

static PyObject *reader_take_many(Core *self, PyObject *arg)
{
    Py_ssize_t most = PyLong_AsSsize_t(arg), n = 0;
    if (most == -1 && PyErr_Occurred())
        return NULL;
    PyObject *batch = PyList_New(0);
    if (batch == NULL || check_unused(self) < 0) {  /* in this order: making a list may collect garbage first */
        Py_XDECREF(batch);
        return NULL;
    }
    self->in_use++;
    while (n < most && is_ready(self, self->index)) {
        PyObject *obj = copy_plain(self);
        if (obj == NULL)
            break;
        if (!self->raw) {
            PyObject *message = obj;
            obj = call(self->code, message);
            Py_DECREF(message);
            if (obj == NULL) {
                if (was_evicted(self) && !interrupted()) {
                    PyErr_Clear();
                    break;
                }
                if (n == 0 && !interrupted())
                    finish(self);  /* the next call returns the message behind it */
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
            if ((long long)now >= self->turn_ends_ns)
                break;
        }
    }
    self->in_use--;
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    uint64_t now = now_ns();
    if (n % BATCH_LOOKS != 0)
        note_latency(self, now);
    count_turn(self, n, now);
    if (writer_parked(self))
        notify(self);
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

static PyObject *reader_next(Core *self, void *Py_UNUSED(closure))
{
    if (has_undelivered(self))
        return Py_NewRef(self->elsewhere);
    PyObject *obj = reader_receive(self, NULL);
    if (!self->owes || self->undelivered == NULL || obj == NULL || obj == self->nothing || obj == self->elsewhere)
        return obj;
    if (PyList_Append(self->undelivered, obj) < 0) {  /* told at the next call, then */
        PyErr_Clear();
        return obj;
    }
    Py_DECREF(obj);
    return Py_NewRef(self->elsewhere);
}

static PyMethodDef reader_methods[] = {
    BOTH_ENDS,
    {"ready", CALL reader_ready, METH_NOARGS, "Return whether a message waits."},
    {"peek", CALL reader_peek, METH_NOARGS, "Return the slot of the next message, or None."},
    {"release", CALL reader_release, METH_NOARGS, "Finish with the slot; return whether the writer is parked."},
    {"start_at", CALL reader_start_at, METH_O, "Go on at a message, whatever lies before it."},
    {"skip", CALL reader_skip, METH_NOARGS, "Go on to the next message, but keep the slot."},
    {"give_back", CALL reader_give_back, METH_O, "Finish with a kept slot; return whether the writer is parked."},
    {"taken", CALL reader_taken, METH_O, "Note when the message was published that was taken just now."},
    {"take", CALL reader_take, METH_NOARGS, "Return the next message, NOTHING or ELSEWHERE."},
    {"take_many", CALL reader_take_many, METH_O, "Return a list of at most so many of the next messages."},
    {"bind_undelivered", CALL reader_bind_undelivered, METH_O, "Say where messages are that no call has returned yet."},
    {"receive", CALL reader_receive, METH_NOARGS, "Take the next message, if the gate lets this thread pass."},
    {"note_trace", CALL reader_note_trace, METH_NOARGS, "Note the next message's trace context, as of one that a block has."},
    {"traces", CALL reader_traces, METH_O, "Return the trace contexts of so many of the messages that were taken last."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef reader_attributes[] = {
    {"next", (getter)reader_next, NULL, "What receive() returns, taken without a call; see bind_undelivered().", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot reader_slots[] = {
    {Py_tp_doc, "A reader's end of a ring; see _portable.py."},
    {Py_tp_init, reader_init},
    {Py_tp_dealloc, core_dealloc},
    {Py_tp_traverse, core_traverse},
    {Py_tp_clear, core_clear},
    {Py_tp_methods, reader_methods},
    {Py_tp_getset, reader_attributes},
    {Py_tp_members, members},
    {0, NULL},
};

PyType_Spec reader_spec = {
    "aioshm.ring._native.ReaderCore", sizeof(Core), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, reader_slots,
};
