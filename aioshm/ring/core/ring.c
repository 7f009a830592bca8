/* The calls of both ends: waking the peer, spinning, binding. */

#include "core.h"

#include <sched.h>

#define LOOKS 16              /* between two readings of the clock */

void notify(End *end)
{
    if (end->on_parked == Py_None)
        return;
    PyObject *on_parked = Py_XNewRef(end->on_parked), *done = call(on_parked, NULL);
    if (done == NULL)
        PyErr_WriteUnraisable(on_parked);
    Py_XDECREF(done);
    Py_XDECREF(on_parked);
}

static bool spin(End *end, long long budget_ns)
{
    uint64_t began = now_ns(), now = began;
    bool hit = false;
    end->spins++;
    store_release(end->own + SPINNING, 1);
    while (!hit && (long long)(now - began) < budget_ns) {
        for (int look = 0; look < LOOKS && !(hit = may_go_on(end)); look++)
            relax();
        if (!hit && end->spin_yields) {
            sched_yield();
            hit = may_go_on(end);
        }
        now = now_ns();
    }
    store_release(end->own + SPINNING, 0);
    end->hits += hit;
    end->spun_ns += now - began;
    return hit;
}

/* Spin unless this end may go on; without the GIL if for long, or if others have the CPU meanwhile. */
bool spin_unless(End *end, long long budget_ns)
{
    if (may_go_on(end))
        return true;
    if (budget_ns <= HELD_SPIN_NS && !end->spin_yields)
        return spin(end, budget_ns);
    bool hit;
    end->in_use++;
    Py_BEGIN_ALLOW_THREADS
    hit = spin(end, budget_ns);
    Py_END_ALLOW_THREADS
    end->in_use--;
    return hit;
}

PyObject *end_spin(End *end, PyObject *arg)
{
    long long budget_ns = PyLong_AsLongLong(arg);
    if ((budget_ns == -1 && PyErr_Occurred()) || check_usable(end) < 0)
        return NULL;
    return PyBool_FromLong(spin_unless(end, budget_ns));
}

PyObject *end_bind(End *end, PyObject *args)
{
    PyObject *code, *number, *on_parked;
    int raw;
    if (!PyArg_ParseTuple(args, "OOpO:bind", &code, &number, &raw, &on_parked))
        return NULL;
    unsigned long long what = PyLong_AsUnsignedLongLong(number);
    if (what == (unsigned long long)-1 && PyErr_Occurred())
        return NULL;
    PyObject *old_code = end->code, *old_parked = end->on_parked;
    end->code = Py_NewRef(code);
    end->on_parked = Py_NewRef(on_parked);
    end->what = what;
    end->raw = raw;
    Py_XDECREF(old_code);
    Py_XDECREF(old_parked);
    Py_RETURN_NONE;
}

PyObject *end_bind_out_of_band(End *end, PyObject *args)
{
    PyObject *out_of_band, *measure = Py_None, *old = end->out_of_band, *old_measure = end->measure;
    if (!PyArg_ParseTuple(args, "O|O:bind_out_of_band", &out_of_band, &measure))
        return NULL;
    end->out_of_band = Py_NewRef(out_of_band);
    end->measure = Py_NewRef(measure);
    Py_XDECREF(old);
    Py_XDECREF(old_measure);
    Py_RETURN_NONE;
}

PyObject *end_belong(End *end, PyObject *runs)
{
    PyObject *old = end->runs;
    end->runs = Py_NewRef(runs);
    end->thread = PyThread_get_thread_ident();
    Py_XDECREF(old);
    Py_RETURN_NONE;
}

PyObject *end_share(End *end, PyObject *lock)
{
    Py_buffer words;
    if (PyObject_GetBuffer(lock, &words, PyBUF_WRITABLE) < 0)
        return NULL;
    if (words.len < 2 * (Py_ssize_t)sizeof(unsigned long)) {
        PyBuffer_Release(&words);
        PyErr_SetString(PyExc_ValueError, "a lock has two words: its owner and its next owner");
        return NULL;
    }
    Py_buffer old = end->lock;
    end->lock = words;
    PyBuffer_Release(&old);
    return end_belong(end, Py_None);
}

PyObject *end_passes(End *end, PyObject *Py_UNUSED(ignored))
{
    int passed = passes(end);
    return passed < 0 ? NULL : PyBool_FromLong(passed);
}

PyObject *end_check_open(End *end, PyObject *Py_UNUSED(ignored))
{
    return check_usable(end) < 0 ? NULL : Py_NewRef(Py_None);
}

PyObject *end_check_unused(End *end, PyObject *Py_UNUSED(ignored))
{
    return check_unused(end) < 0 ? NULL : Py_NewRef(Py_None);
}

PyObject *end_close(End *end, PyObject *Py_UNUSED(ignored))
{
    if (end->in_use) {
        PyErr_SetString(PyExc_BufferError, "the ring is in use");
        return NULL;
    }
    end->open = 0;
    if (end->base != NULL) {
        end->base = NULL;
        PyBuffer_Release(&end->buffer);
        PyBuffer_Release(&end->record);
    }
    Py_RETURN_NONE;
}
