/* What a call that goes the short way reads from outside of its arguments and modules, see _guards/_outside.py and Steady.take_outside.
 *
 * Here are lists of regions, of modules and of plain values that stay what they are, and plain values; for all else there is nothing
 * returned, without an error, and the twins in Python look.
 */

#include "_native.h"

#define NAMES(NAME) \
    NAME(__dict__) NAME(__lowtide_parts__) NAME(_owner) NAME(_weak) NAME(code) NAME(fill) NAME(labels) NAME(make) NAME(name) NAME(original) \
    NAME(parts) NAME(steady)
NAMES(DECLARE_NAME)

#define PARTS(PART) PART(ATOMS) PART(Box) PART(MUTABLE) PART(Module) PART(STAND_INS) PART(Tensor) PART(extend_list) PART(make_list)
PARTS(DECLARE_PART)

#define LARGEST 64 /* _LARGEST_CONTAINER */

static PyObject *no_arguments;

/* Whether a type is among others; below zero with an error. */
static int is_among(PyObject *types, PyObject *value) { return PySet_Contains(types, (PyObject *)Py_TYPE(value)); }

/* Place.read; NULL without an error if it takes more. */
static PyObject *read_place(PyObject *place) {
    PyObject *owner = GET(place, _owner), *name = GET(place, name), *value = NULL;
    int weak = owner == NULL || name == NULL ? -1 : truth(GET(place, _weak));
    if (weak == 1) Py_SETREF(owner, strengthened(owner));
    if (weak >= 0 && owner != NULL) {
        if (PyDict_CheckExact(owner)) value = Py_XNewRef(PyDict_GetItemWithError(owner, name));
        else if (PyCell_Check(owner)) value = Py_XNewRef(PyCell_GET(owner));
        else if (!PyContextVar_CheckExact(owner)) value = PyObject_GetAttr(owner, name);
    }
    Py_XDECREF(owner);
    Py_XDECREF(name);
    if (value != NULL && is_among(the_STAND_INS, value)) Py_CLEAR(value);
    PyErr_Clear();
    return value;
}

/* What a region calls; NULL without an error if this is none. */
static PyObject *called_by_region(PyObject *value) {
    if (!PyFunction_Check(value)) return NULL;
    PyObject *own = GET(value, __dict__), *called = NULL, *itself = NULL;
    PyObject *parts = own != NULL && PyDict_Check(own) ? PyDict_GetItemWithError(own, n___lowtide_parts__) : NULL;
    if (parts != NULL && PyTuple_Check(parts) && PyTuple_GET_SIZE(parts) == 3 && PyWeakref_Check(PyTuple_GET_ITEM(parts, 0))) {
        itself = strengthened(PyTuple_GET_ITEM(parts, 0));
        if (itself == value) called = Py_NewRef(PyTuple_GET_ITEM(parts, 1));
    }
    Py_XDECREF(own);
    Py_XDECREF(itself);
    PyErr_Clear();
    return called;
}

/* Whether the next of what was reached before is this one. */
static int is_next(PyObject *before, Py_ssize_t *at, PyObject *value) {
    if (*at >= PyList_GET_SIZE(before)) return 0;
    PyObject *then = strengthened(PyList_GET_ITEM(before, (*at)++));
    Py_XDECREF(then);
    return then == value;
}

struct reached { PyObject *modules, *objects; Py_ssize_t module, object; };

/* Whether a part of a list leads to what it led to before: nothing, a module, or what a region calls; below zero with an error. */
static int leads_to_same(PyObject *part, struct reached *before) {
    int plain = is_among(the_ATOMS, part);
    if (plain) return plain;
    int module = PyObject_IsInstance(part, the_Module);
    if (module) return module < 0 ? -1 : is_next(before->modules, &before->module, part);
    PyObject *called = called_by_region(part);
    if (called == NULL) return 0;
    module = PyObject_IsInstance(called, the_Module);
    if (module >= 0) module = module ? is_next(before->modules, &before->module, called) : is_next(before->objects, &before->object, called);
    Py_DECREF(called);
    return module;
}

/* A list, taken apart. */
static PyObject *boxed(PyObject *list) {
    PyObject *box = ((PyTypeObject *)the_Box)->tp_new((PyTypeObject *)the_Box, no_arguments, NULL);
    if (box == NULL) return NULL;
    if (SET(box, make, the_make_list) || SET(box, fill, the_extend_list) || give(box, n_parts, PyList_GetSlice(list, 0, PyList_GET_SIZE(list))) ||
        SET(box, labels, no_arguments) || SET(box, original, Py_None) || SET(box, code, Py_None) || SET(box, steady, Py_False))
        Py_CLEAR(box);
    return box;
}

