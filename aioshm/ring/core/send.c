/* The writer's end: claiming a slot, filling it, publishing it */

#include "core.h"

/* Have the first lines of a slot on their way to this CPU, as its own, by the time that the writer is there: stores to
 * lines that others have wait, one after the other, at the fence that follows each message. Not those of slots that were
 * not free just now: in them are messages that are about to be read. */
static inline void fetch_line(const uint8_t *at)
{
#if defined(__x86_64__)
    __asm__ volatile("prefetchw %0" : : "m"(*at));  /* compilers make a load's of it, unless told of the CPU */
#else
    __builtin_prefetch(at, 1);
#endif
}

static inline void fetch_to_write(const Core *self)
{
    if (self->n_slots <= WRITER_AHEAD || self->seq - self->unfetched < self->n_unfetched)
        return;
    const uint8_t *slot = slot_of(self, index_ahead(self, WRITER_AHEAD));
    fetch_line(slot);
    fetch_line(slot + SLOT_HEADER_BYTES);
}

static inline void fetch_nothing(Core *self, uint64_t first, uint64_t amount)
{
    self->unfetched = first;
    self->n_unfetched = amount;
}

/* Take the next slot, and a chunk if need be, and note in its header which: where the body goes, or NULL. */
static uint8_t *claim(Core *self, size_t nbytes)
{
    self->claimed = NULL;
    if (!is_free(self, self->index))
        return NULL;
    uint8_t *slot = slot_of(self, self->index), *body = slot + SLOT_HEADER_BYTES;
    uint64_t words[2] = {self->seq, 0};
    Pool *pool = NULL;
    if (nbytes > self->inline_bytes) {
        pool = pool_for(self, nbytes);
        reclaim(self, pool);
        if (n_usable(pool) == 0)
            return NULL;  /* find_blocker() allocates memory for a chunk that has none */
        words[1] = 1 + pool->free[pool->n_free - 1];
    }
    store_release(flags_of(self, self->index), 0);
    atomic_thread_fence(memory_order_release);  /* seen as not written before anything in it changes */
    if (pool != NULL) {
        uint8_t *chunk = chunk_of(self, pool, words[1] - 1);
        uint64_t stamp = self->seq + 1;
        memcpy(chunk, &stamp, sizeof stamp);
        body = chunk + CHUNK_HEADER_BYTES;
        self->claimed = pool;
    }
    memcpy(slot + 8, &words[0], sizeof words[0]);
    memcpy(slot + CHUNK, &words[1], sizeof words[1]);
    self->claimed_bytes = nbytes;
    return body;
}

static PyObject *writer_claim(Core *self, PyObject *const *args, Py_ssize_t nargs)
{
    size_t nbytes = 0;
    if (nargs > 1) {
        PyErr_SetString(PyExc_TypeError, "claim() takes at most one argument");
        return NULL;
    }
    if (nargs == 1) {
        nbytes = PyLong_AsSize_t(args[0]);
        if (nbytes == (size_t)-1 && PyErr_Occurred())
            return NULL;
    }
    if (check_unused(self) < 0)
        return NULL;
    if (claim(self, nbytes) == NULL)
        Py_RETURN_NONE;
    return slot_at(self);
}

static inline void publish(Core *self)
{
    uint8_t *slot = slot_of(self, self->index);
    bool elsewhere = is_elsewhere(slot);
    if (!elsewhere)  /* where it is, its marker says so */
        memcpy(slot + SIZE, &self->claimed_bytes, 8);
    if (self->trace_at)
        memcpy(slot + self->trace_at, self->trace, TRACE_BYTES);
    uint8_t *flags = flags_of(self, self->index);
    Pool *pool = self->claimed;
    if (pool != NULL) {
        pool->used[(pool->oldest + pool->n_used++) % pool->count] = (Used){self->seq, pool->free[--pool->n_free]};
        self->claimed = NULL;
    }
    atomic_thread_fence(memory_order_release);  /* what is cleared already was filled before; see is_ready */
    memcpy(flags + 1, self->unread, self->n_places);
    store_release(flags, 1);  /* last: readers may look the moment this is visible */
    add_to_word(self->own + BYTES, self->claimed_bytes);
    if (elsewhere)
        add_to_word(self->own + OVERFLOWS, 1);
    advance(self);
    store_count(self->own, self->seq);
}

static inline bool readers_parked(const Core *self)
{
    full_fence();
    return !all_are(self->base + READERS_PARKED, self->n_places, 0);
}

static PyObject *writer_commit(Core *self, PyObject *Py_UNUSED(ignored))
{
    if (check_unused(self) < 0)
        return NULL;
    publish(self);
    return PyBool_FromLong(readers_parked(self));
}

