/* enqueue() and dequeue() of one end: parse the arguments and make the awaitable. calls.py has the same in Python. */

#include "core.h"

/* Make a call from arguments by place or name. `self` is the module and the parts of `Calls`; `found` has the core, the
 * slow path and the arguments' defaults. */
static PyObject *parse_call(PyObject *self, const char *const *names, Py_ssize_t most, PyObject **found,
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
    return new_call(PyModule_GetState(PyTuple_GetItem(self, 0)), names[0], found);
}

static PyObject *enqueue(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const NAMES[] = {"MessageQueue.enqueue", "obj", "timeout"};
    PyObject *found[CALL_ARGS] = {NULL, NULL, NULL, Py_None, NULL};
    return parse_call(self, NAMES, 2, found, args, nargs, kwnames);
}

static PyObject *dequeue(PyObject *self, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    static const char *const NAMES[] = {"MessageQueue.dequeue", "timeout", "cancel", "indefinite"};
    PyObject *found[CALL_ARGS] = {NULL, NULL, Py_None, Py_None, Py_False};
    return parse_call(self, NAMES, 3, found, args, nargs, kwnames);
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
