/* What a replay that goes the short way compares: what surrounds it, before; the tensors in its modules, when it is over.
 *
 * The twins in Python are `is_in_force` in _guards/_ambient.py and `are_unmodified` in _guards/_unmodified.py.
 */

#include "_native.h"

/* ---- what was taken of modules, see _guards/_unmodified.py ---- */

/* Whether something is what `Watch.take` returns; otherwise with an error. */
static int is_taken(PyObject *taken) {
    if (PyTuple_Check(taken) && PyTuple_GET_SIZE(taken) == 6) {
        Py_ssize_t lists = 0;
        while (lists < 6 && PyList_Check(PyTuple_GET_ITEM(taken, lists))) lists++;
        if (lists == 6) return 1;
    }
    PyErr_SetString(PyExc_TypeError, "what was taken is six lists");
    return 0;
}

/* Whether no tensor was modified since it was taken; below zero with an error. */
static int is_unmodified(PyObject *taken) {
    PyObject *tensors = PyTuple_GET_ITEM(taken, 0), *versions = PyTuple_GET_ITEM(taken, 1), *loose = PyTuple_GET_ITEM(taken, 5);
    if (PyList_GET_SIZE(tensors) != PyList_GET_SIZE(versions)) return 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors); i++) {
        PyObject *tensor = PyList_GET_ITEM(tensors, i);
        long long now = -1, then = PyLong_AsLongLong(PyList_GET_ITEM(versions, i));
        if (then == UNREAD) continue;
        if ((then == -1 && PyErr_Occurred()) || (tensor != Py_None && version_of(tensor, &now))) return -1;
        if (now != then) return 0;
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(loose); i++) {
        PyObject *tensor, *name;
        long long now, then;
        if (!PyArg_ParseTuple(PyList_GET_ITEM(loose, i), "OLO", &tensor, &then, &name) || version_of(tensor, &now)) return -1;
        if (now != then) return 0;
    }
    return 1;
}

/* The same, where one that has no version may have been modified. */
int is_surely_unmodified(PyObject *taken) {
    int same = is_unmodified(taken);
    if (same >= 0 || !PyErr_ExceptionMatches(PyExc_RuntimeError)) return same;
    PyErr_Clear();
    return 0;
}

int are_surely_unmodified(PyObject *watches) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(watches); i++) {
        PyObject *entry = PyList_GET_ITEM(watches, i);
        if (!PyTuple_Check(entry) || PyTuple_GET_SIZE(entry) != 2) {
            PyErr_SetString(PyExc_TypeError, "watches are pairs");
            return -1;
        }
        if (!is_taken(PyTuple_GET_ITEM(entry, 1))) return -1;
        int same = is_surely_unmodified(PyTuple_GET_ITEM(entry, 1));
        if (same != 1) return same;
    }
    return 1;
}

static PyObject *are_unmodified(PyObject *module, PyObject *watches) {
    if (!PyList_Check(watches)) return PyErr_Format(PyExc_TypeError, "watches are in a list");
    int same = are_surely_unmodified(watches);
    return same < 0 ? NULL : PyBool_FromLong(same);
}

/* ---- Surroundings, see is_in_force ---- */

enum { NOW_COMPILER, NOW_AUTOCAST, NOW_FUNCTIONS, NOW_DISPATCHES, NOW_DTYPE, NOW_ORDER, NOW_FLASH, NOW_EFFICIENT, NOW_MATH, NOW_CUDNN, NOW_ALL };

typedef struct {
    PyObject_HEAD
    PyObject *getters[NOW_ALL];
    PyObject *parametrize, *cached, *no_weights; /* the dictionary of that module, a name in it, what stands for no computed weights */
} Surroundings;

static int surroundings_traverse(PyObject *self, visitproc visit, void *arg) {
    Surroundings *around = (Surroundings *)self;
    for (int i = 0; i < NOW_ALL; i++) Py_VISIT(around->getters[i]);
    Py_VISIT(around->parametrize);
    Py_VISIT(around->cached);
    Py_VISIT(around->no_weights);
    return 0;
}

static int surroundings_clear(PyObject *self) {
    Surroundings *around = (Surroundings *)self;
    for (int i = 0; i < NOW_ALL; i++) Py_CLEAR(around->getters[i]);
    Py_CLEAR(around->parametrize);
    Py_CLEAR(around->cached);
    Py_CLEAR(around->no_weights);
    return 0;
}

static void surroundings_dealloc(PyObject *self) {
    PyObject_GC_UnTrack(self);
    surroundings_clear(self);
    Py_TYPE(self)->tp_free(self);
}

static PyObject *surroundings_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    PyObject *getters, *parametrize, *cached, *no_weights;
    if (!PyArg_ParseTuple(arguments, "O!O!UO", &PyTuple_Type, &getters, &PyDict_Type, &parametrize, &cached, &no_weights)) return NULL;
    if (PyTuple_GET_SIZE(getters) != NOW_ALL) return PyErr_Format(PyExc_TypeError, "it takes %d getters", NOW_ALL);
    Surroundings *around = (Surroundings *)type->tp_alloc(type, 0);
    if (around == NULL) return NULL;
    for (int i = 0; i < NOW_ALL; i++) around->getters[i] = Py_NewRef(PyTuple_GET_ITEM(getters, i));
    around->parametrize = Py_NewRef(parametrize);
    around->cached = Py_NewRef(cached);
    around->no_weights = Py_NewRef(no_weights);
    return (PyObject *)around;
}

/* Whether a getter tells this very object; below zero with an error. */
static int tells(Surroundings *around, int which, PyObject *wanted) {
    PyObject *now = PyObject_CallNoArgs(around->getters[which]);
    if (now == NULL) return -1;
    Py_DECREF(now);
    return now == wanted;
}

