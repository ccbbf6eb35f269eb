/* Dictionaries to which nothing has happened, and what is in them: see _guards/_settled.py.
 *
 * CPython numbers the states of its dictionaries: each change of any of them takes the next number of all (PEP 509, up to 3.12). To
 * compare numbers is to look at one line of memory for each dictionary, where to compare contents takes several, and what a region
 * looks at before it runs is seldom in the processor's caches. For the same reason all that will be looked at is asked for in advance.
 */

#include "_native.h"
#include <string.h>

#if LOWTIDE_NUMBERED_DICTS

#if defined(__GNUC__) || defined(__clang__)
#define SOON(address) __builtin_prefetch(address)
#else
#define SOON(address) ((void)(address))
#endif

/* What was read is borrowed: as long as no number is another one, the dictionaries hold it. */
typedef struct {
    PyObject_HEAD
    Py_ssize_t dicts, tables, tensors, settings; /* the first of the dictionaries are the tables in which the tensors are, in order */
    PyDictObject **dict;
    uint64_t *number;
    Py_ssize_t *size; /* of each table */
    PyObject **tensor, **setting;
    PyObject *counting, *count; /* an object, and what its `next_id` was */
    PyObject *flags, *nothing, *names; /* the names in the tables, in order; they are held, for a table may let go of its own */
} Settled;

static PyObject *name_next_id;

static int settled_traverse(PyObject *self, visitproc visit, void *arg) {
    Settled *settled = (Settled *)self;
    for (Py_ssize_t index = 0; index < settled->dicts; index++) Py_VISIT(settled->dict[index]);
    Py_VISIT(settled->counting);
    Py_VISIT(settled->count);
    Py_VISIT(settled->flags);
    Py_VISIT(settled->nothing);
    Py_VISIT(settled->names);
    return 0;
}

static int settled_clear(PyObject *self) {
    Settled *settled = (Settled *)self;
    Py_ssize_t count = settled->dicts;
    settled->dicts = settled->tables = settled->tensors = settled->settings = 0;
    for (Py_ssize_t index = 0; index < count; index++) Py_DECREF(settled->dict[index]);
    Py_CLEAR(settled->counting);
    Py_CLEAR(settled->count);
    Py_CLEAR(settled->flags);
    Py_CLEAR(settled->nothing);
    Py_CLEAR(settled->names);
    return 0;
}

static void settled_dealloc(PyObject *self) {
    PyObject_GC_UnTrack(self);
    settled_clear(self);
    PyMem_Free(((Settled *)self)->dict);
    Py_TYPE(self)->tp_free(self);
}

static PyObject *settled_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    PyObject *dicts, *counting, *flags, *nothing;
    Py_ssize_t tables;
    if (!PyArg_ParseTuple(arguments, "O!nOO!O!", &PyList_Type, &dicts, &tables, &counting, &PyList_Type, &flags, &PyList_Type, &nothing))
        return NULL;
    if (tables < 0 || tables > PyList_GET_SIZE(dicts)) return PyErr_Format(PyExc_IndexError, "there are %zd dicts", PyList_GET_SIZE(dicts));
    for (Py_ssize_t index = 0; index < PyList_GET_SIZE(dicts); index++)
        if (!PyDict_Check(PyList_GET_ITEM(dicts, index))) return PyErr_Format(PyExc_TypeError, "it takes a list of dicts");
    Settled *settled = (Settled *)type->tp_alloc(type, 0);
    if (settled == NULL) return NULL;
    Py_ssize_t count = PyList_GET_SIZE(dicts);
    settled->dict = PyMem_Malloc((size_t)(count ? count : 1) * (sizeof(PyObject *) + sizeof(uint64_t)));
    if (settled->dict == NULL) {
        Py_DECREF(settled);
        return PyErr_NoMemory();
    }
    settled->number = (uint64_t *)(settled->dict + count);
    settled->dicts = count;
    settled->tables = tables;
    settled->counting = Py_NewRef(counting);
    settled->flags = Py_NewRef(flags);
    settled->nothing = Py_NewRef(nothing);
    for (Py_ssize_t index = 0; index < count; index++) {
        settled->dict[index] = (PyDictObject *)Py_NewRef(PyList_GET_ITEM(dicts, index));
        settled->number[index] = settled->dict[index]->ma_version_tag;
    }
    settled->count = PyObject_GetAttr(counting, name_next_id);
    if (settled->count == NULL) Py_CLEAR(settled);
    return (PyObject *)settled;
}

/* Whether nobody made another one since; below zero with an error. */
static int is_count(Settled *settled) {
    PyObject *count = PyObject_GetAttr(settled->counting, name_next_id);
    if (count == NULL) return -1;
    int same = count == settled->count ? 1 : PyObject_RichCompareBool(count, settled->count, Py_EQ);
    Py_DECREF(count);
    return same;
}

