/* The hot path of a ring in C11: the same classes and functions as _portable.py, which says what each of them does.
 *
 * Written against the stable ABI, so that one build serves every CPython from 3.11 on. Everything runs under the GIL,
 * except a long spin, which touches nothing but the flags.
 *
 * What other processes write is read once, each byte of it: memcmp may look twice at a byte that differs, and a compiler
 * may read again what it has copied, and either could then act on two different answers.
 */

#ifndef Py_GIL_DISABLED         /* free-threaded builds of CPython have no stable ABI */
#define Py_LIMITED_API 0x030B0000
#endif
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <limits.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#if defined(__linux__)
#include <sys/timerfd.h>
#endif

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the words of a slot's header are little-endian; the Python twin serves this machine"
#endif

/* layout.py */
#define WRITER_LINE 64
#define WRITER_PARKED 128
#define READERS_PARKED 192
#define SLOT_HEADER_BYTES 64
#define CHUNK 32
#define SIZE 40
#define OVERFLOW_SIZE 52
#define CHUNK_HEADER_BYTES 64
#define SPINNING 9
#define BYTES 40
#define OVERFLOWS 48
#define LATENCY_NS 24
#define LATENCY_BUCKETS 32
#define LATENCY_FIRST_BIT 8
#define LATENCY_EVERY 8
#define TRACE_BYTES 26
#define TRAIL 1024            /* trace contexts of the latest messages, which a reader keeps */

#define INLINE 1              /* codec/frames.py: the first byte of the header of a message that lies in the ring */
#define OVERFLOW 2            /* codec/frames.py: the first byte of the header of a message that lies elsewhere */


#define MAX_POOLS 4
#define COPY_MAX 65536        /* larger messages are decoded in place, by the caller, if they are decoded at all */
#define TAKE_MAX 4194304      /* codec/buffers.py: HUGE_PAGE_BYTES; larger arrays are copied by Python, and what is not decoded */
#define HELD_SPIN_NS 50000    /* a longer spin releases the GIL */
#define LOOKS 16              /* between two readings of the clock */
#define BATCH_LOOKS 8         /* messages of a batch between two readings of the clock */
#define RUSH_NS 20000         /* between two messages: they come in quick succession */
#define WRITER_AHEAD 16       /* slots: so far ahead a writer fetches lines, which readers on other CPUs have had last */
#define READER_AHEAD 4        /* the same for a reader */
#define ROOM_AHEAD 64         /* slots that a writer spins for, if it has none: looking at those that its readers are at
                               * holds them up, and they have hundreds of messages to go on with */

/* A chunk that is in use: which one, and the message in it. */
typedef struct {
    uint64_t seq;
    size_t number;
} Used;

/* The chunks of one size. What a writer keeps of them: a stack of the free ones, and a ring of the others, in the order
 * of the messages. */
typedef struct {
    size_t start, room, stride, count, first;
    size_t *free;
    Used *used;
    size_t n_free, oldest, n_used;
    size_t allocated;         /* how many, from the first on, have memory: all of them, but for a named segment */
} Pool;

typedef struct {
    PyObject_HEAD
    Py_buffer buffer;
    uint8_t *base;            /* NULL once closed */
    PyObject *slots;
    size_t n_reader, room, inline_bytes, n_slots, slot_bytes, flag_bytes, slots_at, flags_at, n_pools;
    Pool pools[MAX_POOLS];    /* the largest chunks first */
    Pool *claimed;            /* of what size the claimed slot has a chunk, which is the last of the free ones */
    uint8_t *own;             /* this end's line */
    uint8_t *latencies;       /* a reader's histogram */
    bool rushes;              /* whether messages come in quick succession, so that not each one's latency is counted */
    uint64_t finished_ns;     /* when that was the last time */
    unsigned long long claimed_bytes;  /* of the message that the claimed slot is for */
    size_t n_places;          /* readers but those behind the last one that was not evicted, whose flags stay 1 */
    size_t reader;            /* a reader's flag within the flags of a slot */
    uint8_t *unread;          /* what a writer sets the reader flags to: 1 for those that were evicted */
    uint64_t seq;
    size_t index;
    uint64_t unfetched, n_unfetched;  /* from which message on a writer fetches nothing ahead, and for how many */
    uint64_t awaited;         /* the message that a writer's spin wants read by all; NONE: what the next slot has */
    /* How messages are coded */
    uint64_t what;
    bool raw;
    PyObject *code, *on_parked;
    PyObject *allocate;       /* gives chunks of a named segment their memory, or NULL: all have it */
    PyObject *beside, *measure;  /* what handles messages that have buffers beside them; see bind_beside */
    PyObject *undelivered;    /* a list, where calls block, or NULL: see bind_undelivered */
    char kept;
    unsigned long long published_ns;
    /* The gate */
    char open;
    long long turn, turn_ends_ns;
    unsigned long thread;     /* whose this end is; where any thread may use it, see `user` */
    unsigned long user;       /* the thread that is using it just now, 0: none */
    PyObject *runs;
    /* Spinning */
    long long spin_ns;
    char spin_yields;
    unsigned long long spins, hits, spun_ns;
    bool made;
    char quiet;               /* whether send and receive leave it to their caller to tell a parked end */
    char hushed, owes;        /* whether one of them is under way; whether there is somebody to be told */
    unsigned long long copied;  /* bytes, into messages; or out of those that were leased */
    unsigned long long due;   /* from which message on: before it, the other end is to be told later anyway */
    int in_use;               /* calls that release the GIL, or run code of others, with the memory in their hands */
    PyObject *nothing, *elsewhere;
    /* Trace contexts, where slots have any */
    size_t trace_at;          /* where in a slot; 0: they have none */
    uint8_t trace[TRACE_BYTES];  /* what a writer's next message goes out with */
    uint8_t *trail;           /* those of the latest messages that a reader has taken, in turn */
    uint64_t n_trail;         /* how many it has noted */
    uint64_t noted;           /* the message whose was noted last */
    unsigned long long garbled;
} Core;

