/* The module, its functions and types */

#include "core.h"

/* Functions */

static PyObject *fence(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(ignored))
{
    full_fence();
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"memory_fence", fence, METH_NOARGS, "Let no earlier load or store pass a later one."},
    {"bind_calls", bind_calls, METH_VARARGS, "Return enqueue() and dequeue() of a list's core and slow path; see calls.py."},
    {NULL, NULL, 0, NULL},
};

/* Add a type to the module; the caller owns the reference that is returned. */
static PyTypeObject *add_type(PyObject *module, PyType_Spec *spec)
{
    PyObject *type = PyType_FromModuleAndSpec(module, spec, NULL);
    if (type != NULL && PyModule_AddType(module, (PyTypeObject *)type) < 0)
        Py_CLEAR(type);
    return (PyTypeObject *)type;
}

static int execute(PyObject *module)
{
    State *state = PyModule_GetState(module);
    state->empty = PyObject_CallNoArgs((PyObject *)&PyBaseObject_Type);
    state->slow_path = PyObject_CallNoArgs((PyObject *)&PyBaseObject_Type);
    if (state->empty == NULL || state->slow_path == NULL
        || PyModule_AddObjectRef(module, "EMPTY", state->empty) < 0
        || PyModule_AddObjectRef(module, "SLOW_PATH", state->slow_path) < 0)
        return -1;
    state->call = (PyTypeObject *)PyType_FromModuleAndSpec(module, &call_spec, NULL);
    if (state->call == NULL)
        return -1;
    state->writer = add_type(module, &writer_spec);
    state->reader = add_type(module, &reader_spec);
    return state->writer == NULL || state->reader == NULL ? -1 : 0;
}

static int module_traverse(PyObject *module, visitproc visit, void *arg)
{
    State *state = PyModule_GetState(module);
    Py_VISIT(state->empty);
    Py_VISIT(state->slow_path);
    Py_VISIT(state->writer);
    Py_VISIT(state->reader);
    Py_VISIT(state->call);
    return 0;
}

static int module_clear(PyObject *module)
{
    State *state = PyModule_GetState(module);
    if (state->spare != NULL) {  /* before its type: freeing it reads the type */
        PyObject_GC_Del(state->spare);
        state->spare = NULL;
    }
    Py_CLEAR(state->empty);
    Py_CLEAR(state->slow_path);
    Py_CLEAR(state->writer);
    Py_CLEAR(state->reader);
    Py_CLEAR(state->call);
    return 0;
}

static void module_free(void *module)
{
    module_clear(module);
}

/* All state is the module's or an object's. But that an end is used by one thread at a time is checked by plain loads and
 * stores (`owner`), which the GIL keeps apart: a free-threaded interpreter has to keep the GIL. */
static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, execute},
#ifdef Py_mod_gil
    {Py_mod_gil, Py_MOD_GIL_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "aioshm.ring._native",
    .m_doc = "The hot path of a ring in C; see reference.py.",
    .m_size = sizeof(State),
    .m_methods = functions,
    .m_slots = module_slots,
    .m_traverse = module_traverse,
    .m_clear = module_clear,
    .m_free = module_free,
};

PyMODINIT_FUNC PyInit__native(void)
{
    return PyModuleDef_Init(&definition);
}
