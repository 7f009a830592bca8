/* The chunks of large messages, room for messages, admission and eviction of readers */

#include "core.h"

PyObject *writer_bind_allocate(Core *self, PyObject *allocate)
{
    PyObject *old = self->allocate;
    self->allocate = Py_NewRef(allocate);
    for (size_t n = 0; n < self->n_pools; n++)
        self->pools[n].allocated = 0;
    Py_XDECREF(old);
    Py_RETURN_NONE;
}

/* Take back the chunks whose messages were read by all. */
void reclaim(Core *self, Pool *pool)
{
    while (pool->n_used > 0 && is_finished(self, pool->used[pool->oldest].seq)) {
        size_t number = pool->used[pool->oldest].number, at = pool->n_free++;
        if (self->claimed == pool) {  /* whose chunk stays the last one */
            pool->free[at] = pool->free[at - 1];
            at--;
        }
        pool->free[at] = number;
        pool->n_used--;
        if (++pool->oldest == pool->count)
            pool->oldest = 0;
    }
}

/* Allocate memory for free chunks, until so many have it; -1 with an error. */
static int allocate(Core *self, Pool *pool, size_t wanted)
{
    size_t usable = n_usable(pool), from = pool->allocated, to = from + wanted - usable;
    if (wanted <= usable)
        return 0;
    self->in_use++;
    PyObject *done = PyObject_CallFunction(self->allocate, "nn", (Py_ssize_t)(pool->start + from * pool->stride),
                                           (Py_ssize_t)((to - from) * pool->stride));
    self->in_use--;
    if (done == NULL)
        return -1;
    Py_DECREF(done);
    if (pool->allocated < to)  /* another thread may have called this meanwhile */
        pool->allocated = to;
    return 0;
}

/* Which message has to be read by all before there is room for so many, or NONE; -1 with an error. The sizes of those
 * that take a chunk are in a sequence, or there is none. */
static int find_blocker(Core *self, Py_ssize_t slots, PyObject *large, uint64_t *blocker)
{
    size_t wanted[MAX_POOLS] = {0};
    PyObject *sizes = large == NULL ? NULL : PySequence_Tuple(large);
    if (large != NULL && sizes == NULL)
        return -1;
    for (Py_ssize_t n = 0; sizes != NULL && n < PyTuple_Size(sizes); n++) {
        size_t nbytes = PyLong_AsSize_t(PyTuple_GetItem(sizes, n));
        if (nbytes == (size_t)-1 && PyErr_Occurred()) {
            Py_DECREF(sizes);
            return -1;
        }
        if (self->base != NULL)
            wanted[pool_for(self, nbytes) - self->pools]++;
    }
    Py_XDECREF(sizes);
    if (check_usable(self) < 0)
        return -1;
    if (slots < 1 || (size_t)slots > self->n_slots) {
        PyErr_Format(PyExc_ValueError, "a ring of %zu slots cannot have %zd of them free", self->n_slots, slots);
        return -1;
    }
    size_t last = (self->index + (size_t)slots - 1) % self->n_slots;
    uint64_t after = self->seq + (uint64_t)slots - 1, message = after < self->n_slots ? last : after - self->n_slots;
    *blocker = is_free(self, last) ? NONE : message;
    for (size_t n = 0; n < self->n_pools; n++) {
        Pool *pool = &self->pools[n];
        if (wanted[n] == 0)
            continue;
        if (wanted[n] > pool->count) {
            PyErr_Format(PyExc_ValueError, "a ring of %zu chunks of %zu bytes cannot have %zu of them free", pool->count,
                         pool->room, wanted[n]);
            return -1;
        }
        reclaim(self, pool);
        if (wanted[n] > pool->n_free) {
            message = pool->used[(pool->oldest + wanted[n] - pool->n_free - 1) % pool->count].seq;
            if (*blocker == NONE || *blocker < message)
                *blocker = message;
        } else if (allocate(self, pool, wanted[n]) < 0) {
            return -1;
        }
    }
    return 0;
}

/* The arguments of free(), blocker() and spin_for(): how many messages, and the sizes of the large ones. */
static int asked_blocker(Core *self, PyObject *const *args, Py_ssize_t nargs, uint64_t *blocker)
{
    Py_ssize_t slots = 1;
    if (nargs > 2) {
        PyErr_SetString(PyExc_TypeError, "this takes at most two arguments");
        return -1;
    }
    if (nargs > 0) {
        slots = PyLong_AsSsize_t(args[0]);
        if (slots == -1 && PyErr_Occurred())
            return -1;
    }
    return find_blocker(self, slots, nargs > 1 ? args[1] : NULL, blocker);
}

static PyObject *blocker_number(uint64_t blocker)
{
    return blocker == NONE ? PyLong_FromLong(-1) : PyLong_FromUnsignedLongLong(blocker);
}

PyObject *writer_free(Core *self, PyObject *const *args, Py_ssize_t nargs)
{
    uint64_t blocker;
    return asked_blocker(self, args, nargs, &blocker) < 0 ? NULL : PyBool_FromLong(blocker == NONE);
}

