/* What enqueue() and dequeue() return: asks the core, and takes a Python coroutine only where it has to wait. calls.py
 * has the same in Python. */

#include "core.h"

typedef struct {
    PyObject_HEAD
    /* The core; slow_path, which makes the coroutine that continues; then the arguments of enqueue (obj, timeout, NULL)
     * or dequeue (timeout, cancel, indefinite). NULL once begun. */
    PyObject *args[CALL_ARGS];
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
    for (int n = 0; n < CALL_ARGS; n++)
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

/* Have the core do it. PYGEN_NEXT: it could not, and the coroutine continues with what the core answered or raised. */
static PySendResult begin(Call *self, bool asks, PyObject **result)
{
    PyObject *args[CALL_ARGS], *outcome = Py_NewRef(Py_None);
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
    for (int n = 0; n < CALL_ARGS; n++)
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
    if (self->state->spare == NULL && self->state->call != NULL)
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

PyObject *new_call(State *state, const char *name, PyObject *const *args)
{
    Call *made = state->spare == NULL ? PyObject_GC_New(Call, state->call)
                                      : (Call *)PyObject_Init(state->spare, state->call);
    if (made == NULL)
        return NULL;
    state->spare = NULL;
    for (int n = 0; n < CALL_ARGS; n++)
        made->args[n] = Py_XNewRef(args[n]);
    made->rest = NULL;
    made->name = name;
    made->state = state;
    PyObject_GC_Track(made);
    return (PyObject *)made;
}
