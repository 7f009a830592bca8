/* What enqueue() and dequeue() return: asks the core, and takes a Python coroutine only where it has to wait. calls.py
 * has the same in Python. */

#include "core.h"

#define ARGS 5

typedef struct {
    PyObject_HEAD
    /* The core, which is asked first; slow_path, which makes the coroutine that continues; then the arguments of enqueue
     * (obj, timeout, NULL) or dequeue (timeout, cancel, indefinite). NULL once begun. */
    PyObject *args[ARGS];
    PyObject *rest;           /* the coroutine that continues where the core could not; NULL: none, or it has ended */
    const char *name;
    State *state;             /* of the module, which the type keeps */
} Call;

static bool is_new(const Call *self)
{
    return self->args[0] != NULL;
}

static void clear_args(PyObject **args)
{
    for (int n = 0; n < ARGS; n++)
        Py_CLEAR(args[n]);
}

static int call_clear(Call *self)
{
    clear_args(self->args);
    Py_CLEAR(self->rest);
    return 0;
}

/* Take the exception that is set, as an object. */
static PyObject *fetch_error(void)
{
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    PyErr_NormalizeException(&type, &error, &traceback);
    if (traceback != NULL)
        PyException_SetTraceback(error, traceback);
    Py_XDECREF(traceback);
    Py_DECREF(type);
    return error;
}

/* Have the core do it. PYGEN_NEXT: it could not, and the rest continues with what the core answered or raised. */
static PySendResult begin(Call *self, bool asks, PyObject **result)
{
    PyObject *args[ARGS], *outcome = Py_NewRef(Py_None);
    memcpy(args, self->args, sizeof args);
    memset(self->args, 0, sizeof args);
    bool done = false, sends = args[4] == NULL;
    if (asks && PyObject_TypeCheck(args[0], sends ? self->state->writer : self->state->reader)) {
        End *end = (End *)args[0];
        Py_DECREF(outcome);
        outcome = sends ? writer_send((WriterEnd *)end, args[2]) : reader_receive((ReaderEnd *)end, NULL);
        done = sends ? outcome == Py_None : outcome != end->empty && outcome != end->slow_path;
        if (outcome == NULL) {
            done = !PyErr_ExceptionMatches(PyExc_Exception);
            if (!done)
                outcome = fetch_error();
        }
    }
    if (!done) {
        self->rest = PyObject_CallFunctionObjArgs(args[1], outcome, args[2], args[3], args[4], NULL);
        Py_CLEAR(outcome);
    }
    clear_args(args);
    *result = outcome;
    if (done)
        return outcome == NULL ? PYGEN_ERROR : PYGEN_RETURN;
    return self->rest == NULL ? PYGEN_ERROR : PYGEN_NEXT;
}

static PySendResult call_am_send(Call *self, PyObject *sent, PyObject **result)
{
    PySendResult outcome = PYGEN_NEXT;
    if (is_new(self)) {
        outcome = begin(self, true, result);
    } else if (self->rest == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "cannot reuse already awaited coroutine");
        *result = NULL;
        return PYGEN_ERROR;
    }
    if (outcome == PYGEN_NEXT) {
        PyObject *rest = Py_NewRef(self->rest);
        outcome = PyIter_Send(rest, sent, result);
        Py_DECREF(rest);
    }
    if (outcome != PYGEN_NEXT)
        Py_CLEAR(self->rest);
    return outcome;
}

static PyObject *call_send(Call *self, PyObject *sent)
{
    PyObject *result;
    if (call_am_send(self, sent, &result) != PYGEN_RETURN)
        return result;
    PyObject *stop = PyObject_CallFunctionObjArgs(PyExc_StopIteration, result, NULL);
    Py_DECREF(result);
    if (stop != NULL)
        PyErr_SetObject(PyExc_StopIteration, stop);
    Py_XDECREF(stop);
    return NULL;
}

static PyObject *call_next(Call *self)
{
    return call_send(self, Py_None);
}

static PyObject *call_throw(Call *self, PyObject *args)
{
    PyObject *unused;
    if (is_new(self) && begin(self, false, &unused) == PYGEN_ERROR)
        return NULL;
    if (self->rest == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "cannot reuse already awaited coroutine");
        return NULL;
    }
    PyObject *throw = PyObject_GetAttrString(self->rest, "throw");
    PyObject *result = throw == NULL ? NULL : PyObject_CallObject(throw, args);
    Py_XDECREF(throw);
    if (result == NULL)
        Py_CLEAR(self->rest);
    return result;
}

static PyObject *call_close(Call *self, PyObject *Py_UNUSED(ignored))
{
    PyObject *rest = Py_XNewRef(self->rest);
    call_clear(self);
    PyObject *result = rest == NULL ? Py_NewRef(Py_None) : PyObject_CallMethod(rest, "close", NULL);
    Py_XDECREF(rest);
    return result;
}

static int call_traverse(Call *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE((PyObject *)self));
    for (int n = 0; n < ARGS; n++)
        Py_VISIT(self->args[n]);
    Py_VISIT(self->rest);
    return 0;
}

static void call_dealloc(Call *self)
{
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    PyObject_GC_UnTrack(self);
    if (is_new(self)) {
        PyObject *kind, *error, *traceback;
        PyErr_Fetch(&kind, &error, &traceback);
        if (PyErr_WarnFormat(PyExc_RuntimeWarning, 1, "coroutine '%s' was never awaited", self->name) < 0)
            PyErr_WriteUnraisable(self->args[1]);
        PyErr_Restore(kind, error, traceback);
    }
    call_clear(self);
    if (self->state->spare == NULL)
        self->state->spare = self;
    else
        PyObject_GC_Del(self);
    Py_DECREF(type);
}