typedef struct {
    PyObject *nothing, *elsewhere;
    PyTypeObject *writer, *reader, *call, *calls;
} State;

/* Memory */

static inline void relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("isb");  /* "yield" is a no-op on most of them */
#endif
}

static inline uint8_t load_acquire(const uint8_t *p)
{
    return atomic_load_explicit((const _Atomic uint8_t *)p, memory_order_acquire);
}

static inline void store_release(uint8_t *p, uint8_t value)
{
    atomic_store_explicit((_Atomic uint8_t *)p, value, memory_order_release);
}

static inline uint64_t load_word(const uint8_t *p)
{
    return atomic_load_explicit((const _Atomic uint64_t *)p, memory_order_relaxed);
}

/* Whether all of these bytes are zero (every == 0) or one (every == 1), looking at each of them once. */
static inline bool all_are(const uint8_t *p, size_t amount, uint8_t every)
{
    typedef const volatile uint64_t __attribute__((aligned(1), may_alias)) word;
    for (; amount >= 8; amount -= 8, p += 8)
        if (*(word *)p != every * UINT64_C(0x0101010101010101))
            return false;
    for (; amount > 0; amount--, p++)
        if (atomic_load_explicit((const _Atomic uint8_t *)p, memory_order_relaxed) != every)
            return false;
    return true;
}

static inline void store_count(uint8_t *line, uint64_t value)
{
    atomic_store_explicit((_Atomic uint64_t *)line, value, memory_order_release);
}

/* Add to a word that this end alone writes, and others only look at. */
static inline void add_to_word(uint8_t *p, uint64_t value)
{
    atomic_store_explicit((_Atomic uint64_t *)p, load_word(p) + value, memory_order_relaxed);
}

static inline void full_fence(void)
{
    atomic_thread_fence(memory_order_seq_cst);
}

static inline uint64_t now_ns(void)
{
    struct timespec t;
#if defined(__APPLE__)
    clock_gettime(CLOCK_UPTIME_RAW, &t);  /* what time.monotonic() is there */
#else
    clock_gettime(CLOCK_MONOTONIC, &t);
#endif
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static inline uint8_t *flags_of(const Core *self, size_t index)
{
    return self->base + self->flags_at + index * self->flag_bytes;
}

static inline uint8_t *slot_of(const Core *self, size_t index)
{
    return self->base + self->slots_at + index * self->slot_bytes;
}

static inline bool is_free(const Core *self, size_t index)
{
    uint8_t *flags = flags_of(self, index), written = load_acquire(flags);
    if (!written)
        return true;
    bool all = written == 1 && all_are(flags + 1, self->n_places, 1);
    atomic_thread_fence(memory_order_acquire);  /* the chunk is filled only after every reader's flag was seen */
    return all;
}

static inline bool is_ready(const Core *self, size_t index)
{
    uint8_t *flags = flags_of(self, index);
    /* In this order: what is cleared already and written still, from the lap before, is just being published. */
    return !load_acquire(flags + self->reader) && load_acquire(flags);
}

/* The slot so many further on, of a ring that has more. */
static inline size_t index_ahead(const Core *self, size_t slots)
{
    size_t index = self->index + slots;
    return index < self->n_slots ? index : index - self->n_slots;
}

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

#define NONE UINT64_MAX

/* Whether a message was read by all. */
static inline bool is_finished(const Core *self, uint64_t seq)
{
    return seq + self->n_slots < self->seq || is_free(self, seq % self->n_slots);
}

static inline bool may_go_on(const Core *self)
{
    if (self->reader)
        return is_ready(self, self->index);
    return self->awaited == NONE ? is_free(self, self->index) : is_finished(self, self->awaited);
}

static inline void advance(Core *self)
{
    self->seq++;
    if (++self->index == self->n_slots)
        self->index = 0;
}

/* What every method begins with */

static int check_usable(Core *self)
{
    if (self->base == NULL) {
        PyErr_SetString(PyExc_ValueError, "the ring was closed");
        return -1;
    }
    return 0;
}

static int check_unused(Core *self)
{
    if (check_usable(self) < 0)
        return -1;
    if (self->in_use) {
        PyErr_SetString(PyExc_RuntimeError, "the ring is in use: this was called from inside of a batch");
        return -1;
    }
    return 0;
}

/* Call one of the callables, which may replace itself by bind() meanwhile; it is NULL where that was never made. */
static PyObject *call(PyObject *callable, PyObject *arg)
{
    if (callable == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "the ring is being taken down");
        return NULL;
    }
    Py_INCREF(callable);
    PyObject *result = arg == NULL ? PyObject_CallNoArgs(callable) : PyObject_CallFunctionObjArgs(callable, arg, NULL);
    Py_DECREF(callable);
    return result;
}

/* Whether the gate lets this thread pass, if the loop runs. */
static bool lets_in(const Core *self)
{
    unsigned long me = PyThread_get_thread_ident();
    return self->open && self->turn > 0 && !self->in_use
           && (self->runs == Py_None ? self->user == 0 || self->user == me : self->thread == me);
}

/* Whether the gate lets this thread pass: 1, 0, or -1 with an error. */
static int passes(Core *self)
{
    if (!lets_in(self))
        return 0;
    int truth = 1;
    if (self->runs != Py_None) {
        PyObject *answer = call(self->runs, NULL);
        if (answer == NULL)
            return -1;
        truth = answer == Py_True ? 1 : answer == Py_False ? 0 : PyObject_IsTrue(answer);
        Py_DECREF(answer);
    }
    return truth > 0 && check_usable(self) < 0 ? -1 : truth;
}

/* Keep the other threads out, where any thread may use this end, while code of others may run; return what to restore. */
static inline unsigned long begin_use(Core *self)
{
    unsigned long before = self->user;
    self->user = PyThread_get_thread_ident();
    self->hushed = self->quiet;
    return before;
}

static inline void end_use(Core *self, unsigned long before)
{
    self->user = before;
    self->hushed = 0;
}

static inline void count_turn(Core *self, Py_ssize_t messages, uint64_t now)
{
    self->turn = (long long)now < self->turn_ends_ns && messages < self->turn ? self->turn - messages : 0;
}