/* Whether a getter tells a number that is zero; below zero with an error. */
static int tells_none(Surroundings *around, int which) {
    PyObject *now = PyObject_CallNoArgs(around->getters[which]);
    if (now == NULL) return -1;
    int there = PyObject_IsTrue(now);
    Py_DECREF(now);
    return there < 0 ? -1 : !there;
}

/* Whether no weights are computed once for a while, then and now; below zero with an error. */
static int computes_none(Surroundings *around, PyObject *weights) {
    if (weights != around->no_weights) return 0;
    PyObject *cached = PyDict_GetItemWithError(around->parametrize, around->cached);
    if (cached == NULL) return PyErr_Occurred() ? -1 : 0;
    int on = PyObject_IsTrue(cached);
    return on < 0 ? -1 : !on;
}

/* The choice of attention backends, and their order. */
static int attends_so(Surroundings *around, PyObject *flags, PyObject *order) {
    if (!PyTuple_Check(flags) || PyTuple_GET_SIZE(flags) != 4) return 0;
    for (int i = 0; i < 4; i++) {
        int same = tells(around, NOW_FLASH + i, PyTuple_GET_ITEM(flags, i));
        if (same != 1) return same;
    }
    PyObject *now = PyObject_CallNoArgs(around->getters[NOW_ORDER]);
    if (now == NULL) return -1;
    int same = PyObject_RichCompareBool(now, order, Py_EQ);
    Py_DECREF(now);
    return same;
}

int surroundings_are_so(PyObject *self, PyObject *ambient) {
    Surroundings *around = (Surroundings *)self;
    if (!PyTuple_Check(ambient) || PyTuple_GET_SIZE(ambient) != 9) {
        PyErr_SetString(PyExc_TypeError, "it takes an Ambient");
        return -1;
    }
    PyObject **then = ((PyTupleObject *)ambient)->ob_item;
    if (then[4] != Py_None || PyObject_Size(then[2]) || PyObject_Size(then[3])) return PyErr_Occurred() ? -1 : 0;
    int same = computes_none(around, then[7]);
    if (same == 1) same = tells(around, NOW_COMPILER, then[8]);
    for (int which = NOW_AUTOCAST; same == 1 && which <= NOW_DISPATCHES; which++) same = tells_none(around, which);
    if (same == 1) same = tells(around, NOW_DTYPE, then[1]);
    if (same == 1 && then[6] != Py_None) same = attends_so(around, then[5], then[6]);
    return same;
}

static PyObject *surroundings_are(PyObject *self, PyObject *ambient) {
    int same = surroundings_are_so(self, ambient);
    return same < 0 ? NULL : PyBool_FromLong(same);
}

/* The choice of attention backends: four flags. */
static PyObject *attention_flags(Surroundings *around) {
    PyObject *flags = PyTuple_New(4);
    for (int i = 0; flags != NULL && i < 4; i++) {
        PyObject *flag = PyObject_CallNoArgs(around->getters[NOW_FLASH + i]);
        if (flag == NULL) Py_CLEAR(flags);
        else PyTuple_SET_ITEM(flags, i, flag);
    }
    return flags;
}

/* What take_ambient tells; None where there are modes, autocast or weights that are computed once. */
PyObject *surroundings_now(PyObject *self, int attention) {
    Surroundings *around = (Surroundings *)self;
    int none = computes_none(around, around->no_weights);
    for (int which = NOW_AUTOCAST; none == 1 && which <= NOW_DISPATCHES; which++) none = tells_none(around, which);
    if (none != 1) return none < 0 ? NULL : Py_NewRef(Py_None);
    PyObject *context = PyContext_CopyCurrent(), *dtype = PyObject_CallNoArgs(around->getters[NOW_DTYPE]);
    PyObject *flags = attention ? attention_flags(around) : PyTuple_New(0), *empty = PyTuple_New(0);
    PyObject *order = attention ? PyObject_CallNoArgs(around->getters[NOW_ORDER]) : Py_NewRef(Py_None);
    PyObject *compiler = PyObject_CallNoArgs(around->getters[NOW_COMPILER]), *now = NULL;
    if (context != NULL && dtype != NULL && flags != NULL && empty != NULL && order != NULL && compiler != NULL)
        now = PyTuple_Pack(9, context, dtype, empty, empty, Py_None, flags, order, around->no_weights, compiler);
    Py_XDECREF(context);
    Py_XDECREF(dtype);
    Py_XDECREF(flags);
    Py_XDECREF(empty);
    Py_XDECREF(order);
    Py_XDECREF(compiler);
    return now;
}

static PyObject *surroundings_take(PyObject *self, PyObject *attention) {
    int with = PyObject_IsTrue(attention);
    return with < 0 ? NULL : surroundings_now(self, with);
}

static PyMethodDef surroundings_methods[] = {
    {"are", surroundings_are, METH_O, NULL},
    {"take", surroundings_take, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject SurroundingsType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "lowtide.engine._native.Surroundings",
    .tp_basicsize = sizeof(Surroundings),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_doc = "Tells whether a thread is in the state that it was in.",
    .tp_traverse = surroundings_traverse,
    .tp_clear = surroundings_clear,
    .tp_dealloc = surroundings_dealloc,
    .tp_methods = surroundings_methods,
    .tp_new = surroundings_new,
};

static PyMethodDef functions[] = {
    {"are_unmodified", are_unmodified, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

int add_guards(PyObject *module) {
    if (PyType_Ready(&SurroundingsType) || PyModule_AddFunctions(module, functions)) return -1;
    return PyModule_AddObjectRef(module, "Surroundings", (PyObject *)&SurroundingsType);
}
