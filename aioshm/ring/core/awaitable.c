/* What enqueue() and dequeue() return: asks the core, and takes a Python coroutine only where it has to wait. */

#include "core.h"

/* Makes the awaitables of one end of a queue. */
typedef struct {
    PyObject_HEAD
    PyObject *core;           /* asked first, where it is a native one of this end */
    PyObject *slow_path;      /* makes the coroutine: of the core's outcome, then of the call's arguments */
    PyTypeObject *writer, *reader, *call;
    void *spare;              /* the memory of a call that has ended: 10% of a message of 64 bytes */
} Calls;

typedef struct {
    PyObject_HEAD
    Calls *calls;
    PyObject *args[3];        /* enqueue: obj, timeout, NULL; dequeue: timeout, cancel, indefinite; NULL once begun */
    PyObject *rest;           /* the coroutine that continues where the core could not; NULL: none, or it has ended */
    bool sends;
} Call;

static bool is_new(const Call *self)
{
    return self->args[0] != NULL;
}

static int call_clear(Call *self)
{
    for (int n = 0; n < 3; n++)
        Py_CLEAR(self->args[n]);
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

/* Make the coroutine that continues: what a core did not do (None: none was asked), or it raises the core's error. */
static PySendResult begin_rest(Call *self, PyObject *outcome, PyObject **args)
{
    self->rest = PyObject_CallFunctionObjArgs(self->calls->slow_path, outcome, args[0], args[1], args[2], NULL);
    Py_DECREF(outcome);
    for (int n = 0; n < 3; n++)
        Py_XDECREF(args[n]);
    return self->rest == NULL ? PYGEN_ERROR : PYGEN_NEXT;
}

/* Have the core do it. PYGEN_NEXT: it could not, and the rest continues. */
static PySendResult begin(Call *self, bool asks, PyObject **result)
{
    PyObject *args[3], *core = self->calls->core, *outcome = Py_NewRef(Py_None);
    memcpy(args, self->args, sizeof args);
    memset(self->args, 0, sizeof args);
    if (asks && core != NULL && PyObject_TypeCheck(core, self->sends ? self->calls->writer : self->calls->reader)) {
        End *end = (End *)Py_NewRef(core);
        Py_DECREF(outcome);
        outcome = self->sends ? writer_send((WriterEnd *)end, args[0]) : reader_receive((ReaderEnd *)end, NULL);
        bool done = self->sends ? outcome == Py_None : outcome != end->empty && outcome != end->slow_path;
        Py_DECREF(core);
        if (outcome == NULL && PyErr_ExceptionMatches(PyExc_Exception)) {
            outcome = fetch_error();
        } else if (outcome == NULL || done) {
            for (int n = 0; n < 3; n++)
                Py_XDECREF(args[n]);
            *result = outcome;
            return outcome == NULL ? PYGEN_ERROR : PYGEN_RETURN;
        }
    }
    return begin_rest(self, outcome, args);
}

static PySendResult call_am_send(Call *self, PyObject *sent, PyObject **result)
{
    PySendResult outcome = PYGEN_NEXT;
    *result = NULL;
    if (is_new(self)) {
        outcome = begin(self, true, result);
    } else if (self->rest == NULL) {
        PyErr_SetString(PyExc_RuntimeError, "cannot reuse already awaited coroutine");
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
    Py_VISIT(self->calls);
    for (int n = 0; n < 3; n++)
        Py_VISIT(self->args[n]);
    Py_VISIT(self->rest);
    return 0;
}

static const char *name_of(const Call *self)
{
    return self->sends ? "MessageQueue.enqueue" : "MessageQueue.dequeue";
}

static PyObject *call_name(Call *self, void *Py_UNUSED(closure))
{
    return PyUnicode_FromString(name_of(self));
}

static void call_dealloc(Call *self)
{
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    PyObject_GC_UnTrack(self);
    if (is_new(self)) {
        PyObject *kind, *error, *traceback;
        PyErr_Fetch(&kind, &error, &traceback);
        if (PyErr_WarnFormat(PyExc_RuntimeWarning, 1, "coroutine '%s' was never awaited", name_of(self)) < 0)
            PyErr_WriteUnraisable((PyObject *)self->calls);
        PyErr_Restore(kind, error, traceback);
    }
    call_clear(self);
    Calls *calls = self->calls;
    if (calls->spare == NULL)
        calls->spare = self;
    else
        PyObject_GC_Del(self);
    Py_DECREF((PyObject *)calls);
    Py_DECREF(type);
}

static PyMethodDef call_methods[] = {
    {"send", CALL call_send, METH_O, "See `collections.abc.Coroutine`."},
    {"throw", CALL call_throw, METH_VARARGS, "See `collections.abc.Coroutine`."},
    {"close", CALL call_close, METH_NOARGS, "See `collections.abc.Coroutine`."},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef call_attributes[] = {
    {"__qualname__", (getter)call_name, NULL, "The method that was called.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
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
    {Py_tp_getset, call_attributes},
    {0, NULL},
};

PyType_Spec call_spec = {
    "aioshm.ring._native.Call", sizeof(Call), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION, call_slots,
};

/* Calls */

/* Make a call from arguments by place or name; `found` has the defaults. */
static PyObject *new_call(Calls *calls, const char *const *names, Py_ssize_t most, PyObject **found,
                          PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    if (nargs > most)
        return PyErr_Format(PyExc_TypeError, "%s() takes at most %zd arguments (%zd given)", names[0], most, nargs);
    for (Py_ssize_t n = 0; n < nargs; n++)
        found[n] = args[n];
    for (Py_ssize_t n = 0; kwnames != NULL && n < PyTuple_Size(kwnames); n++) {
        PyObject *word = PyTuple_GetItem(kwnames, n);
        Py_ssize_t at = 0;
        while (at < most && PyUnicode_CompareWithASCIIString(word, names[1 + at]) != 0)
            at++;
        if (at == most || at < nargs)
            return PyErr_Format(PyExc_TypeError, "%s() got %s argument '%U'", names[0],
                                at == most ? "an unexpected keyword" : "multiple values for", word);
        found[at] = args[nargs + n];
    }
    if (found[0] == NULL)
        return PyErr_Format(PyExc_TypeError, "%s() missing a required argument: '%s'", names[0], names[1]);
    Call *made = calls->spare == NULL ? PyObject_GC_New(Call, calls->call)
                                      : (Call *)PyObject_Init(calls->spare, calls->call);
    if (made == NULL)
        return NULL;
    calls->spare = NULL;
    made->calls = (Calls *)Py_NewRef((PyObject *)calls);
    for (int n = 0; n < 3; n++)
        made->args[n] = Py_XNewRef(found[n]);
    made->rest = NULL;
    made->sends = found[2] == NULL;
    PyObject_GC_Track(made);
    return (PyObject *)made;
}

static PyObject *calls_enqueue(Calls *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const NAMES[] = {"enqueue", "obj", "timeout"};
    PyObject *found[3] = {NULL, Py_None, NULL};
    return new_call(self, NAMES, 2, found, args, nargs, kwnames);
}

static PyObject *calls_dequeue(Calls *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const NAMES[] = {"dequeue", "timeout", "cancel", "indefinite"};
    PyObject *found[3] = {Py_None, Py_None, Py_False};
    return new_call(self, NAMES, 3, found, args, nargs, kwnames);
}

static int calls_init(Calls *self, PyObject *args, PyObject *kwargs)
{
    PyObject *slow_path;
    State *state = state_of((PyObject *)self);
    if (state == NULL || no_keywords(kwargs) < 0 || !PyArg_ParseTuple(args, "O:Calls", &slow_path))
        return -1;
    if (self->call != NULL) {
        PyErr_SetString(PyExc_RuntimeError, "this was made already");
        return -1;
    }
    self->slow_path = Py_NewRef(slow_path);
    self->writer = (PyTypeObject *)Py_NewRef((PyObject *)state->writer);
    self->reader = (PyTypeObject *)Py_NewRef((PyObject *)state->reader);
    self->call = (PyTypeObject *)Py_NewRef((PyObject *)state->call);
    return 0;
}

static int calls_traverse(Calls *self, visitproc visit, void *arg)
{
    Py_VISIT(Py_TYPE((PyObject *)self));
    Py_VISIT(self->core);
    Py_VISIT(self->slow_path);
    return 0;
}

static int calls_clear(Calls *self)
{
    Py_CLEAR(self->core);
    Py_CLEAR(self->slow_path);
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

static PyMethodDef calls_methods[4];

/* Gives the two calls the docstrings of MessageQueue's, so that each stands once. */
static PyObject *calls_document(PyObject *Py_UNUSED(type), PyObject *args)
{
    static const char *const SIGNATURES[] = {
        "enqueue($self, obj, timeout=None)\n--\n\n",
        "dequeue($self, timeout=None, cancel=None, indefinite=False)\n--\n\n",
    };
    const char *docs[2];
    if (!PyArg_ParseTuple(args, "ss:document", &docs[0], &docs[1]))
        return NULL;
    for (int n = 0; n < 2; n++) {
        size_t signature = strlen(SIGNATURES[n]), doc = strlen(docs[n]) + 1;
        char *text = PyMem_Malloc(signature + doc); /* for as long as the type, which is never unloaded */
        if (text == NULL)
            return PyErr_NoMemory();
        memcpy(text, SIGNATURES[n], signature);
        memcpy(text + signature, docs[n], doc);
        calls_methods[n].ml_doc = text;
    }
    Py_RETURN_NONE;
}

static PyMethodDef calls_methods[4] = {
    {"enqueue", FAST calls_enqueue, METH_FASTCALL | METH_KEYWORDS, NULL},
    {"dequeue", FAST calls_dequeue, METH_FASTCALL | METH_KEYWORDS, NULL},
    {"document", calls_document, METH_VARARGS | METH_STATIC, "Set the docstrings of enqueue and dequeue."},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef calls_members[] = {
    {"core", T_OBJECT, offsetof(Calls, core), 0, "The core that is asked first, or None."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot calls_slots[] = {
    {Py_tp_doc, "The calls of an awaited queue; see reference.py."},
    {Py_tp_init, calls_init},
    {Py_tp_dealloc, calls_dealloc},
    {Py_tp_traverse, calls_traverse},
    {Py_tp_clear, calls_clear},
    {Py_tp_methods, calls_methods},
    {Py_tp_members, calls_members},
    {0, NULL},
};

PyType_Spec calls_spec = {
    "aioshm.ring._native.Calls", sizeof(Calls), 0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE, calls_slots,
};