static void notify(Core *self)
{
    if (self->hushed) {
        if (self->seq >= self->due)
            self->owes = 1;
        return;
    }
    if (self->on_parked == Py_None)
        return;
    PyObject *on_parked = Py_XNewRef(self->on_parked), *done = call(on_parked, NULL);
    if (done == NULL)
        PyErr_WriteUnraisable(on_parked);
    Py_XDECREF(done);
    Py_XDECREF(on_parked);
}

/* Spinning */

static bool spin(Core *self, long long budget_ns)
{
    uint64_t began = now_ns(), now = began;
    bool hit = false;
    self->spins++;
    store_release(self->own + SPINNING, 1);
    while (!hit && (long long)(now - began) < budget_ns) {
        for (int look = 0; look < LOOKS && !(hit = may_go_on(self)); look++)
            relax();
        if (!hit && self->spin_yields) {
            sched_yield();
            hit = may_go_on(self);
        }
        now = now_ns();
    }
    store_release(self->own + SPINNING, 0);
    self->hits += hit;
    self->spun_ns += now - began;
    return hit;
}

/* Spin if there is a reason to, without the GIL if for long, or if others have the CPU meanwhile. */
static bool spin_unless(Core *self, long long budget_ns)
{
    if (may_go_on(self))
        return true;
    if (budget_ns <= HELD_SPIN_NS && !self->spin_yields)
        return spin(self, budget_ns);
    bool hit;
    self->in_use++;
    Py_BEGIN_ALLOW_THREADS
    hit = spin(self, budget_ns);
    Py_END_ALLOW_THREADS
    self->in_use--;
    return hit;
}

static PyObject *core_spin(Core *self, PyObject *arg)
{
    long long budget_ns = PyLong_AsLongLong(arg);
    if ((budget_ns == -1 && PyErr_Occurred()) || check_usable(self) < 0)
        return NULL;
    return PyBool_FromLong(spin_unless(self, budget_ns));
}

/* Both ends */

static PyObject *core_bind(Core *self, PyObject *args)
{
    PyObject *code, *number, *on_parked;
    int raw;
    if (!PyArg_ParseTuple(args, "OOpO:bind", &code, &number, &raw, &on_parked))
        return NULL;
    unsigned long long what = PyLong_AsUnsignedLongLong(number);
    if (what == (unsigned long long)-1 && PyErr_Occurred())
        return NULL;
    PyObject *old_code = self->code, *old_parked = self->on_parked;
    self->code = Py_NewRef(code);
    self->on_parked = Py_NewRef(on_parked);
    self->what = what;
    self->raw = raw;
    Py_XDECREF(old_code);
    Py_XDECREF(old_parked);
    Py_RETURN_NONE;
}

static PyObject *core_bind_beside(Core *self, PyObject *args)
{
    PyObject *beside, *measure = Py_None;
    if (!PyArg_ParseTuple(args, "O|O:bind_beside", &beside, &measure))
        return NULL;
    PyObject *old = self->beside, *old_measure = self->measure;
    self->beside = Py_NewRef(beside);
    self->measure = Py_NewRef(measure);
    Py_XDECREF(old);
    Py_XDECREF(old_measure);
    Py_RETURN_NONE;
}

static PyObject *writer_bind_allocate(Core *self, PyObject *allocate)
{
    PyObject *old = self->allocate;
    self->allocate = Py_NewRef(allocate);
    for (size_t n = 0; n < self->n_pools; n++)
        self->pools[n].allocated = 0;
    Py_XDECREF(old);
    Py_RETURN_NONE;
}

static PyObject *core_belong(Core *self, PyObject *runs)
{
    PyObject *old = self->runs;
    self->runs = Py_NewRef(runs);
    self->thread = self->user = PyThread_get_thread_ident();
    Py_XDECREF(old);
    Py_RETURN_NONE;
}

static PyObject *core_passes(Core *self, PyObject *Py_UNUSED(ignored))
{
    int passed = passes(self);
    return passed < 0 ? NULL : PyBool_FromLong(passed);
}

static PyObject *core_close(Core *self, PyObject *Py_UNUSED(ignored))
{
    if (self->in_use) {
        PyErr_SetString(PyExc_BufferError, "the ring is in use");
        return NULL;
    }
    if (self->base != NULL) {
        self->base = NULL;
        self->open = 0;
        PyBuffer_Release(&self->buffer);
    }
    Py_RETURN_NONE;
}

static PyObject *slot_at(Core *self)
{
    PyObject *slots = Py_XNewRef(self->slots), *slot;
    if (slots == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "the ring is being taken down");
        return NULL;
    }
    PyObject *index = PyLong_FromSize_t(self->index);
    slot = index == NULL ? NULL : PyObject_GetItem(slots, index);
    Py_XDECREF(index);
    Py_DECREF(slots);
    return slot;
}

/* Where the slot begins. */
static PyObject *begin_at(const Core *self)
{
    return PyLong_FromSize_t(self->slots_at + self->index * self->slot_bytes);
}

static inline uint8_t *chunk_of(const Core *self, const Pool *pool, size_t number)
{
    return self->base + pool->start + (number - pool->first) * pool->stride;
}

/* The writer's end: room */

/* The smallest chunks that have room for so many bytes; the largest, if none have. */
static inline Pool *pool_for(Core *self, size_t nbytes)
{
    size_t n = self->n_pools - 1;
    while (n > 0 && self->pools[n].room < nbytes)
        n--;
    return &self->pools[n];
}

/* Take back the chunks whose messages were read by all. */
static void reclaim(Core *self, Pool *pool)
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