PyObject *writer_blocker(Core *self, PyObject *const *args, Py_ssize_t nargs)
{
    uint64_t blocker;
    return asked_blocker(self, args, nargs, &blocker) < 0 ? NULL : blocker_number(blocker);
}

PyObject *writer_spin_for(Core *self, PyObject *const *args, Py_ssize_t nargs)
{
    uint64_t blocker;
    if (asked_blocker(self, args, nargs, &blocker) < 0)
        return NULL;
    self->awaited = blocker;
    return blocker_number(blocker);
}

PyObject *writer_evict(Core *self, PyObject *arg)
{
    Py_ssize_t reader = PyLong_AsSsize_t(arg);
    if ((reader == -1 && PyErr_Occurred()) || check_usable(self) < 0)
        return NULL;
    if (reader < 0 || (size_t)reader >= self->n_reader) {
        PyErr_Format(PyExc_IndexError, "there is no reader %zd", reader);
        return NULL;
    }
    self->unread[reader] = 1;
    for (size_t index = 0; index < self->n_slots; index++)
        store_release(flags_of(self, index) + 1 + reader, 1);
    store_release(self->base + READERS_PARKED + reader, 0);
    while (self->n_places > 0 && self->unread[self->n_places - 1])
        self->n_places--;
    Py_RETURN_NONE;
}

/* The chunks of the size that one of this number has; NULL if there is none. */
static Pool *pool_of(Core *self, uint64_t number)
{
    for (size_t n = 0; n < self->n_pools; n++)
        if (number >= self->pools[n].first && number - self->pools[n].first < self->pools[n].count)
            return &self->pools[n];
    return NULL;
}

/* Whether slot and chunk still have a message: 1, 0, or -1 with an error. */
static int has_message(Core *self, uint64_t seq, PyObject *gone)
{
    size_t index = seq % self->n_slots;
    const uint8_t *slot = slot_of(self, index);
    uint64_t chunk = load_word(slot + CHUNK);
    if (!load_acquire(flags_of(self, index)) || load_word(slot + 8) != seq)
        return 0;
    if (!is_elsewhere(slot)) {
        Pool *pool = chunk == 0 ? NULL : pool_of(self, chunk - 1);
        return chunk == 0 || (pool != NULL && load_word(chunk_of(self, pool, chunk - 1)) == seq + 1);
    }
    if (gone == Py_None)
        return 1;
    PyObject *number = PyLong_FromUnsignedLongLong(seq), *answer = number == NULL ? NULL : call(gone, number);
    Py_XDECREF(number);
    int truth = answer == NULL ? -1 : PyObject_IsTrue(answer);
    Py_XDECREF(answer);
    return truth < 0 ? -1 : !truth;
}

/* Take the chunk of a message out of the free ones again, if it is one of them. */
static void keep_again(Core *self, uint64_t seq)
{
    const uint8_t *slot = slot_of(self, seq % self->n_slots);
    uint64_t chunk = load_word(slot + CHUNK);
    Pool *pool = chunk == 0 || is_elsewhere(slot) ? NULL : pool_of(self, chunk - 1);
    if (pool == NULL || (pool->n_used > 0 && pool->used[pool->oldest].seq <= seq))
        return;
    size_t at = 0, n_free = pool->n_free - (self->claimed == pool);  /* whose chunk stays the last one */
    while (at < n_free && pool->free[at] != chunk - 1)
        at++;
    if (at == n_free)
        return;
    memmove(pool->free + at, pool->free + at + 1, (--pool->n_free - at) * sizeof *pool->free);
    pool->oldest = (pool->oldest == 0 ? pool->count : pool->oldest) - 1;
    pool->used[pool->oldest] = (Used){seq, chunk - 1};
    pool->n_used++;
}

PyObject *writer_admit(Core *self, PyObject *args)
{
    Py_ssize_t reader, history;
    PyObject *gone;
    if (!PyArg_ParseTuple(args, "nnO:admit", &reader, &history, &gone) || check_unused(self) < 0)
        return NULL;
    if (reader < 0 || (size_t)reader >= self->n_reader) {
        PyErr_Format(PyExc_IndexError, "there is no reader %zd", reader);
        return NULL;
    }
    if (history < 0) {
        PyErr_SetString(PyExc_ValueError, "there are no fewer than 0 messages");
        return NULL;
    }
    uint64_t most = (size_t)history < self->n_slots ? (size_t)history : self->n_slots, first = self->seq;
    int has = 1;
    self->in_use++;
    while (first > 0 && self->seq - first < most && (has = has_message(self, first - 1, gone)) > 0)
        first--;
    self->in_use--;
    if (has < 0)
        return NULL;
    for (uint64_t seq = self->seq; seq > first; seq--) {
        keep_again(self, seq - 1);
        store_release(flags_of(self, (seq - 1) % self->n_slots) + 1 + reader, 0);
    }
    self->unread[reader] = 0;
    if (self->n_places <= (size_t)reader)
        self->n_places = (size_t)reader + 1;
    store_release(self->base + READERS_PARKED + reader, 0);
    return PyLong_FromUnsignedLongLong(first);
}
