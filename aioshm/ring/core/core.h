/* The two ends of a ring, as all files of the core see them, and the steps of the hot path, which are inlined.
 *
 * except a long spin, which touches nothing but the flags.
 *
 * What other processes write is read once, each byte of it: memcmp may look twice at a byte that differs, and a compiler
 * may read again what it has copied, and either could then act on two different answers.
 */

#ifndef AIOSHM_CORE_H
#define AIOSHM_CORE_H

#ifndef Py_GIL_DISABLED         /* free-threaded builds of CPython have no stable ABI */
#define Py_LIMITED_API 0x030B0000
#endif
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <sched.h>
#include <stdlib.h>
#include <string.h>

#include "atomics.h"
#include "layout.h"

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the words of a slot's header are little-endian; the Python twin serves this machine"
#endif

#define MAX_POOLS 4
#define LOOKS 16              /* between two readings of the clock */
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

/* Slots */

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

/* The slot so many further on, of a ring that has more. */
static inline size_t index_ahead(const Core *self, size_t slots)
{
    size_t index = self->index + slots;
    return index < self->n_slots ? index : index - self->n_slots;
}

static inline uint8_t *chunk_of(const Core *self, const Pool *pool, size_t number)
{
    return self->base + pool->start + (number - pool->first) * pool->stride;
}

/* How many free chunks have memory. Those that have none are the last ones to be taken from the stack. */
static inline size_t n_usable(const Pool *pool)
{
    size_t without = pool->count - pool->allocated;
    return pool->n_free > without ? pool->n_free - without : 0;
}

/* The smallest chunks that have room for so many bytes; the largest, if none have. */
static inline Pool *pool_for(Core *self, size_t nbytes)
{
    size_t n = self->n_pools - 1;
    while (n > 0 && self->pools[n].room < nbytes)
        n--;
    return &self->pools[n];
}

/* Whether a message lies elsewhere: its slot then names no chunk, though it has one. */
static inline bool is_elsewhere(const uint8_t *slot)
{
    return (load_word(slot) & 0xff) == OVERFLOW;
}

/* What every method begins with */

static inline int check_usable(Core *self)
{
    if (self->base == NULL) {
        PyErr_SetString(PyExc_ValueError, "the ring was closed");
        return -1;
    }
    return 0;
}

static inline int check_unused(Core *self)
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
static inline PyObject *call(PyObject *callable, PyObject *arg)
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
static inline bool lets_in(const Core *self)
{
    unsigned long me = PyThread_get_thread_ident();
    return self->open && self->turn > 0 && !self->in_use
           && (self->runs == Py_None ? self->user == 0 || self->user == me : self->thread == me);
}

/* Whether the gate lets this thread pass: 1, 0, or -1 with an error. */
static inline int passes(Core *self)
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

/* ring.c */
void notify(Core *self);
bool spin_unless(Core *self, long long budget_ns);
PyObject *core_spin(Core *self, PyObject *arg);
PyObject *core_bind(Core *self, PyObject *args);
PyObject *core_bind_beside(Core *self, PyObject *args);
PyObject *core_belong(Core *self, PyObject *runs);
PyObject *core_passes(Core *self, PyObject *ignored);
PyObject *core_close(Core *self, PyObject *ignored);
PyObject *slot_at(Core *self);
PyObject *begin_at(const Core *self);
extern PyMemberDef members[];

/* ends.c */
bool fit(size_t begin, size_t amount, size_t each, size_t end);
int no_keywords(PyObject *kwargs);
int writer_init(Core *self, PyObject *args, PyObject *kwargs);
int reader_init(Core *self, PyObject *args, PyObject *kwargs);
int core_traverse(Core *self, visitproc visit, void *arg);
int core_clear(Core *self);
void core_dealloc(Core *self);

/* chunks.c */
void reclaim(Core *self, Pool *pool);
PyObject *writer_free(Core *self, PyObject *const *args, Py_ssize_t nargs);
PyObject *writer_blocker(Core *self, PyObject *const *args, Py_ssize_t nargs);
PyObject *writer_spin_for(Core *self, PyObject *const *args, Py_ssize_t nargs);
PyObject *writer_bind_allocate(Core *self, PyObject *allocate);
PyObject *writer_evict(Core *self, PyObject *arg);
PyObject *writer_admit(Core *self, PyObject *args);

/* traces.c */
void note_trace(Core *self);
PyObject *reader_note_trace(Core *self, PyObject *ignored);
PyObject *reader_traces(Core *self, PyObject *arg);
PyObject *writer_trace(Core *self, void *closure);
int writer_set_trace(Core *self, PyObject *trace, void *closure);

/* send.c, receive.c */
PyObject *writer_send(Core *self, PyObject *obj);
PyObject *reader_receive(Core *self, PyObject *ignored);

/* awaitable.c */
PyObject *new_call(Calls *calls, CallKind kind, PyObject *const *args);

extern PyType_Spec writer_spec, reader_spec, calls_spec, call_spec;

#define FAST (PyCFunction)(void (*)(void))
#define CALL (PyCFunction)

#define BOTH_ENDS                                                                                                    \
    {"bind", CALL core_bind, METH_VARARGS, "Say how messages are coded, and whom to tell that the other end sleeps."}, \
    {"bind_beside", CALL core_bind_beside, METH_VARARGS, "Say what handles messages that have buffers beside them."},       \
    {"belong", CALL core_belong, METH_O, "Belong to this thread, while runs() is true; None: to whichever uses it."}, \
    {"passes", CALL core_passes, METH_NOARGS, "Return whether the gate lets this thread pass."},                     \
    {"spin", CALL core_spin, METH_O, "Spin for at most so many nanoseconds; return whether this end may go on."},    \
    {"close", CALL core_close, METH_NOARGS, "Let go of the memory. Idempotent."}

#endif