/* How many free chunks have memory. Those that have none are the last ones to be taken from the stack. */
static inline size_t n_usable(const Pool *pool)
{
    size_t without = pool->count - pool->allocated;
    return pool->n_free > without ? pool->n_free - without : 0;
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

static PyObject *writer_free(Core *self, PyObject *const *args, Py_ssize_t nargs)
{
    uint64_t blocker;
    return asked_blocker(self, args, nargs, &blocker) < 0 ? NULL : PyBool_FromLong(blocker == NONE);
}

static PyObject *writer_blocker(Core *self, PyObject *const *args, Py_ssize_t nargs)
{
    uint64_t blocker;
    return asked_blocker(self, args, nargs, &blocker) < 0 ? NULL : blocker_number(blocker);
}

static PyObject *writer_spin_for(Core *self, PyObject *const *args, Py_ssize_t nargs)
{
    uint64_t blocker;
    if (asked_blocker(self, args, nargs, &blocker) < 0)
        return NULL;
    self->awaited = blocker;
    return blocker_number(blocker);
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

/* The writer's end: publishing */

/* Whether a message lies elsewhere: its slot then names no chunk, though it has one. */
static inline bool is_elsewhere(const uint8_t *slot)
{
    return (load_word(slot) & 0xff) == OVERFLOW;
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

static PyObject *writer_send(Core *self, PyObject *obj)
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

static PyObject *writer_evict(Core *self, PyObject *arg)
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

static PyObject *writer_admit(Core *self, PyObject *args)
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

/* A reader's end */

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

/* Note the trace context of the next message, or zeros where it is none. */
static void note_trace(Core *self)
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

static PyObject *reader_note_trace(Core *self, PyObject *Py_UNUSED(ignored))
{
    if (check_unused(self) < 0)
        return NULL;
    if (self->trace_at)
        note_trace(self);
    Py_RETURN_NONE;
}

static PyObject *reader_traces(Core *self, PyObject *arg)
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

static PyObject *writer_trace(Core *self, void *Py_UNUSED(closure))
{
    return PyBytes_FromStringAndSize((const char *)self->trace, TRACE_BYTES);
}

static int writer_set_trace(Core *self, PyObject *trace, void *Py_UNUSED(closure))
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

static PyObject *reader_receive(Core *self, PyObject *Py_UNUSED(ignored))
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

/* Calls: what the awaited face's enqueue() and dequeue() return, a coroutine without a frame where it need not wait */

typedef struct {
    PyObject_HEAD
    PyObject *core;           /* that is asked first, or NULL */
    PyObject *rest, *whole, *fail;
    void *spare;              /* the memory of a call that has ended */
    PyTypeObject *writer, *reader, *call;
} Calls;

typedef enum { NEW, RUNNING, WAITING, ENDED } Stage;
typedef enum { RECEIVES, SENDS, ITERATES, CLOSES } CallKind;

typedef struct {
    PyObject_HEAD
    Calls *calls;
    PyObject *args[3];        /* enqueue: obj, timeout; dequeue: timeout, cancel, indefinite */
    PyObject *rest;           /* the coroutine that goes on where the core could not */
    Stage stage;
    CallKind kind;
} Call;

static const char *const ENQUEUE[] = {"obj", "timeout"}, *const DEQUEUE[] = {"timeout", "cancel", "indefinite"};

/* Find the arguments by place or name; those that are not there stay NULL. */
static int find_arguments(const char *name, const char *const *names, Py_ssize_t most, PyObject *const *args,
                          Py_ssize_t nargs, PyObject *kwnames, PyObject **found)
{
    if (nargs > most) {
        PyErr_Format(PyExc_TypeError, "%s() takes at most %zd arguments (%zd given)", name, most, nargs);
        return -1;
    }
    for (Py_ssize_t n = 0; n < nargs; n++)
        found[n] = args[n];
    for (Py_ssize_t n = 0; kwnames != NULL && n < PyTuple_Size(kwnames); n++) {
        PyObject *word = PyTuple_GetItem(kwnames, n);
        Py_ssize_t at = 0;
        while (at < most && PyUnicode_CompareWithASCIIString(word, names[at]) != 0)
            at++;
        if (at == most || found[at] != NULL) {
            PyErr_Format(PyExc_TypeError, "%s() got %s argument '%U'", name,
                         at == most ? "an unexpected keyword" : "multiple values for", word);
            return -1;
        }
        found[at] = args[nargs + n];
    }
    return 0;
}

static PyObject *new_call(Calls *calls, CallKind kind, PyObject *const *args)
{
    Call *made = calls->spare;
    if (made != NULL) {
        calls->spare = NULL;
        PyObject_Init((PyObject *)made, calls->call);
    } else {
        made = PyObject_GC_New(Call, calls->call);
        if (made == NULL)
            return NULL;
    }
    made->calls = (Calls *)Py_NewRef((PyObject *)calls);
    for (int n = 0; n < 3; n++)
        made->args[n] = Py_XNewRef(args[n]);
    made->rest = NULL;
    made->stage = NEW;
    made->kind = kind;
    PyObject_GC_Track(made);
    return (PyObject *)made;
}

static PyObject *calls_enqueue(Calls *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    PyObject *found[3] = {NULL};
    if (find_arguments("enqueue", ENQUEUE, 2, args, nargs, kwnames, found) < 0)
        return NULL;
    if (found[0] == NULL) {
        PyErr_SetString(PyExc_TypeError, "enqueue() missing 1 required positional argument: 'obj'");
        return NULL;
    }
    return new_call(self, SENDS, found);
}

static PyObject *calls_dequeue(Calls *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    PyObject *found[3] = {NULL};
    if (find_arguments("dequeue", DEQUEUE, 3, args, nargs, kwnames, found) < 0)
        return NULL;
    return new_call(self, RECEIVES, found);
}

static PyObject *calls_aclose(Calls *self, PyObject *Py_UNUSED(ignored))
{
    PyObject *none[3] = {NULL};
    return new_call(self, CLOSES, none);
}



/* Let go of everything but the memory. */
static void end_call(Call *self)
{
    self->stage = ENDED;
    for (int n = 0; n < 3; n++)
        Py_CLEAR(self->args[n]);
    Py_CLEAR(self->rest);
}

/* Let the error be raised as `shown` raises it, always; one that says nothing of the message stays as it is. */
static void raise_as(PyObject *shown)
{
    if (shown == NULL || shown == Py_None || !PyErr_ExceptionMatches(PyExc_Exception))
        return;
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    PyErr_NormalizeException(&type, &error, &traceback);
    if (traceback != NULL)
        PyException_SetTraceback(error, traceback);
    PyObject *nothing = call(shown, error);
    if (nothing != NULL) {  /* it raises, always */
        Py_DECREF(nothing);
        PyErr_Restore(type, error, traceback);
        return;
    }
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(traceback);
}

/* Have the core do it, if it can: 1 with the result, 0 with the coroutine that goes on, -1 with an error. */
static int begin_call(Call *self, PyObject **result)
{
    Calls *calls = self->calls;
    const bool sends = self->kind == SENDS;
    PyObject *core = calls->core, *timeout = self->args[sends], *answer = NULL;
    if (self->kind == CLOSES) {
        *result = Py_NewRef(Py_None);
        return 1;
    }
    timeout = timeout == NULL ? Py_None : timeout;
    if (core != NULL && Py_TYPE(core) != (sends ? calls->writer : calls->reader))
        core = NULL;
    if (core != NULL) {
        Py_INCREF(core);
        answer = sends ? writer_send((Core *)core, self->args[0]) : reader_receive((Core *)core, NULL);
        if (answer == NULL) {
            if (!sends)
                raise_as(calls->fail);
            Py_DECREF(core);
            return -1;
        }
        bool done = sends ? answer == Py_None
                          : answer != ((Core *)core)->nothing && answer != ((Core *)core)->elsewhere;
        Py_DECREF(core);
        if (done) {
            *result = answer;
            return 1;
        }
    }
    if (sends) {
        PyObject *message = answer == NULL ? Py_False : answer;
        self->rest = PyObject_CallFunctionObjArgs(calls->rest, self->args[0], message, timeout, NULL);
    } else {
        PyObject *cancel = self->args[1] == NULL ? Py_None : self->args[1];
        PyObject *indefinite = self->args[2] == NULL ? Py_False : self->args[2];
        PyObject *callable = core == NULL && calls->whole != Py_None ? calls->whole : calls->rest;
        self->rest = PyObject_CallFunctionObjArgs(callable, timeout, cancel, indefinite, NULL);
    }
    Py_XDECREF(answer);
    return self->rest == NULL ? -1 : 0;
}

/* Raise what a coroutine raises in the place of a StopIteration, which would be its return (PEP 479). */
static void refuse_stop(void)
{
    PyObject *type, *stop, *traceback;
    PyErr_Fetch(&type, &stop, &traceback);
    PyErr_NormalizeException(&type, &stop, &traceback);
    PyErr_SetString(PyExc_RuntimeError, "coroutine raised StopIteration");
    PyObject *error_type, *error, *error_traceback;
    PyErr_Fetch(&error_type, &error, &error_traceback);
    PyErr_NormalizeException(&error_type, &error, &error_traceback);
    PyException_SetCause(error, stop);  /* takes the reference */
    PyErr_Restore(error_type, error, error_traceback);
    Py_XDECREF(type);
    Py_XDECREF(traceback);
}

static bool is_running(const Call *self)
{
    if (self->stage == RUNNING)
        PyErr_SetString(PyExc_ValueError, "coroutine already executing");
    return self->stage == RUNNING;
}

static PySendResult call_send(Call *self, PyObject *sent, PyObject **result)
{
    *result = NULL;
    if (is_running(self))
        return PYGEN_ERROR;
    if (self->stage == ENDED) {
        PyErr_SetString(PyExc_RuntimeError, "cannot reuse already awaited coroutine");
        return PYGEN_ERROR;
    }
    if (self->stage == NEW) {
        if (sent != NULL && sent != Py_None) {
            PyErr_SetString(PyExc_TypeError, "can't send non-None value to a just-started coroutine");
            return PYGEN_ERROR;
        }
        self->stage = RUNNING;
        int done = begin_call(self, result);
        if (done != 0) {
            end_call(self);
            if (done < 0 && PyErr_ExceptionMatches(PyExc_StopIteration))
                refuse_stop();
            return done > 0 ? PYGEN_RETURN : PYGEN_ERROR;
        }
        sent = Py_None;
    }
    self->stage = RUNNING;
    PySendResult outcome = PyIter_Send(self->rest, sent, result);
    if (outcome == PYGEN_NEXT)
        self->stage = WAITING;
    else
        end_call(self);
    return outcome;
}

/* Return what was yielded, or raise what a coroutine that has ended raises. */
static PyObject *as_coroutine(PySendResult outcome, PyObject *result)
{
    if (outcome != PYGEN_RETURN)
        return result;
    PyObject *stop = PyObject_CallFunctionObjArgs(PyExc_StopIteration, result, NULL);
    Py_DECREF(result);
    if (stop != NULL) {
        PyErr_SetObject(PyExc_StopIteration, stop);
        Py_DECREF(stop);
    }
    return NULL;
}

/* Let `args`, of a coroutine's throw(), be raised. */
static void raise_thrown(PyObject *args)
{
    PyObject *type, *value = Py_None, *traceback = Py_None;
    if (!PyArg_ParseTuple(args, "O|OO:throw", &type, &value, &traceback))
        return;
    bool raised = PyExceptionInstance_Check(type);
    if (!raised && !PyExceptionClass_Check(type)) {
        PyErr_SetString(PyExc_TypeError, "exceptions must be classes or instances deriving from BaseException");
        return;
    }
    PyErr_Restore(Py_NewRef(raised ? (PyObject *)Py_TYPE(type) : type), Py_NewRef(raised ? type : value),
                  traceback == Py_None ? NULL : Py_NewRef(traceback));
}

static PyObject *call_send_method(Call *self, PyObject *sent)
{
    PyObject *result;
    PySendResult outcome = call_send(self, sent, &result);
    return as_coroutine(outcome, result);
}

static PyObject *call_next(Call *self)
{
    return call_send_method(self, Py_None);
}

static PyObject *call_throw(Call *self, PyObject *args)
{
    if (is_running(self))
        return NULL;
    if (self->stage == ENDED) {
        PyErr_SetString(PyExc_RuntimeError, "cannot reuse already awaited coroutine");
        return NULL;
    }
    if (self->stage == NEW) {
        end_call(self);
        raise_thrown(args);
        return NULL;
    }
    self->stage = RUNNING;
    PyObject *throw = PyObject_GetAttrString(self->rest, "throw");
    PyObject *result = throw == NULL ? NULL : PyObject_CallObject(throw, args);
    Py_XDECREF(throw);
    if (result != NULL)
        self->stage = WAITING;
    else
        end_call(self);
    return result;
}

static PyObject *call_close(Call *self, PyObject *Py_UNUSED(ignored))
{
    if (is_running(self))
        return NULL;
    PyObject *closed = Py_NewRef(Py_None);
    if (self->stage == WAITING) {
        self->stage = RUNNING;
        Py_DECREF(closed);
        closed = PyObject_CallMethod(self->rest, "close", NULL);
    }
    end_call(self);
    return closed;
}

static PyObject *call_await(Call *self)
{
    /* anext(iterator, default) asks again before each step, and coroutines let that pass. */
    if ((self->stage == RUNNING || self->stage == WAITING) && self->kind != ITERATES) {
        PyErr_SetString(PyExc_RuntimeError, "coroutine is being awaited already");
        return NULL;
    }
    return Py_NewRef((PyObject *)self);
}

static int call_traverse(Call *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE((PyObject *)self));
    Py_VISIT(self->calls);
    for (int n = 0; n < 3; n++)
        Py_VISIT(self->args[n]);
    Py_VISIT(self->rest);
    return 0;
}

static int call_clear(Call *self)
{
    for (int n = 0; n < 3; n++)
        Py_CLEAR(self->args[n]);
    Py_CLEAR(self->rest);
    return 0;
}

static const char *name_of(const Call *self)
{
    return self->kind == SENDS    ? "MessageQueue.enqueue"
           : self->kind == CLOSES ? "MessageQueue.aclose"
                                  : "MessageQueue.dequeue";
}

static void call_dealloc(Call *self)
{
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    Calls *calls = self->calls;
    PyObject_GC_UnTrack(self);
    if (self->stage == NEW) {
        PyObject *kind, *error, *traceback;
        PyErr_Fetch(&kind, &error, &traceback);
        if (PyErr_WarnFormat(PyExc_RuntimeWarning, 1, "coroutine '%s' was never awaited", name_of(self)) < 0)
            PyErr_WriteUnraisable((PyObject *)calls);
        PyErr_Restore(kind, error, traceback);
    }
    call_clear(self);
    self->calls = NULL;
    if (calls->spare == NULL)
        calls->spare = self;
    else
        PyObject_GC_Del(self);
    Py_DECREF((PyObject *)calls);
    Py_DECREF(type);
}

static PyObject *call_name(Call *self, void *closure)
{
    const char *name = name_of(self);
    return PyUnicode_FromString(closure == NULL ? name : name + sizeof "MessageQueue." - 1);
}

static PyObject *call_awaits(Call *self, void *Py_UNUSED(closure))
{
    return Py_NewRef(self->rest == NULL ? Py_None : self->rest);
}

static PyMethodDef call_methods[] = {
    {"send", (PyCFunction)call_send_method, METH_O, "As a coroutine's."},
    {"throw", (PyCFunction)call_throw, METH_VARARGS, "As a coroutine's."},
    {"close", (PyCFunction)call_close, METH_NOARGS, "As a coroutine's."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef call_attributes[] = {
    {"__qualname__", (getter)call_name, NULL, "What was called.", NULL},
    {"__name__", (getter)call_name, NULL, "The same without its class.", (void *)1},
    {"cr_await", (getter)call_awaits, NULL, "What it awaits, or None.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot call_slots[] = {
    {Py_tp_doc, "A call of an awaited queue, which is a coroutine to whoever has it."},
    {Py_tp_dealloc, call_dealloc},
    {Py_tp_traverse, call_traverse},
    {Py_tp_clear, call_clear},
    {Py_tp_iter, PyObject_SelfIter},
    {Py_tp_iternext, call_next},
    {Py_am_await, call_await},
    {Py_am_send, call_send},
    {Py_tp_methods, call_methods},
    {Py_tp_getset, call_attributes},
    {0, NULL},
};

static PyType_Spec call_spec = {
    "aioshm.ring._native.Call", sizeof(Call), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, call_slots,
};

static int no_keywords(PyObject *kwargs);

static int calls_init(Calls *self, PyObject *args, PyObject *kwargs)
{
    PyObject *rest, *whole = Py_None, *fail = Py_None;
    if (no_keywords(kwargs) < 0 || !PyArg_ParseTuple(args, "O|OO:Calls", &rest, &whole, &fail))
        return -1;
    State *state = PyType_GetModuleState(Py_TYPE((PyObject *)self));
    if (state == NULL)
        return -1;
    if (self->rest != NULL) {
        PyErr_SetString(PyExc_RuntimeError, "this was made already");
        return -1;
    }
    self->rest = Py_NewRef(rest);
    self->whole = Py_NewRef(whole);
    self->fail = Py_NewRef(fail);
    self->writer = (PyTypeObject *)Py_NewRef((PyObject *)state->writer);
    self->reader = (PyTypeObject *)Py_NewRef((PyObject *)state->reader);
    self->call = (PyTypeObject *)Py_NewRef((PyObject *)state->call);
    return 0;
}

static int calls_traverse(Calls *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE((PyObject *)self));
    Py_VISIT(self->core);
    Py_VISIT(self->rest);
    Py_VISIT(self->whole);
    Py_VISIT(self->fail);
    return 0;
}

static int calls_clear(Calls *self)
{
    Py_CLEAR(self->core);
    Py_CLEAR(self->rest);
    Py_CLEAR(self->whole);
    Py_CLEAR(self->fail);
    return 0;
}

static void calls_dealloc(Calls *self)
{
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    PyObject_GC_UnTrack(self);
    calls_clear(self);
    if (self->spare != NULL)
        PyObject_GC_Del(self->spare);
    Py_CLEAR(self->writer);
    Py_CLEAR(self->reader);
    Py_CLEAR(self->call);
    freefunc release = PyType_GetSlot(type, Py_tp_free);
    release(self);
    Py_DECREF(type);
}

static PyObject *calls_core(Calls *self, void *Py_UNUSED(closure))
{
    return Py_NewRef(self->core == NULL ? Py_None : self->core);
}

static int calls_set_core(Calls *self, PyObject *core, void *Py_UNUSED(closure))
{
    PyTypeObject *type = core == NULL ? NULL : Py_TYPE(core);
    if (type == NULL || (core != Py_None && type != self->writer && type != self->reader)) {
        PyErr_SetString(PyExc_TypeError, "this takes a native core, or None");
        return -1;
    }
    PyObject *old = self->core;
    self->core = core == Py_None ? NULL : Py_NewRef(core);
    Py_XDECREF(old);
    return 0;
}

/* Making and unmaking */

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
static bool fit(size_t begin, size_t amount, size_t each, size_t end)
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

static int no_keywords(PyObject *kwargs)
{
    if (kwargs == NULL || PyDict_Size(kwargs) == 0)
        return 0;
    PyErr_SetString(PyExc_TypeError, "this takes no keyword arguments");
    return -1;
}

static int writer_init(Core *self, PyObject *args, PyObject *kwargs)
{
    PyObject *layout, *view, *slots;
    if (no_keywords(kwargs) < 0 || !PyArg_ParseTuple(args, "OOO:WriterCore", &layout, &view, &slots))
        return -1;
    return core_init(self, layout, view, slots, WRITER_LINE);
}

static int reader_init(Core *self, PyObject *args, PyObject *kwargs)
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

static int core_traverse(Core *self, visitproc visit, void *arg)
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

static int core_clear(Core *self)
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

static void core_dealloc(Core *self)
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

#define FAST (PyCFunction)(void (*)(void))
#define CALL (PyCFunction)

#define BOTH_ENDS                                                                                                    \
    {"bind", CALL core_bind, METH_VARARGS, "Say how messages are coded, and whom to tell that the other end sleeps."}, \
    {"bind_beside", CALL core_bind_beside, METH_VARARGS, "Say what handles messages that have buffers beside them."},       \
    {"belong", CALL core_belong, METH_O, "Belong to this thread, while runs() is true; None: to whichever uses it."}, \
    {"passes", CALL core_passes, METH_NOARGS, "Return whether the gate lets this thread pass."},                     \
    {"spin", CALL core_spin, METH_O, "Spin for at most so many nanoseconds; return whether this end may go on."},    \
    {"close", CALL core_close, METH_NOARGS, "Let go of the memory. Idempotent."}

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

static PyGetSetDef writer_attributes[] = {
    {"trace", (getter)writer_trace, (setter)writer_set_trace, "The trace context that the next message goes out with.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyGetSetDef reader_attributes[] = {
    {"next", (getter)reader_next, NULL, "What receive() returns, taken without a call; see bind_undelivered().", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMemberDef members[] = {
    {"seq", T_ULONGLONG, offsetof(Core, seq), READONLY, "Sequence number of the next message."},
    {"published_ns", T_ULONGLONG, offsetof(Core, published_ns), 0, "When the latest message was published."},
    {"open", T_BOOL, offsetof(Core, open), 0, "Whether the gate is open."},
    {"turn", T_LONGLONG, offsetof(Core, turn), 0, "Messages that may still pass before the loop has its turn."},
    {"turn_ends_ns", T_LONGLONG, offsetof(Core, turn_ends_ns), 0, "When the turn ends at the latest."},
    {"user", T_ULONG, offsetof(Core, user), 0, "The thread that uses this end, if any thread may; 0: none."},
    {"quiet", T_BOOL, offsetof(Core, quiet), 0, "Whether send and receive set `owes` instead of telling a parked end."},
    {"owes", T_BOOL, offsetof(Core, owes), 0, "Whether the other end has to be told that it may go on."},
    {"due", T_ULONGLONG, offsetof(Core, due), 0, "Before which message that is not set: the other end is told later."},
    {"kept", T_BOOL, offsetof(Core, kept), READONLY, "Whether a slot was skipped and not given back."},
    {"spin_ns", T_LONGLONG, offsetof(Core, spin_ns), 0, "How long send and receive spin where they cannot go on."},
    {"spin_yields", T_BOOL, offsetof(Core, spin_yields), 0, "Whether a spin hands its CPU on between its looks."},
    {"spins", T_ULONGLONG, offsetof(Core, spins), READONLY, "Spins so far."},
    {"hits", T_ULONGLONG, offsetof(Core, hits), READONLY, "Spins that ended with what was waited for."},
    {"spun_ns", T_ULONGLONG, offsetof(Core, spun_ns), READONLY, "Time spent spinning."},
    {"claimed_bytes", T_ULONGLONG, offsetof(Core, claimed_bytes), 0, "Bytes of the message that the claimed slot is for."},
    {"copied", T_ULONGLONG, offsetof(Core, copied), 0, "Bytes copied into messages, or out of leased ones."},
    {"garbled", T_ULONGLONG, offsetof(Core, garbled), READONLY, "Messages whose trace context was none."},
    {NULL, 0, 0, 0, NULL},
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

static PyType_Spec writer_spec = {
    "aioshm.ring._native.WriterCore", sizeof(Core), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, writer_slots,
};

static PyMethodDef calls_methods[] = {
    {"enqueue", FAST calls_enqueue, METH_FASTCALL | METH_KEYWORDS,
     "enqueue($self, obj, timeout=None)\n--\n\nSend an object to every reader; see `aioshm.MessageQueue.enqueue`."},
    {"dequeue", FAST calls_dequeue, METH_FASTCALL | METH_KEYWORDS,
     "dequeue($self, timeout=None, cancel=None, indefinite=False)\n--\n\n"
     "Receive the next message; see `aioshm.MessageQueue.dequeue`."},
    {"aclose", (PyCFunction)calls_aclose, METH_NOARGS, "End an iteration: the queue stays open."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef calls_attributes[] = {
    {"core", (getter)calls_core, (setter)calls_set_core, "The core that is asked first, or None.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyObject *calls_next(PyObject *self)
{
    PyObject *none[3] = {NULL};
    return new_call((Calls *)self, ITERATES, none);
}

static PyType_Slot calls_slots[] = {
    {Py_tp_doc, "The calls of an awaited queue; see _portable.py."},
    {Py_am_aiter, PyObject_SelfIter},
    {Py_am_anext, calls_next},
    {Py_tp_init, calls_init},
    {Py_tp_dealloc, calls_dealloc},
    {Py_tp_traverse, calls_traverse},
    {Py_tp_clear, calls_clear},
    {Py_tp_methods, calls_methods},
    {Py_tp_getset, calls_attributes},
    {0, NULL},
};

static PyType_Spec calls_spec = {
    "aioshm.ring._native.Calls", sizeof(Calls), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, calls_slots,
};

static PyType_Spec reader_spec = {
    "aioshm.ring._native.ReaderCore", sizeof(Core), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, reader_slots,
};

/* Functions */

static PyObject *fence(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored))
{
    full_fence();
    Py_RETURN_NONE;
}

#if defined(__linux__)
static PyObject *new_timer(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored))
{
    int fd = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    return fd < 0 ? PyErr_SetFromErrno(PyExc_OSError) : PyLong_FromLong(fd);
}

static PyObject *set_timer(PyObject *Py_UNUSED(module), PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 2) {
        PyErr_SetString(PyExc_TypeError, "timerfd_settime() takes a descriptor and a time");
        return NULL;
    }
    long fd = PyLong_AsLong(args[0]);
    if (fd == -1 && PyErr_Occurred())
        return NULL;
    if (fd < INT_MIN || fd > INT_MAX) {
        PyErr_SetString(PyExc_OverflowError, "no descriptor is that large");
        return NULL;
    }
    long long at_ns = PyLong_AsLongLong(args[1]);
    if (at_ns == -1 && PyErr_Occurred())
        return NULL;
    if (at_ns < 0)
        at_ns = 1;  /* long ago, as what the caller means is: 0 would disarm */
    struct itimerspec when = {.it_value = {.tv_sec = at_ns / 1000000000, .tv_nsec = at_ns % 1000000000}};
    if (timerfd_settime((int)fd, TFD_TIMER_ABSTIME, &when, NULL) < 0)
        return PyErr_SetFromErrno(PyExc_OSError);
    Py_RETURN_NONE;
}
#endif

static PyMethodDef functions[] = {
    {"memory_fence", fence, METH_NOARGS, "Let no earlier load or store pass a later one."},
#if defined(__linux__)
    {"timerfd_create", new_timer, METH_NOARGS, "Return the descriptor of a new timer."},
    {"timerfd_settime", FAST set_timer, METH_FASTCALL, "Let a timer ring at a moment of CLOCK_MONOTONIC; 0 disarms it."},
#endif
    {NULL, NULL, 0, NULL},
};

/* Add a type to the module; it is the caller's, too. */
static PyTypeObject *add_type(PyObject *module, PyType_Spec *spec)
{
    PyObject *type = PyType_FromModuleAndSpec(module, spec, NULL);
    if (type != NULL && PyModule_AddType(module, (PyTypeObject *)type) < 0)
        Py_CLEAR(type);
    return (PyTypeObject *)type;
}

static int execute(PyObject *module)
{
    State *state = PyModule_GetState(module);
    state->nothing = PyObject_CallNoArgs((PyObject *)&PyBaseObject_Type);
    state->elsewhere = PyObject_CallNoArgs((PyObject *)&PyBaseObject_Type);
    if (state->nothing == NULL || state->elsewhere == NULL
        || PyModule_AddObjectRef(module, "NOTHING", state->nothing) < 0
        || PyModule_AddObjectRef(module, "ELSEWHERE", state->elsewhere) < 0)
        return -1;
    state->call = (PyTypeObject *)PyType_FromModuleAndSpec(module, &call_spec, NULL);
    if (state->call == NULL)
        return -1;
    state->writer = add_type(module, &writer_spec);
    state->reader = state->writer == NULL ? NULL : add_type(module, &reader_spec);
    state->calls = state->reader == NULL ? NULL : add_type(module, &calls_spec);
    if (state->calls == NULL)
        return -1;
    return 0;
}

static int module_traverse(PyObject *module, visitproc visit, void *arg)
{
    State *state = PyModule_GetState(module);
    Py_VISIT(state->nothing);
    Py_VISIT(state->elsewhere);
    Py_VISIT(state->writer);
    Py_VISIT(state->reader);
    Py_VISIT(state->call);
    Py_VISIT(state->calls);
    return 0;
}

static int module_clear(PyObject *module)
{
    State *state = PyModule_GetState(module);
    Py_CLEAR(state->nothing);
    Py_CLEAR(state->elsewhere);
    Py_CLEAR(state->writer);
    Py_CLEAR(state->reader);
    Py_CLEAR(state->call);
    Py_CLEAR(state->calls);
    return 0;
}

static void module_free(void *module)
{
    module_clear(module);
}

/* All state is the module's or an object's. But that an end is used by one thread at a time is checked by plain loads and
 * stores (`user`), which the GIL keeps apart: a free-threaded interpreter is told to keep it. */
static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, execute},
#ifdef Py_mod_gil
    {Py_mod_gil, Py_MOD_GIL_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "aioshm.ring._native",
    .m_doc = "The hot path of a ring in C; see _portable.py.",
    .m_size = sizeof(State),
    .m_methods = functions,
    .m_slots = module_slots,
    .m_traverse = module_traverse,
    .m_clear = module_clear,
    .m_free = module_free,
};

PyMODINIT_FUNC PyInit__native(void)
{
    return PyModuleDef_Init(&definition);
}
