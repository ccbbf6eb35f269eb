/* What the files of the compiled engine share. */

#ifndef LOWTIDE_NATIVE_H
#define LOWTIDE_NATIVE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

/* Each state of a dictionary has a number: from 3.13 on not where attributes of objects are stored, later not at all. */
#define LOWTIDE_NUMBERED_DICTS (PY_VERSION_HEX < 0x030D0000)

/* Names of attributes, interned as the module is made. */
extern PyObject *name_version;

/* How often a tensor was written to; below zero with an error. */
int version_of(PyObject *tensor, long long *version);

/* How often each tensor in a list was written to, see _guards/_reading.py. */
PyObject *versions_in(PyObject *tensors);

/* Each adds what is in one file to the module; below zero with an error. */
int add_guards(PyObject *module);
int add_settled(PyObject *module);

#endif