/* Whether a table holds what it held from one place on, under the same names. */
static int holds_these(Settled *settled, PyObject *table, Py_ssize_t first) {
    PyObject *name, *value;
    Py_ssize_t position = 0;
    for (Py_ssize_t at = first; PyDict_Next(table, &position, &name, &value); at++)
        if (settled->tensor[at] != value || PyList_GET_ITEM(settled->names, at) != name) return 0;
    return 1;
}

/* The tables are looked into where their number is another one: replays put copies there for a while. One that was let go of and is there
 * again is the same one: it is what is there now. */
static int is_settled(Settled *settled) {
    if (settled->size == NULL) return 0; /* nothing was filled in */
    for (Py_ssize_t index = settled->tables; index < settled->dicts; index++)
        if (settled->dict[index]->ma_version_tag != settled->number[index]) return 0;
    Py_ssize_t at = 0;
    for (Py_ssize_t index = 0; index < settled->tables; index++) {
        PyDictObject *table = settled->dict[index];
        Py_ssize_t size = PyDict_GET_SIZE(table);
        if (table->ma_version_tag != settled->number[index]) {
            if (size != settled->size[index] || !holds_these(settled, (PyObject *)table, at)) return 0;
            settled->number[index] = table->ma_version_tag;
        }
        at += size;
    }
    return 1;
}

static void ask_for(Settled *settled) {
    for (Py_ssize_t index = 0; index < settled->dicts; index++) SOON(&settled->dict[index]->ma_version_tag);
}

/* All names in the tables. */
static PyObject *names_in(Settled *settled) {
    PyObject *names = PyList_New(0), *name;
    for (Py_ssize_t index = 0; names != NULL && index < settled->tables; index++) {
        Py_ssize_t position = 0;
        while (names != NULL && PyDict_Next((PyObject *)settled->dict[index], &position, &name, NULL))
            if (PyList_Append(names, name)) Py_CLEAR(names);
    }
    return names;
}

/* Note what was read since; false if something has changed meanwhile. */
static PyObject *settled_fill(PyObject *self, PyObject *arguments) {
    Settled *settled = (Settled *)self;
    PyObject *tensors, *settings;
    if (!PyArg_ParseTuple(arguments, "O!O!", &PyList_Type, &tensors, &PyList_Type, &settings)) return NULL;
    Py_ssize_t counts[] = {settled->dicts, PyList_GET_SIZE(tensors), PyList_GET_SIZE(settings)}, total = 0;
    for (Py_ssize_t index = 0; index < settled->dicts; index++) {
        if (settled->dict[index]->ma_version_tag != settled->number[index]) Py_RETURN_FALSE;
        if (index < settled->tables) total += PyDict_GET_SIZE(settled->dict[index]);
    }
    if (total != counts[1]) return PyErr_Format(PyExc_ValueError, "there are %zd tensors in the tables", total);
    size_t size = (size_t)counts[0] * (sizeof(PyObject *) + sizeof(uint64_t) + sizeof(Py_ssize_t)) +
                  (size_t)(counts[1] + counts[2]) * sizeof(PyObject *);
    PyObject *names = names_in(settled);
    if (names == NULL) return NULL;
    Py_XSETREF(settled->names, names);
    PyDictObject **block = PyMem_Realloc(settled->dict, size ? size : 1);
    if (block == NULL) return PyErr_NoMemory();
    settled->dict = block;
    settled->number = (uint64_t *)(block + counts[0]);
    settled->size = (Py_ssize_t *)(settled->number + counts[0]);
    settled->tensor = (PyObject **)(settled->size + counts[0]);
    settled->setting = settled->tensor + counts[1];
    settled->tensors = counts[1];
    settled->settings = counts[2];
    for (Py_ssize_t index = 0; index < settled->tables; index++) settled->size[index] = PyDict_GET_SIZE(settled->dict[index]);
    for (Py_ssize_t index = 0; index < counts[1]; index++) settled->tensor[index] = PyList_GET_ITEM(tensors, index);
    for (Py_ssize_t index = 0; index < counts[2]; index++) settled->setting[index] = PyList_GET_ITEM(settings, index);
    Py_RETURN_TRUE;
}

static PyObject *listed(PyObject **values, Py_ssize_t count) {
    PyObject *list = PyList_New(count);
    for (Py_ssize_t index = 0; list != NULL && index < count; index++) PyList_SET_ITEM(list, index, Py_NewRef(values[index]));
    return list;
}