/* Put a message in the next slot, and a chunk if need be, and publish it; return whether there is room. */
static bool put_bytes(Core *self, const char *bytes, size_t size, uint64_t now)
{
    uint8_t *body = claim(self, size);
    if (body == NULL) {
        fetch_nothing(self, self->seq, ROOM_AHEAD);
        return false;
    }
    uint64_t words[4] = {self->what, self->seq, now, size};
    fetch_to_write(self);
    memcpy(slot_of(self, self->index), words, sizeof words);
    memcpy(body, bytes, size);
    self->copied += size;
    publish(self);
    return true;
}

/* Spin until there is room for a message; return whether there may be. */
static bool spin_for_room(Core *self, size_t size)
{
    if (self->spin_ns <= 0)
        return false;
    Pool *pool = size > self->inline_bytes ? pool_for(self, size) : NULL;
    if (pool != NULL && pool->n_free == 0 && pool->n_used > 0)
        self->awaited = pool->used[pool->oldest].seq;  /* the slot is free by then if it is not now: it is an older one's */
    else if (pool == NULL && self->n_slots >= 8 * ROOM_AHEAD)
        self->awaited = self->seq - self->n_slots + ROOM_AHEAD - 1;
    bool may = spin_unless(self, self->spin_ns);
    if (may && pool == NULL && self->awaited != NONE)
        fetch_nothing(self, self->seq + ROOM_AHEAD - WRITER_AHEAD, WRITER_AHEAD);
    self->awaited = NONE;
    return may || may_go_on(self);
}

static bool put(Core *self, const char *bytes, size_t size)
{
    if (size > self->room)
        return false;
    uint64_t now = now_ns();
    if (!put_bytes(self, bytes, size, now)) {
        if (!spin_for_room(self, size))
            return false;
        now = now_ns();
        if (!put_bytes(self, bytes, size, now))
            return false;
    }
    self->published_ns = now;
    count_turn(self, 1, now);
    if (readers_parked(self))
        notify(self);
    return true;
}

static PyObject *writer_put(Core *self, PyObject *message)
{
    if (check_unused(self) < 0)
        return NULL;
    if (!PyBytes_CheckExact(message)) {
        PyErr_SetString(PyExc_TypeError, "put() takes bytes");
        return NULL;
    }
    return PyBool_FromLong(put(self, PyBytes_AsString(message), (size_t)PyBytes_Size(message)));
}

/* Send what shows contiguous memory; 0 without an error if it does not, or is no ordinary message, or has no slot. */
static int send_memory(Core *self, PyObject *obj)
{
    Py_buffer memory;
    if (PyObject_GetBuffer(obj, &memory, PyBUF_SIMPLE) < 0) {
        if (!PyErr_ExceptionMatches(PyExc_Exception))
            return -1;
        PyErr_Clear();  /* encoding it says what is wrong with it */
        return 0;
    }
    int sent = check_unused(self) < 0 ? -1 : put(self, memory.buf, (size_t)memory.len);
    PyBuffer_Release(&memory);
    return sent;
}

/* Whether there is a slot for a body of so many bytes, spun for if need be, and if that is worth it; it is claimed. */
static uint8_t *claim_or_spin(Core *self, size_t nbytes)
{
    uint8_t *body = claim(self, nbytes);
    return body == NULL && spin_for_room(self, nbytes) ? claim(self, nbytes) : body;
}

/* The slot that was claimed has been filled, with a body of so many bytes. */
static void publish_filled(Core *self, size_t nbytes)
{
    self->copied += nbytes;
    publish(self);
    count_turn(self, 1, now_ns());
    if (readers_parked(self))
        notify(self);
}

/* Send a message that is not bytes; return None, or the message if it is no ordinary one, or has no slot. */
static PyObject *send_beside(Core *self, PyObject *message)
{
    if (self->beside == NULL || self->beside == Py_None)
        return Py_NewRef(message);
    PyObject *size = call(self->measure, message);
    if (size == NULL)
        return NULL;
    size_t nbytes = PyLong_AsSize_t(size);
    Py_DECREF(size);
    if ((nbytes == (size_t)-1 && PyErr_Occurred()) || check_unused(self) < 0)  /* that, and encoding, run any code */
        return NULL;
    if (nbytes > self->room || claim_or_spin(self, nbytes) == NULL)
        return Py_NewRef(message);
    PyObject *fill = Py_NewRef(self->beside), *begin = begin_at(self);
    PyObject *seq = PyLong_FromUnsignedLongLong(self->seq), *filled = NULL;
    self->in_use++;
    if (begin != NULL && seq != NULL)
        filled = PyObject_CallFunctionObjArgs(fill, begin, message, seq, NULL);
    self->in_use--;
    Py_DECREF(fill);
    Py_XDECREF(begin);
    Py_XDECREF(seq);
    if (filled == NULL)
        return NULL;
    Py_DECREF(filled);
    if (filled != Py_True)  /* which is never freed, nor is False */
        return Py_NewRef(message);
    self->published_ns = load_word(slot_of(self, self->index) + 16);
    publish_filled(self, nbytes);
    Py_RETURN_NONE;
}

