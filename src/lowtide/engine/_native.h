/* What the files of the compiled engine share. */

#ifndef LOWTIDE_NATIVE_H
#define LOWTIDE_NATIVE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stddef.h>
#include <structmember.h>

/* Each state of a dictionary has a number: from 3.13 on not where attributes of objects are stored, later not at all. */
#define LOWTIDE_NUMBERED_DICTS (PY_VERSION_HEX < 0x030D0000)

/* In the place of a version: see _guards/_reading.py. */
#define UNREAD (-2)

/* Names of attributes, interned as the module is made. */
extern PyObject *name_version;

/* How often a tensor was written to; below zero with an error. */
int version_of(PyObject *tensor, long long *version);

/* How often each tensor in a list was written to, see _guards/_reading.py. */
PyObject *versions_in(PyObject *tensors);

/* The hooks, see _packing.py; whether it is one of a forward; how far one of a replay got; the last place before `end` that is wanted, below zero with an error. */
PyObject *new_packing(PyObject *slots, PyObject *plain, PyObject *grads, Py_ssize_t first, PyObject *frame, PyObject *region, PyObject *keep_free);
int is_packing_type(PyObject *object);
PyObject *new_filling(PyObject *slots, Py_ssize_t last, Py_ssize_t stop);
Py_ssize_t filling_reached(PyObject *filling);
Py_ssize_t last_wanted_in(PyObject *slots, Py_ssize_t wanted, Py_ssize_t end);

/* Whether no tensor was modified since it was taken, of one module and of several; below zero with an error. */
int is_surely_unmodified(PyObject *taken);
int are_surely_unmodified(PyObject *watches);

/* What surrounds a call, see Surroundings: whether it is so, below zero with an error; what it is now, None if it takes more to tell. */
int surroundings_are_so(PyObject *around, PyObject *ambient);
PyObject *surroundings_now(PyObject *around, int attention);

/* What is settled in a module, see Settled: `read` and `has`, below zero with an error. */
int is_settled_type(PyObject *object);
PyObject *read_settled(PyObject *settled, PyObject *flags);
int settled_has_these(PyObject *settled, PyObject *taken, PyObject *skipped);

/* Each adds what is in one file to the module; below zero with an error. */
int add_guards(PyObject *module);
int add_settled(PyObject *module);
int add_short(PyObject *module);

#endif
