/* The two ends of a ring, as all files of the core see them, and the steps of the hot path, which are inlined.
 *
 * The classes are those of reference.py, which says what each method does. The code is written against the stable ABI,
 * so that one build serves every CPython from 3.11 on. Everything runs under the GIL, except a long spin, which touches
 * nothing but the flags.
 *
 * Each byte that other processes write is read once: memcmp may read a byte twice where it differs, and a compiler may
 * read memory again after it has copied it. Either could then act on two different answers.
 */

#ifndef AIOSHM_CORE_H
#define AIOSHM_CORE_H

#ifndef Py_GIL_DISABLED         /* free-threaded builds of CPython have no stable ABI */
#define Py_LIMITED_API 0x030B0000
#endif
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <string.h>

#include "atomics.h"
#include "layout.h"

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the words of a slot's header are little-endian; the Python reference serves this machine"
#endif

#define MAX_POOLS 4
#define DECODINGS 3           /* a message that cannot be decoded so often is damaged */
#define NONE UINT64_MAX       /* no message has this number */

/* The chunks of one size, as the writer's record keeps them: the class Chunks of record.py says what the words mean. */
typedef struct {
    uint64_t given, taken, allocated;
    uint64_t lists[];         /* the free chunks; the messages in taken chunks; the taken chunks */
} Chunks;

typedef struct {
    size_t start, room, stride, count, first;
    Chunks *chunks;           /* NULL: this is a reader's */
} Pool;

/* The records are memory that Python code owns and reads and writes, too: record.py draws them. */
typedef struct {
    uint64_t claimed;         /* 1 + the pool that the claimed slot has a chunk of, or 0; it is the last free one */
    uint64_t places;          /* readers but those behind the last one that was not evicted, whose flags stay 1 */
    uint8_t trace[32];        /* the trace context that the next message goes out with */
    uint8_t unread[];         /* what the writer sets the reader flags to: 1 for those that were evicted */
} WriterRecord;

typedef struct {
    uint64_t n_traces;        /* how many trace contexts were noted */
    uint64_t noted;           /* the message whose context was noted last, or NONE */
    uint8_t trail[];          /* the contexts of the latest messages that were taken, in turn */
} ReaderRecord;

_Static_assert(offsetof(Chunks, lists) == CHUNK_LISTS, "Chunks differs from record.py");
_Static_assert(offsetof(WriterRecord, unread) == UNREAD, "WriterRecord differs from record.py");
_Static_assert(offsetof(ReaderRecord, trail) == TRACES, "ReaderRecord differs from record.py");

/* What both ends have. */
typedef struct {
    PyObject_HEAD
    Py_buffer buffer, record;
    uint8_t *base;            /* NULL once closed */
    bool made;                /* whether __init__ was called, with success or not */
    size_t n_reader, room, n_slots, inline_bytes, slot_bytes, flag_bytes, slots_at, flags_at, n_pools;
    size_t trace_at;          /* where in a slot its trace context is; 0: slots have none */
    Pool pools[MAX_POOLS];    /* the largest chunks first */
    uint8_t *own;             /* this end's line */
    size_t flag;              /* a reader's flag within the flags of a slot; 0: this is the writer */
    uint64_t seq;
    size_t index;
    int in_use;               /* calls that release the GIL, or run code of others, with the memory in their hands */
    /* How messages are coded */
    uint64_t what;
    bool raw;
    PyObject *code, *out_of_band, *measure, *on_parked;
    PyObject *empty, *slow_path;
    /* Who may use this end, and for how long */
    char open;
    long long budget, budget_ends_ns;
    unsigned long thread;     /* the thread that this end belongs to */
    PyObject *runs;           /* None: any thread may use it, and they exclude each other themselves */
    Py_buffer lock;           /* the ProcessLock of those threads: owner, next owner; no memory: there is none */
    /* Spinning, and figures */
    long long spin_ns;
    char spin_yields;
    unsigned long long spins, hits, spun_ns;
    unsigned long long published_ns, copied;
} End;

typedef struct {
    End end;
    WriterRecord *record;     /* in the record */
    unsigned long long claimed_bytes;  /* of the message that the claimed slot is for */
    unsigned long long awaited;        /* the message that spins wait for until all have read it; NONE: the next slot's */
} WriterEnd;

typedef struct {
    End end;
    ReaderRecord *record;     /* in the record */
    uint8_t *latencies;       /* this reader's histogram */
    bool rushes;              /* whether messages come in quick succession, so that not each one's latency is counted */
    uint64_t finished_ns;     /* when the latest message was finished with */
    char kept;
    char damaged;             /* whether the message that could not be decoded was finished with */
    unsigned long long garbled;
} ReaderEnd;

