/* What the files of the compiled engine share. */

#ifndef LOWTIDE_NATIVE_H
#define LOWTIDE_NATIVE_H

#include "../_native_helpers.h"
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

/* Where a function saves the inputs of regions inside it, see Frame.site_of. */
#define SITE_OF_REGION 1

/* The hooks, see _packing.py, `usual` if what is free is what Frame._keep_free says, `sites` where it is noted from where in the code it is called, or NULL; what it makes of an input of a region inside; whether it is one of a forward; how far one of a replay got; the last place before `end` that is wanted, below zero with an error. */
PyObject *new_packing(PyObject *slots, PyObject *plain, PyObject *grads, Py_ssize_t first, PyObject *frame, PyObject *region, PyObject *keep_free,
                      int usual, PyObject *sites);
PyObject *pack_for_region_inside(PyObject *packing, PyObject *tensor);
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

/* Calls that go the short way: whether a call is one; its replay: 1, 0 if it does something else by now, below zero with an error. */
int is_steady_type(PyObject *call);
int replay_steady(PyObject *call, PyObject *frame, PyObject *wanted);

/* Let go of what replays made, or of what backward has had of it; below zero with an error. */
int drop_values_in(PyObject *slots, int given_only);

/* Whether this is a slot without a value whose tensor is gone: 1, with its place and its frame; 0 if it is not; below zero if it takes more to tell. */
int is_gone_slot(PyObject *object, Py_ssize_t *index, PyObject **frame);

/* What a pack hook was given. */
PyObject *unpack_held(PyObject *packed);

/* Have a slot filled whose tensor is gone: 1, 0 if it takes the long way, below zero with an error. */
int fill_slot(PyObject *slot, PyObject *frame);

/* What a weak reference refers to, as a new reference; NULL without an error if it is gone. */
PyObject *strengthened(PyObject *ref);

/* What is in these places, if it leads to these modules and objects, which are referred to weakly; NULL if it takes more to tell. */
PyObject *outside_again(PyObject *places, PyObject *modules, PyObject *objects);

/* Whether what was taken from outside, or what was in objects, is surely still so; below zero with an error. */
int outside_is_as(PyObject *taken);
int objects_are_as(PyObject *objects);

/* How many types of objects regions were seen to change. */
Py_ssize_t mutable_types(void);

/* Each adds what is in one file to the module; below zero with an error. */
int add_guards(PyObject *module);
int add_settled(PyObject *module);
int add_short(PyObject *module);
int add_unpack(PyObject *module);
int add_outside(PyObject *module);

#endif
