/* Calls: what makes the awaitables of an awaited queue */

#include "core.h"

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

static int calls_init(Calls *self, PyObject *args, PyObject *kwargs)
{
    PyObject *rest, *whole = Py_None, *fail = Py_None;
    if (no_keywords(kwargs) < 0 || !PyArg_ParseTuple(args, "O|OO:Calls", &rest, &whole, &fail))
        return -1;
    State *state = state_of((PyObject *)self);
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
    Py_VISIT((PyObject *)self->core);
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
    return Py_NewRef(self->core == NULL ? Py_None : (PyObject *)self->core);
}

static int calls_set_core(Calls *self, PyObject *core, void *Py_UNUSED(closure))
{
    bool none = core == Py_None, sends = core != NULL && PyObject_TypeCheck(core, self->writer);
    if (core == NULL || !(none || sends || PyObject_TypeCheck(core, self->reader))) {
        PyErr_SetString(PyExc_TypeError, "this takes a native core, or None");
        return -1;
    }
    End *old = self->core;
    self->core = none ? NULL : (End *)Py_NewRef(core);
    self->sends = sends;
    Py_XDECREF((PyObject *)old);
    return 0;
}

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
    {Py_tp_doc, "The calls of an awaited queue; see reference.py."},
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

PyType_Spec calls_spec = {
    "aioshm.ring._native.Calls", sizeof(Calls), 0, Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC, calls_slots,
};
