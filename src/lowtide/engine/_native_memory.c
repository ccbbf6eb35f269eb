/* Memory that Python has no object for: see _guards/_random.py. */

#include "_native.h"
#include <string.h>

/* Whether these bytes are at an address. */
static PyObject *is_at(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    if (count != 2 || !PyLong_Check(arguments[0]) || !PyBytes_Check(arguments[1]))
        return PyErr_Format(PyExc_TypeError, "it takes an address and bytes");
    void *address = PyLong_AsVoidPtr(arguments[0]);
    if (address == NULL) return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_ValueError, "nothing is there");
    return PyBool_FromLong(memcmp(address, PyBytes_AS_STRING(arguments[1]), (size_t)PyBytes_GET_SIZE(arguments[1])) == 0);
}

static PyMethodDef functions[] = {
    {"is_at", (PyCFunction)(void (*)(void))is_at, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

int add_memory(PyObject *module) { return PyModule_AddFunctions(module, functions); }