/* What is in a place, as read() says it; NULL without an error if it takes more to tell. */
static PyObject *read_again(PyObject *place, struct reached *before) {
    PyObject *value = read_place(place), *parts = NULL, *taken = NULL;
    if (value == NULL) return NULL;
    int fine = is_among(the_ATOMS, value);
    if (fine == 1) parts = Py_NewRef(Py_None);
    else if (fine == 0 && PyList_CheckExact(value) && PyList_GET_SIZE(value) <= LARGEST) {
        fine = 1;
        for (Py_ssize_t i = 0; fine == 1 && i < PyList_GET_SIZE(value); i++) fine = leads_to_same(PyList_GET_ITEM(value, i), before);
        if (fine == 1) parts = boxed(value);
    }
    if (parts != NULL) taken = PyTuple_Pack(3, place, value, parts);
    Py_DECREF(value);
    Py_XDECREF(parts);
    return taken;
}

PyObject *outside_again(PyObject *places, PyObject *modules, PyObject *objects) {
    if (the_Box == NULL || !PyList_Check(modules) || !PyList_Check(objects)) return NULL;
    struct reached before = {modules, objects, 0, 0};
    PyObject *taken = PyList_New(PyList_GET_SIZE(places));
    for (Py_ssize_t i = 0; taken != NULL && i < PyList_GET_SIZE(taken) && i < PyList_GET_SIZE(places); i++) {
        PyObject *entry = read_again(PyList_GET_ITEM(places, i), &before);
        if (entry == NULL) Py_CLEAR(taken);
        else PyList_SET_ITEM(taken, i, entry);
    }
    if (taken != NULL && (before.module != PyList_GET_SIZE(modules) || before.object != PyList_GET_SIZE(objects))) Py_CLEAR(taken);
    return taken;
}

Py_ssize_t mutable_types(void) { return the_MUTABLE == NULL ? -1 : PyDict_GET_SIZE(the_MUTABLE); }

/* Whether a list holds what it held, each part as it was; below zero with an error. */
static int holds_same(PyObject *list, PyObject *box) {
    if ((PyObject *)Py_TYPE(box) != the_Box) return 0;
    PyObject *parts = GET(box, parts);
    int same = parts == NULL ? -1 : PyList_Check(parts) && PyList_GET_SIZE(parts) == PyList_GET_SIZE(list);
    for (Py_ssize_t i = 0; same == 1 && i < PyList_GET_SIZE(list); i++) same = PyList_GET_ITEM(parts, i) == PyList_GET_ITEM(list, i);
    Py_XDECREF(parts);
    return same;
}

int outside_is_as(PyObject *taken) {
    if (the_Box == NULL || !PyList_Check(taken)) return 0;
    int same = 1;
    for (Py_ssize_t i = 0; same == 1 && i < PyList_GET_SIZE(taken); i++) {
        PyObject *entry = PyList_GET_ITEM(taken, i), *value = PyTuple_GET_ITEM(entry, 1), *parts = PyTuple_GET_ITEM(entry, 2);
        PyObject *now = read_place(PyTuple_GET_ITEM(entry, 0));
        same = now == value;
        if (same && PyList_CheckExact(value)) same = parts == Py_None ? 0 : holds_same(value, parts);
        else if (same) same = parts == Py_None ? PyObject_IsInstance(value, the_Tensor) == 0 : 0;
        Py_XDECREF(now);
    }
    return PyErr_Occurred() ? -1 : same;
}

int objects_are_as(PyObject *objects) {
    int same = PyList_Check(objects);
    for (Py_ssize_t i = 0; same && i < PyList_GET_SIZE(objects); i++) {
        PyObject *own = PyTuple_GET_ITEM(PyList_GET_ITEM(objects, i), 0), *values = PyTuple_GET_ITEM(PyList_GET_ITEM(objects, i), 1), *value;
        Py_ssize_t position = 0, at = 0;
        same = PyDict_CheckExact(own) && PyList_Check(values) && PyDict_GET_SIZE(own) == PyList_GET_SIZE(values);
        while (same && PyDict_Next(own, &position, NULL, &value)) same = value == PyList_GET_ITEM(values, at++);
    }
    return same;
}

/* Note the parts of lowtide and torch that all of this uses. */
static PyObject *configure_outside(PyObject *module, PyObject *parts) {
    struct part all[] = {PARTS(PART_ENTRY)};
    if (note_parts(parts, all, sizeof(all) / sizeof(all[0]))) return NULL;
    if (!PyAnySet_Check(the_ATOMS) || !PyAnySet_Check(the_STAND_INS) || !PyDict_Check(the_MUTABLE) || !PyType_Check(the_Box))
        return PyErr_Format(PyExc_TypeError, "types are in sets, those that regions change in a dict");
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"configure_outside", configure_outside, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

int add_outside(PyObject *module) {
    NAMES(INTERN)
    if ((no_arguments = PyTuple_New(0)) == NULL) return -1;
    return PyModule_AddFunctions(module, functions);
}