typedef struct {
    PyObject *empty, *slow_path;
    PyTypeObject *writer, *reader, *call;
    void *spare;              /* the memory of a call that has ended: 10% of a message of 64 bytes */
} State;

/* Places */

static inline uint8_t *flags_of(const End *end, size_t index)
{
    return end->base + end->flags_at + index * end->flag_bytes;
}

static inline uint8_t *slot_of(const End *end, size_t index)
{
    return end->base + end->slots_at + index * end->slot_bytes;
}

static inline uint8_t *chunk_of(const End *end, const Pool *pool, size_t number)
{
    return end->base + pool->start + (number - pool->first) * pool->stride;
}

/* The smallest chunks that have room for so many bytes; the largest, if none have. */
static inline Pool *pool_for(End *end, size_t nbytes)
{
    size_t n = end->n_pools - 1;
    while (n > 0 && end->pools[n].room < nbytes)
        n--;
    return &end->pools[n];
}

static inline void advance(End *end)
{
    end->seq++;
    if (++end->index == end->n_slots)
        end->index = 0;
    store_count(end->own, end->seq);
}

/* Whether the body lies in an overflow segment: the slot then names no chunk, though the message has one. */
static inline bool overflows(const uint8_t *slot)
{
    return (load_word(slot) & 0xff) == OVERFLOW;
}

/* Flags */

static inline bool is_free(const WriterEnd *self, size_t index)
{
    uint8_t *flags = flags_of(&self->end, index), written = load_acquire(flags);
    if (!written)
        return true;
    bool all = written == 1 && all_are(flags + 1, self->record->places, 1);
    atomic_thread_fence(memory_order_acquire);  /* the chunk is filled only after every reader's flag was seen */
    return all;
}

/* Whether a message was read by all. */
static inline bool is_finished(const WriterEnd *self, uint64_t seq)
{
    const End *end = &self->end;
    return seq + end->n_slots < end->seq || is_free(self, seq % end->n_slots);
}

static inline bool is_ready(const End *end, size_t index)
{
    uint8_t *flags = flags_of(end, index);
    /* In this order: a flag that is cleared already and a written flag of the lap before are a slot being published. */
    return !load_acquire(flags + end->flag) && load_acquire(flags);
}

static inline bool may_go_on(const End *end)
{
    if (end->flag)
        return is_ready(end, end->index);
    const WriterEnd *self = (const WriterEnd *)end;
    return self->awaited == NONE ? is_free(self, end->index) : is_finished(self, self->awaited);
}

/* Every method begins with one of these */

static inline int check_usable(const End *end)
{
    if (end->base == NULL) {
        PyErr_SetString(PyExc_ValueError, "the ring was closed");
        return -1;
    }
    return 0;
}

static inline int check_unused(const End *end)
{
    if (check_usable(end) < 0)
        return -1;
    if (end->in_use) {
        PyErr_SetString(PyExc_RuntimeError, "the ring is in use: this was called from inside of a batch");
        return -1;
    }
    return 0;
}

/* Call one of the callables, which bind() may replace meanwhile; NULL where __init__ was never called. */
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

/* Whether this thread may send or receive here if the loop runs. */
static inline bool may_pass(const End *end)
{
    unsigned long me = PyThread_get_thread_ident();
    return end->open && end->budget > 0 && !end->in_use
           && (end->runs == Py_None || end->thread == me);
}

/* Whether this thread may send or receive here: 1, 0, or -1 with an error. */
static inline int passes(const End *end)
{
    if (!may_pass(end))
        return 0;
    int truth = 1;
    if (end->runs != Py_None) {
        PyObject *answer = call(end->runs, NULL);
        if (answer == NULL)
            return -1;
        truth = answer == Py_True ? 1 : answer == Py_False ? 0 : PyObject_IsTrue(answer);
        Py_DECREF(answer);
    }
    return truth > 0 && check_usable(end) < 0 ? -1 : truth;
}

/* Acquire the lock of the threads that share this end, if there is one: one step, which no signal's handler interrupts.
 * Whether this thread holds it now; before is its owner until then: this thread, or none. */
static inline bool acquire_lock(const End *end, unsigned long *before)
{
    unsigned long *words = end->lock.buf, me = PyThread_get_thread_ident();
    *before = 0;
    if (words == NULL)
        return true;
    *before = words[0];
    if (*before && *before != me)
        return false;
    words[0] = me;
    return true;
}