/* What Watch.take_again tells; None if something has changed, or the flags are others. */
PyObject *read_settled(PyObject *self, PyObject *flags) {
    Settled *settled = (Settled *)self;
    if (!PyList_Check(flags)) return PyErr_Format(PyExc_TypeError, "it takes a list");
    ask_for(settled);
    for (Py_ssize_t index = 0; index < settled->tensors; index++) SOON(settled->tensor[index]);
    int same = is_count(settled);
    if (same > 0) same = PyObject_RichCompareBool(flags, settled->flags, Py_EQ);
    if (same < 0) return NULL;
    if (!same || !is_settled(settled)) Py_RETURN_NONE; /* that comes last: nothing runs between it and the lists */
    /* Held before anything else runs: what tells a version may be code of a subclass of tensors. */
    PyObject *tensors = listed(settled->tensor, settled->tensors), *settings = listed(settled->setting, settled->settings);
    PyObject *versions = tensors == NULL ? NULL : versions_in(tensors), *found = NULL;
    if (versions != NULL && settings != NULL) 
        found = PyTuple_Pack(6, tensors, versions, flags, settings, settled->nothing, settled->nothing);
    Py_XDECREF(tensors);
    Py_XDECREF(versions);
    Py_XDECREF(settings);
    return found;
}

static int are_these(PyObject **values, Py_ssize_t count, PyObject *list, PyObject *skipped) {
    Py_ssize_t skip = 0, skips = skipped == NULL ? 0 : PyList_GET_SIZE(skipped);
    if (PyList_GET_SIZE(list) != count) return 0;
    for (Py_ssize_t index = 0; index < count; index++) {
        if (skip < skips && PyLong_AsSsize_t(PyList_GET_ITEM(skipped, skip)) == index) skip++;
        else if (PyList_GET_ITEM(list, index) != values[index]) return 0;
    }
    return 1;
}

/* Whether these are the tensors, but for those at the places that are skipped, the flags and the settings, and nothing has changed; below
 * zero with an error. */
static int has_these(Settled *settled, PyObject *tensors, PyObject *skipped, PyObject *flags, PyObject *settings) {
    ask_for(settled);
    int same = is_count(settled);
    if (same > 0) same = PyObject_RichCompareBool(flags, settled->flags, Py_EQ);
    if (same > 0)
        same = is_settled(settled) && are_these(settled->tensor, settled->tensors, tensors, skipped) &&
               are_these(settled->setting, settled->settings, settings, NULL);
    return PyErr_Occurred() ? -1 : same;
}

static PyObject *settled_has(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    int fine = count == 4;
    for (Py_ssize_t index = 0; fine && index < count; index++) fine = PyList_Check(arguments[index]);
    if (!fine) return PyErr_Format(PyExc_TypeError, "it takes four lists");
    int has = has_these((Settled *)self, arguments[0], arguments[1], arguments[2], arguments[3]);
    return has < 0 ? NULL : PyBool_FromLong(has);
}

int settled_has_these(PyObject *settled, PyObject *taken, PyObject *skipped) {
    for (int part = 0; part < 4; part++)
        if (!PyList_Check(PyTuple_GET_ITEM(taken, part))) return 0;
    return has_these((Settled *)settled, PyTuple_GET_ITEM(taken, 0), skipped, PyTuple_GET_ITEM(taken, 2), PyTuple_GET_ITEM(taken, 3));
}

static PyMethodDef settled_methods[] = {
    {"fill", settled_fill, METH_VARARGS, NULL},
    {"has", (PyCFunction)(void (*)(void))settled_has, METH_FASTCALL, NULL},
    {"read", read_settled, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject SettledType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "lowtide.engine._native.Settled",
    .tp_basicsize = sizeof(Settled),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_doc = "Dictionaries to which nothing has happened since it was made, and what is in them.",
    .tp_traverse = settled_traverse,
    .tp_clear = settled_clear,
    .tp_dealloc = settled_dealloc,
    .tp_methods = settled_methods,
    .tp_new = settled_new,
};

int is_settled_type(PyObject *object) { return Py_TYPE(object) == &SettledType; }

int add_settled(PyObject *module) {
    name_next_id = PyUnicode_InternFromString("next_id");
    return name_next_id == NULL || PyType_Ready(&SettledType) || PyModule_AddObjectRef(module, "Settled", (PyObject *)&SettledType) ? -1 : 0;
}

#else

int is_settled_type(PyObject *object) { return 0; }

PyObject *read_settled(PyObject *settled, PyObject *flags) { Py_RETURN_NONE; }

int settled_has_these(PyObject *settled, PyObject *taken, PyObject *skipped) { return 0; }

int add_settled(PyObject *module) { return PyModule_AddObjectRef(module, "Settled", Py_None); }

#endif
