/* A fuzz target of tools/fuzz/targets, called by libFuzzer in an embedded Python.

   Built with -fsanitize=fuzzer,address,undefined; the native parts of aioshm beside it are built with the same, so
   libFuzzer sees the branches that C takes, and the sanitizers what it does to memory. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

static PyObject *run;

int LLVMFuzzerInitialize(int *argc, char ***argv)
{
    const char *name = getenv("FUZZ_TARGET");
    (void)argc, (void)argv;
    Py_InitializeEx(0);
    PyObject *module = PyImport_ImportModule("tools.fuzz.targets");
    PyObject *targets = module == NULL ? NULL : PyObject_GetAttrString(module, "TARGETS");
    PyObject *target = targets == NULL || name == NULL ? NULL : PyMapping_GetItemString(targets, name);
    run = target == NULL ? NULL : PyObject_GetAttrString(target, "run");
    if (run == NULL) {
        PyErr_Print();
        abort();
    }
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    PyObject *result = PyObject_CallFunction(run, "y#", (const char *)data, (Py_ssize_t)size);
    if (result == NULL) {
        PyErr_Print();
        abort();
    }
    Py_DECREF(result);
    return 0;
}