static inline void release_lock(const End *end, unsigned long before)
{
    unsigned long *words = end->lock.buf;
    if (words != NULL)
        words[0] = before ? before : words[1];
}

static inline void spend(End *end, Py_ssize_t messages, uint64_t now)
{
    end->budget = (long long)now < end->budget_ends_ns && messages < end->budget ? end->budget - messages : 0;
}

/* ring.c */
void notify(End *end);
bool spin_unless(End *end, long long budget_ns);

/* ends.c */
int writer_init(WriterEnd *self, PyObject *args, PyObject *kwargs);
int reader_init(ReaderEnd *self, PyObject *args, PyObject *kwargs);
int no_keywords(PyObject *kwargs);
int end_traverse(End *end, visitproc visit, void *arg);
int end_clear(End *end);
void end_dealloc(End *end);
State *state_of(PyObject *self);

/* send.c, receive.c */
PyObject *writer_send(WriterEnd *self, PyObject *obj);
PyObject *reader_receive(ReaderEnd *self, PyObject *ignored);

/* calls.c */
PyObject *bind_calls(PyObject *module, PyObject *args);

/* awaitable.c */
#define CALL_ARGS 5
PyObject *new_call(State *state, const char *name, PyObject *const *args);

extern PyType_Spec writer_spec, reader_spec, call_spec;

/* What the types of both ends begin with. */

PyObject *end_spin(End *end, PyObject *arg);
PyObject *end_bind(End *end, PyObject *args);
PyObject *end_bind_out_of_band(End *end, PyObject *args);
PyObject *end_belong(End *end, PyObject *runs);
PyObject *end_share(End *end, PyObject *lock);
PyObject *end_passes(End *end, PyObject *ignored);
PyObject *end_check_open(End *end, PyObject *ignored);
PyObject *end_check_unused(End *end, PyObject *ignored);
PyObject *end_close(End *end, PyObject *ignored);

#define FAST (PyCFunction)(void (*)(void))
#define CALL (PyCFunction)

#define BOTH_ENDS                                                                                                  \
    {"bind", CALL end_bind, METH_VARARGS, "Set how messages are coded, and what wakes the other end."},            \
    {"bind_out_of_band", CALL end_bind_out_of_band, METH_VARARGS, "Set what codes out-of-band buffers."},          \
    {"belong", CALL end_belong, METH_O, "Belong to this thread, while runs() is true; None: to any thread."},      \
    {"share", CALL end_share, METH_O, "Belong to any thread, and acquire a lock in send and receive_next."},       \
    {"passes", CALL end_passes, METH_NOARGS, "Return whether this thread may send or receive now."},               \
    {"spin", CALL end_spin, METH_O, "Spin for at most so many nanoseconds; return whether this end may go on."},   \
    {"check_open", CALL end_check_open, METH_NOARGS, "Raise if the ring was closed."},                             \
    {"check_unused", CALL end_check_unused, METH_NOARGS, "Raise if the ring was closed, or is in use."},           \
    {"close", CALL end_close, METH_NOARGS, "Release the memory. Idempotent."}

#define END_MEMBERS                                                                                                \
    {"seq", T_ULONGLONG, offsetof(End, seq), READONLY, "Sequence number of the next message."},                    \
    {"in_use", T_INT, offsetof(End, in_use), 0, "Calls that run code of others with the memory in their hands."},  \
    {"published_ns", T_ULONGLONG, offsetof(End, published_ns), 0, "When the latest message was published."},       \
    {"open", T_BOOL, offsetof(End, open), 0, "Whether send and receive may pass at all."},                         \
    {"budget", T_LONGLONG, offsetof(End, budget), 0, "Messages that may still pass before the loop runs."},            \
    {"budget_ends_ns", T_LONGLONG, offsetof(End, budget_ends_ns), 0, "When the loop runs at the latest."},             \
    {"spin_ns", T_LONGLONG, offsetof(End, spin_ns), 0, "How long send and receive spin where they cannot go on."}, \
    {"spin_yields", T_BOOL, offsetof(End, spin_yields), 0, "Whether a spin yields its CPU between its looks."},    \
    {"spins", T_ULONGLONG, offsetof(End, spins), READONLY, "Spins so far."},                                       \
    {"hits", T_ULONGLONG, offsetof(End, hits), READONLY, "Spins that ended with success."},                        \
    {"spun_ns", T_ULONGLONG, offsetof(End, spun_ns), READONLY, "Time spent spinning."},                            \
    {"copied", T_ULONGLONG, offsetof(End, copied), 0, "Bytes copied into messages, or out of leased ones."}

#endif
