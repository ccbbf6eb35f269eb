/* What all compiled parts of lowtide share. They use nothing but CPython's interface, so that they do not depend on the release of PyTorch. */

#ifndef LOWTIDE_NATIVE_HELPERS_H
#define LOWTIDE_NATIVE_HELPERS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* Names of attributes that a file uses, and parts of lowtide and torch that it is given by name, each in a list of its own. */
#define DECLARE_NAME(name) static PyObject *n_##name;
#define DECLARE_PART(part) static PyObject *the_##part;
#define INTERN(name) if ((n_##name = PyUnicode_InternFromString(#name)) == NULL) return -1;
#define PART_ENTRY(part) {&the_##part, #part},
#define GET(object, name) PyObject_GetAttr(object, n_##name)
#define SET(object, name, value) PyObject_SetAttr(object, n_##name, value)
#define CALL(part) PyObject_CallNoArgs(the_##part)
#define CALL_ONE(part, argument) PyObject_CallOneArg(the_##part, argument)

struct part { PyObject **part; const char *name; };

/* Note parts that are given in a dictionary. */
static inline int note_parts(PyObject *given, struct part *parts, size_t count) {
    if (!PyDict_Check(given)) {
        PyErr_SetString(PyExc_TypeError, "it takes a dict");
        return -1;
    }
    for (size_t i = 0; i < count; i++) {
        PyObject *part = PyDict_GetItemString(given, parts[i].name);
        if (part == NULL) {
            PyErr_SetString(PyExc_KeyError, parts[i].name);
            return -1;
        }
        Py_XSETREF(*parts[i].part, Py_NewRef(part));
    }
    return 0;
}

/* Set an attribute to something that this takes over; below zero with an error, also if there is nothing. */
static inline int give(PyObject *object, PyObject *name, PyObject *value) {
    if (value == NULL) return -1;
    int failed = PyObject_SetAttr(object, name, value);
    Py_DECREF(value);
    return failed;
}

/* Whether something that this takes over is true; below zero with an error. */
static inline int truth(PyObject *value) {
    if (value == NULL) return -1;
    int is = value == Py_True ? 1 : value == Py_False || value == Py_None ? 0 : PyObject_IsTrue(value);
    Py_DECREF(value);
    return is;
}

/* Whether it is this very object; it is taken over. */
static inline int is_this(PyObject *value, PyObject *wanted) {
    if (value == NULL) return -1;
    Py_DECREF(value);
    return value == wanted;
}

/* A number that this takes over; -1 with an error. */
static inline Py_ssize_t number(PyObject *value) {
    if (value == NULL) return -1;
    Py_ssize_t is = PyLong_AsSsize_t(value);
    Py_DECREF(value);
    return is;
}

/* Done with a call of which only errors matter. */
static inline int done(PyObject *result) {
    Py_XDECREF(result);
    return result == NULL ? -1 : 0;
}

/* An attribute that has to be a list. */
static inline PyObject *list_of(PyObject *object, PyObject *name) {
    PyObject *value = PyObject_GetAttr(object, name);
    if (value != NULL && !PyList_Check(value)) {
        PyErr_Format(PyExc_TypeError, "%U has to be a list", name);
        Py_CLEAR(value);
    }
    return value;
}

#endif
