/* The part that both ends share: telling the other end, spinning, what is bound */

#include "core.h"

void notify(Core *self)
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
bool spin_unless(Core *self, long long budget_ns)
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

PyObject *core_spin(Core *self, PyObject *arg)
{
    long long budget_ns = PyLong_AsLongLong(arg);
    if ((budget_ns == -1 && PyErr_Occurred()) || check_usable(self) < 0)
        return NULL;
    return PyBool_FromLong(spin_unless(self, budget_ns));
}

/* Both ends */

PyObject *core_bind(Core *self, PyObject *args)
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

PyObject *core_bind_beside(Core *self, PyObject *args)
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

PyObject *core_belong(Core *self, PyObject *runs)
{
    PyObject *old = self->runs;
    self->runs = Py_NewRef(runs);
    self->thread = self->user = PyThread_get_thread_ident();
    Py_XDECREF(old);
    Py_RETURN_NONE;
}

PyObject *core_passes(Core *self, PyObject *Py_UNUSED(ignored))
{
    int passed = passes(self);
    return passed < 0 ? NULL : PyBool_FromLong(passed);
}

PyObject *core_close(Core *self, PyObject *Py_UNUSED(ignored))
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

PyObject *slot_at(Core *self)
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
PyObject *begin_at(const Core *self)
{
    return PyLong_FromSize_t(self->slots_at + self->index * self->slot_bytes);
}

PyMemberDef members[] = {
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