static PyMethodDef call_methods[] = {
    {"send", CALL call_send, METH_O, "See `collections.abc.Coroutine`."},
    {"throw", CALL call_throw, METH_VARARGS, "See `collections.abc.Coroutine`."},
    {"close", CALL call_close, METH_NOARGS, "See `collections.abc.Coroutine`."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef call_members[] = {
    {"__qualname__", T_STRING, offsetof(Call, name), READONLY, "The method that was called."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot call_slots[] = {
    {Py_tp_doc, "A call of a queue: a `collections.abc.Coroutine`."},
    {Py_tp_dealloc, call_dealloc},
    {Py_tp_traverse, call_traverse},
    {Py_tp_clear, call_clear},
    {Py_tp_iter, PyObject_SelfIter},
    {Py_tp_iternext, call_next},
    {Py_am_await, PyObject_SelfIter},
    {Py_am_send, call_am_send},
    {Py_tp_methods, call_methods},
    {Py_tp_members, call_members},
    {0, NULL},
};

PyType_Spec call_spec = {
    "aioshm.ring._native.Call", sizeof(Call), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, call_slots,
};

/* Make a call from arguments by place or name. `self` is the module and the parts of `Calls`; `found` has the core, the
 * slow path and the arguments' defaults. */
static PyObject *new_call(PyObject *self, const char *const *names, Py_ssize_t most, PyObject **found,
                          PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    PyObject *parts = PyTuple_GetItem(self, 1);
    if (nargs > most)
        return PyErr_Format(PyExc_TypeError, "%s() takes at most %zd arguments (%zd given)", names[0], most, nargs);
    for (Py_ssize_t n = 0; n < nargs; n++)
        found[2 + n] = args[n];
    for (Py_ssize_t n = 0; kwnames != NULL && n < PyTuple_Size(kwnames); n++) {
        PyObject *word = PyTuple_GetItem(kwnames, n);
        Py_ssize_t at = 0;
        while (at < most && PyUnicode_CompareWithASCIIString(word, names[1 + at]) != 0)
            at++;
        if (at == most || at < nargs)
            return PyErr_Format(PyExc_TypeError, "%s() got %s argument '%U'", names[0],
                                at == most ? "an unexpected keyword" : "multiple values for", word);
        found[2 + at] = args[nargs + n];
    }
    if (found[2] == NULL)
        return PyErr_Format(PyExc_TypeError, "%s() missing a required argument: '%s'", names[0], names[1]);
    found[0] = PyList_GetItem(parts, 0);
    found[1] = PyList_GetItem(parts, 1);
    if (found[0] == NULL || found[1] == NULL)
        return NULL;
    State *state = PyModule_GetState(PyTuple_GetItem(self, 0));
    Call *made = state->spare == NULL ? PyObject_GC_New(Call, state->call)
                                      : (Call *)PyObject_Init(state->spare, state->call);
    if (made == NULL)
        return NULL;
    state->spare = NULL;
    for (int n = 0; n < ARGS; n++)
        made->args[n] = Py_XNewRef(found[n]);
    made->rest = NULL;
    made->name = names[0];
    made->state = state;
    PyObject_GC_Track(made);
    return (PyObject *)made;
}

static PyObject *enqueue(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const NAMES[] = {"MessageQueue.enqueue", "obj", "timeout"};
    PyObject *found[ARGS] = {NULL, NULL, NULL, Py_None, NULL};
    return new_call(self, NAMES, 2, found, args, nargs, kwnames);
}

static PyObject *dequeue(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const NAMES[] = {"MessageQueue.dequeue", "timeout", "cancel", "indefinite"};
    PyObject *found[ARGS] = {NULL, NULL, Py_None, Py_None, Py_False};
    return new_call(self, NAMES, 3, found, args, nargs, kwnames);
}

static PyMethodDef enqueue_def = {"enqueue", FAST enqueue, METH_FASTCALL | METH_KEYWORDS, NULL};
static PyMethodDef dequeue_def = {"dequeue", FAST dequeue, METH_FASTCALL | METH_KEYWORDS, NULL};

/* The docstring of a call: that of MessageQueue, where it stands once. The text is kept for ever, as the calls are. */
static const char *document(const char *signature, PyObject *doc)
{
    PyObject *text = PyUnicode_FromFormat("%s\n--\n\n%U", signature, doc);
    return text == NULL ? NULL : PyUnicode_AsUTF8AndSize(text, NULL);
}

PyObject *bind_calls(PyObject *module, PyObject *args)
{
    PyObject *parts, *docs[2];
    if (!PyArg_ParseTuple(args, "O!UU:bind_calls", &PyList_Type, &parts, &docs[0], &docs[1]))
        return NULL;
    if (enqueue_def.ml_doc == NULL)
        enqueue_def.ml_doc = document("enqueue($self, obj, timeout=None)", docs[0]);
    if (dequeue_def.ml_doc == NULL)
        dequeue_def.ml_doc = document("dequeue($self, timeout=None, cancel=None, indefinite=False)", docs[1]);
    PyObject *self = enqueue_def.ml_doc && dequeue_def.ml_doc ? PyTuple_Pack(2, module, parts) : NULL;
    if (self == NULL)
        return NULL;
    PyObject *made = Py_BuildValue("NN", PyCFunction_NewEx(&enqueue_def, self, NULL),
                                   PyCFunction_NewEx(&dequeue_def, self, NULL));
    Py_DECREF(self);
    return made;
}
