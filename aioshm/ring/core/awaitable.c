/* A call: what enqueue() and dequeue() return, a coroutine without a frame where it need not wait */

#include "core.h"

typedef enum { NEW, RUNNING, WAITING, ENDED } Stage;

typedef struct {
    PyObject_HEAD
    Calls *calls;
    PyObject *args[3];        /* enqueue: obj, timeout; dequeue: timeout, cancel, indefinite */
    PyObject *rest;           /* the coroutine that goes on where the core could not */
    Stage stage;
    CallKind kind;
} Call;

PyObject *new_call(Calls *calls, CallKind kind, PyObject *const *args)
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

/* Let go of everything but the memory. */
static void end_call(Call *self)
{
    self->stage = ENDED;
    for (int n = 0; n < 3; n++)
        Py_CLEAR(self->args[n]);
    Py_CLEAR(self->rest);
}

/* Take the error that is set, as an object. */
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

/* Set an error again; takes the reference. */
static void restore_error(PyObject *error)
{
    PyErr_Restore(Py_NewRef((PyObject *)Py_TYPE(error)), error, PyException_GetTraceback(error));
}

/* Raise the error as `fail` does, which always raises; what is no Exception says nothing about the message, and stays. */
static void raise_as(PyObject *fail)
{
    if (fail == NULL || fail == Py_None || !PyErr_ExceptionMatches(PyExc_Exception))
        return;
    PyObject *error = fetch_error(), *nothing = call(fail, error);
    if (nothing == NULL) {
        Py_DECREF(error);
        return;
    }
    Py_DECREF(nothing);
    restore_error(error);
}

/* Have the core do it, if it can: 1 with the result, 0 with the coroutine that goes on, -1 with an error. */
static int begin_call(Call *self, PyObject **result)
{
    Calls *calls = self->calls;
    const bool sends = self->kind == SENDS;
    PyObject *timeout = self->args[sends], *answer = NULL;
    End *core = calls->sends == sends ? calls->core : NULL;
    if (self->kind == CLOSES) {
        *result = Py_NewRef(Py_None);
        return 1;
    }
    timeout = timeout == NULL ? Py_None : timeout;
    if (core != NULL) {
        Py_INCREF((PyObject *)core);
        answer = sends ? writer_send((WriterEnd *)core, self->args[0]) : reader_receive((ReaderEnd *)core, NULL);
        if (answer == NULL) {
            if (!sends)
                raise_as(calls->fail);
            Py_DECREF((PyObject *)core);
            return -1;
        }
        bool done = sends ? answer == Py_None : answer != core->empty && answer != core->slow_path;
        Py_DECREF((PyObject *)core);
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
    PyObject *stop = fetch_error();
    PyErr_SetString(PyExc_RuntimeError, "coroutine raised StopIteration");
    PyObject *error = fetch_error();
    PyException_SetCause(error, stop);  /* takes the reference */
    restore_error(error);
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

PyType_Spec call_spec = {
    "aioshm.ring._native.Call", sizeof(Call), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, call_slots,
};