static PyObject *send_passed(Core *self, PyObject *obj)
{
    PyObject *message;
    if (self->raw && PyBytes_CheckExact(obj)) {
        message = Py_NewRef(obj);
    } else {
        int sent = self->raw ? send_memory(self, obj) : 0;
        if (sent != 0)
            return sent < 0 ? NULL : Py_NewRef(Py_None);
        message = call(self->code, obj);
        if (message == NULL)
            return NULL;
        if (!PyBytes_CheckExact(message)) {
            PyObject *answer = send_beside(self, message);
            Py_DECREF(message);
            return answer;
        }
        if (check_unused(self) < 0) {  /* encoding runs any code */
            Py_DECREF(message);
            return NULL;
        }
    }
    if (!put(self, PyBytes_AsString(message), (size_t)PyBytes_Size(message)))
        return message;
    Py_DECREF(message);
    Py_RETURN_NONE;
}

PyObject *writer_send(Core *self, PyObject *obj)
{
    int passed = passes(self);
    if (passed <= 0)
        return passed < 0 ? NULL : Py_NewRef(Py_False);
    unsigned long before = begin_use(self);
    PyObject *answer = send_passed(self, obj);
    end_use(self, before);
    return answer;
}

static PyObject *writer_put_many(Core *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 2 || !PyList_CheckExact(args[0])) {
        PyErr_SetString(PyExc_TypeError, "put_many() takes a list and where to begin");
        return NULL;
    }
    Py_ssize_t start = PyLong_AsSsize_t(args[1]), length = PyList_Size(args[0]), n;
    if ((start == -1 && PyErr_Occurred()) || check_unused(self) < 0)
        return NULL;
    if (start < 0) {
        PyErr_SetString(PyExc_ValueError, "put_many() cannot begin before the list does");
        return NULL;
    }
    uint64_t now = now_ns();
    for (n = start; n < length; n++) {
        PyObject *message = PyList_GetItem(args[0], n);
        if (!PyBytes_CheckExact(message) || (size_t)PyBytes_Size(message) > self->room)
            break;
        if (!put_bytes(self, PyBytes_AsString(message), (size_t)PyBytes_Size(message), now))
            break;
    }
    if (n > start) {
        self->published_ns = now;
        count_turn(self, n - start, now_ns());
        if (readers_parked(self))
            notify(self);
    }
    return PyLong_FromSsize_t(n > start ? n - start : 0);
}

static PyMethodDef writer_methods[] = {
    BOTH_ENDS,
    {"free", FAST writer_free, METH_FASTCALL, "Return whether there is room for so many messages."},
    {"blocker", FAST writer_blocker, METH_FASTCALL, "Return which message has to be read by all before there is, or -1."},
    {"spin_for", FAST writer_spin_for, METH_FASTCALL, "Let spins wait for room for so many messages."},
    {"claim", FAST writer_claim, METH_FASTCALL, "Return the next slot for writing so many bytes, or None."},
    {"commit", CALL writer_commit, METH_NOARGS, "Publish the claimed slot; return whether a reader is parked."},
    {"bind_allocate", CALL writer_bind_allocate, METH_O, "Set the callable that allocates memory for chunks, which have none."},
    {"put", CALL writer_put, METH_O, "Publish an encoded message; return whether there was room for it."},
    {"put_many", FAST writer_put_many, METH_FASTCALL, "Publish messages of a list, from one on; return how many."},
    {"send", CALL writer_send, METH_O, "Encode and publish: None, or False if shut, or what was encoded."},
    {"evict", CALL writer_evict, METH_O, "Count a reader as having read everything, now and from now on."},
    {"admit", CALL writer_admit, METH_VARARGS, "Admit a reader in the place of one that was evicted; return its first message."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef writer_attributes[] = {
    {"trace", (getter)writer_trace, (setter)writer_set_trace, "The trace context that the next message goes out with.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot writer_slots[] = {
    {Py_tp_doc, "The writer's end of a ring; see _portable.py."},
    {Py_tp_init, writer_init},
    {Py_tp_dealloc, core_dealloc},
    {Py_tp_traverse, core_traverse},
    {Py_tp_clear, core_clear},
    {Py_tp_methods, writer_methods},
    {Py_tp_getset, writer_attributes},
    {Py_tp_members, members},
    {0, NULL},
};

PyType_Spec writer_spec = {
    "aioshm.ring._native.WriterCore", sizeof(Core), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, writer_slots,
};
