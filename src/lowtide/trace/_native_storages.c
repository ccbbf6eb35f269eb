/* Which rows of the table of storages stand for some tensors, and what happens when a storage dies: see StorageTable in _storages.py.
 *
 * All that is known of storages is in the lists and dictionaries of that table. What is rare is left to its methods.
 */

#include "_native.h"

/* In the order in which they are given. The last four are functions; `size` is None where the CPU's bytes are counted. */
#define STORAGES_FIELDS(X)                                                                                                                 \
    X(row_of) X(sizes) X(categories) X(born) X(freed) X(resident) X(watches) X(at_start) X(empty_at_start) X(running) X(ops) X(size)       \
    X(entered) X(other) X(note_replaced)

#define FIELD(name) PyObject *name;
typedef struct {
    PyObject_HEAD
    STORAGES_FIELDS(FIELD)
} Storages;

/* What is called when a storage dies. */
typedef struct {
    PyObject_HEAD
    Storages *storages;
    PyObject *key;
    Py_ssize_t row;
} Watch;

static PyTypeObject StoragesType, WatchType;

int is_storages_type(PyObject *object) { return Py_IS_TYPE(object, &StoragesType); }

/* ---- Watch ---- */

/* Whether what died was made by the innermost call that runs: then no call has replaced it. */
static int is_of_running_call(Storages *table, Py_ssize_t row) {
    PyObject *innermost = PyList_GET_ITEM(table->running, PyList_GET_SIZE(table->running) - 1);
    Py_ssize_t start = PyLong_AsSsize_t(PyTuple_GET_ITEM(innermost, 1)), born = PyLong_AsSsize_t(PyList_GET_ITEM(table->born, row));
    return born >= start && PyList_GET_ITEM(table->resident, row) == Py_False;
}

static int note_gone(Storages *table, PyObject *key, Py_ssize_t row) {
    if (table->row_of == NULL) return 0; /* nobody watches any more */
    PyObject *found = PyDict_GetItemWithError(table->row_of, key);
    if (found == NULL) return PyErr_Occurred() ? -1 : 0;
    if (PyLong_AsSsize_t(found) != row) return 0;
    PyObject *clock = PyLong_FromSsize_t(PyList_GET_SIZE(table->ops));
    if (clock == NULL || PyDict_DelItem(table->row_of, key) || PyList_SetItem(table->freed, row, clock)) return -1;
    if (PyList_GET_SIZE(table->running) && !is_of_running_call(table, row)) {
        PyObject *number = PyLong_FromSsize_t(row);
        int failed = number == NULL ? -1 : done(PyObject_CallOneArg(table->note_replaced, number));
        Py_XDECREF(number);
        if (failed) return -1;
    }
    if (PyList_GET_ITEM(table->resident, row) == Py_False) return 0;
    int is_there = PyDict_Contains(table->at_start, key);
    return is_there > 0 ? PyDict_DelItem(table->at_start, key) : is_there;
}

static PyObject *watch_call(PyObject *self, PyObject *arguments, PyObject *keywords) {
    Watch *watch = (Watch *)self;
    if (note_gone(watch->storages, watch->key, watch->row)) return NULL;
    Py_RETURN_NONE;
}

static int watch_traverse(PyObject *self, visitproc visit, void *arg) {
    Py_VISIT(((Watch *)self)->storages);
    return 0;
}

static int watch_clear(PyObject *self) { return 0; } /* cycles end in Storages */

static void watch_dealloc(PyObject *self) {
    PyObject_GC_UnTrack(self);
    Py_XDECREF(((Watch *)self)->storages);
    Py_XDECREF(((Watch *)self)->key);
    PyObject_GC_Del(self);
}

static PyTypeObject WatchType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "lowtide.trace._native.Watch",
    .tp_basicsize = sizeof(Watch),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_traverse = watch_traverse,
    .tp_clear = watch_clear,
    .tp_dealloc = watch_dealloc,
    .tp_call = watch_call,
};

/* From now on a row stands for a storage. */
static int watch_storage(Storages *table, PyObject *storage, PyObject *key, PyObject *row) {
    if (PyDict_SetItem(table->row_of, key, row)) return -1;
    Watch *watch = PyObject_GC_New(Watch, &WatchType);
    if (watch == NULL) return -1;
    watch->storages = (Storages *)Py_NewRef(table);
    watch->key = Py_NewRef(key);
    watch->row = PyLong_AsSsize_t(row);
    PyObject_GC_Track(watch);
    int failed = add_to(table->watches, PyWeakref_NewRef(storage, (PyObject *)watch));
    Py_DECREF(watch);
    return failed;
}

/* ---- Storages ---- */

static PyObject *size_of(Storages *table, PyObject *tensor, PyObject *storage) {
    if (table->size != Py_None) return PyObject_CallFunctionObjArgs(table->size, tensor, storage, NULL);
    int counts = truth(read_from(tensor, IS_CPU));
    if (counts < 0) return NULL;
    return counts ? read_from(storage, NBYTES) : PyLong_FromLong(0);
}

/* The row of a storage that is new, see StorageTable._entered. */
static PyObject *enter_new(Storages *table, PyObject *tensor, PyObject *storage, PyObject *key, PyObject *category) {
    int resident = PyDict_Contains(table->at_start, key);
    if (resident < 0) return NULL;
    if (resident && (category == the_ACTIVATION || category == the_TEMPORARY)) category = the_INPUT;
    PyObject *size = size_of(table, tensor, storage), *row = NULL;
    if (size == NULL) return NULL;
    row = PyLong_FromSsize_t(PyList_GET_SIZE(table->sizes));
    if (row == NULL || PyList_Append(table->sizes, size) || PyList_Append(table->categories, category) ||
        add_to(table->born, PyLong_FromSsize_t(resident ? 0 : PyList_GET_SIZE(table->ops))) || PyList_Append(table->freed, Py_None) ||
        PyList_Append(table->resident, resident ? Py_True : Py_False) || watch_storage(table, storage, key, row))
        Py_CLEAR(row);
    Py_DECREF(size);
    return row;
}

/* The storage of a tensor; NULL without an error if it has none: a sparse one, or one that a function transform has wrapped. */
static PyObject *storage_of(PyObject *tensor) {
    PyObject *storage = read_from(tensor, UNTYPED_STORAGE);
    if (storage == NULL && PyErr_ExceptionMatches(PyExc_RuntimeError)) PyErr_Clear();
    return storage;
}

/* The row of one storage, as a new reference. */
static PyObject *row_of_storage(Storages *table, PyObject *tensor, PyObject *storage, PyObject *category) {
    PyObject *key = read_from(storage, CDATA);
    if (key == NULL) return NULL;
    PyObject *row = PyDict_GetItemWithError(table->row_of, key);
    int is_emptied = PySet_GET_SIZE(table->empty_at_start) ? PySet_Contains(table->empty_at_start, key) : 0;
    if (PyErr_Occurred()) row = NULL;
    else if (is_emptied) row = PyObject_CallFunctionObjArgs(table->entered, tensor, storage, category, row == NULL ? Py_None : row, NULL);
    else row = row == NULL ? enter_new(table, tensor, storage, key, category) : Py_NewRef(row);
    Py_DECREF(key);
    return row;
}

/* Append the rows of one tensor. */
static int add_rows_of(Storages *table, PyObject *tensor, PyObject *category, PyObject *rows) {
    PyObject *storage = has_memory(tensor) ? storage_of(tensor) : NULL;
    if (storage != NULL) {
        int failed = add_to(rows, row_of_storage(table, tensor, storage, category));
        Py_DECREF(storage);
        return failed;
    }
    if (PyErr_Occurred()) return -1;
    PyObject *others = PyObject_CallFunctionObjArgs(table->other, tensor, category, NULL);
    if (others == NULL) return -1;
    int failed = PyList_SetSlice(rows, PyList_GET_SIZE(rows), PyList_GET_SIZE(rows), others);
    Py_DECREF(others);
    return failed;
}

/* Each row once, in order. */
static PyObject *distinct(PyObject *rows) {
    PyObject *once = PyDict_New(), *found = NULL;
    for (Py_ssize_t index = 0; once != NULL && index < PyList_GET_SIZE(rows); index++)
        if (PyDict_SetItem(once, PyList_GET_ITEM(rows, index), Py_None)) Py_CLEAR(once);
    if (once != NULL) found = PySequence_Tuple(once);
    Py_XDECREF(once);
    return found;
}

/* The row of one tensor that has memory is most often all there is to find. */
static PyObject *only_row(Storages *table, PyObject *tensor, PyObject *category) {
    PyObject *storage = storage_of(tensor), *found = NULL;
    if (storage == NULL) return NULL;
    PyObject *row = row_of_storage(table, tensor, storage, category);
    Py_DECREF(storage);
    if (row != NULL) found = PyTuple_Pack(1, row);
    Py_XDECREF(row);
    return found;
}

PyObject *rows_in(PyObject *storages, PyObject *tensors, PyObject *category) {
    Storages *table = (Storages *)storages;
    if (table->row_of == NULL) return PyErr_Format(PyExc_RuntimeError, "the table is closed");
    if (SIZE(tensors) == 0) return PyTuple_New(0);
    if (SIZE(tensors) == 1 && has_memory(ITEM(tensors, 0))) {
        PyObject *found = only_row(table, ITEM(tensors, 0), category);
        if (found != NULL || PyErr_Occurred()) return found;
    }
    PyObject *rows = PyList_New(0), *found = NULL;
    for (Py_ssize_t index = 0; rows != NULL && index < SIZE(tensors); index++)
        if (add_rows_of(table, ITEM(tensors, index), category, rows)) Py_CLEAR(rows);
    if (rows != NULL) found = PyList_GET_SIZE(rows) < 2 ? PyList_AsTuple(rows) : distinct(rows);
    Py_XDECREF(rows);
    return found;
}

static PyObject *rows_of(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    if (count != 2 || !is_sequence(arguments[0])) return PyErr_Format(PyExc_TypeError, "it takes a list or tuple, and a category");
    return rows_in(self, arguments[0], arguments[1]);
}

int is_resident_row(PyObject *storages, PyObject *row) {
    PyObject *resident = PyList_GetItem(((Storages *)storages)->resident, PyLong_AsSsize_t(row));
    return resident == NULL ? -1 : resident == Py_True;
}

int moved(PyObject *storages, PyObject *tensor, PyObject *into) {
    Storages *table = (Storages *)storages;
    if (!has_memory(tensor) || !has_memory(into)) return 0;
    PyObject *old = storage_of(tensor), *new = old == NULL ? NULL : storage_of(into), *key = NULL, *new_key = NULL;
    int outcome = PyErr_Occurred() ? -1 : 0;
    if (new != NULL && (outcome = (key = read_from(old, CDATA)) == NULL || (new_key = read_from(new, CDATA)) == NULL ? -1 : 1) > 0) {
        PyObject *row = Py_XNewRef(PyDict_GetItemWithError(table->row_of, key));
        if (row == NULL ? PyErr_Occurred() != NULL : PyDict_DelItem(table->row_of, key) || watch_storage(table, new, new_key, row)) outcome = -1;
        Py_XDECREF(row);
    }
    Py_XDECREF(old);
    Py_XDECREF(new);
    Py_XDECREF(key);
    Py_XDECREF(new_key);
    return outcome;
}

static int storages_clear(PyObject *self) {
    Storages *table = (Storages *)self;
#define CLEAR_FIELD(name) Py_CLEAR(table->name);
    STORAGES_FIELDS(CLEAR_FIELD)
    return 0;
}

static PyObject *storages_close(PyObject *self, PyObject *nothing) {
    storages_clear(self);
    Py_RETURN_NONE;
}

static int storages_traverse(PyObject *self, visitproc visit, void *arg) {
    Storages *table = (Storages *)self;
#define VISIT_FIELD(name) Py_VISIT(table->name);
    STORAGES_FIELDS(VISIT_FIELD)
    return 0;
}

static void storages_dealloc(PyObject *self) {
    PyObject_GC_UnTrack(self);
    storages_clear(self);
    Py_TYPE(self)->tp_free(self);
}

/* Whether the fields that are looked into are what they have to be. */
static int is_made_right(Storages *table) {
    PyObject *const lists[] = {table->sizes,    table->categories, table->born,    table->freed,
                               table->resident, table->watches,    table->running, table->ops};
    for (size_t index = 0; index < sizeof(lists) / sizeof(lists[0]); index++)
        if (!PyList_CheckExact(lists[index])) return 0;
    return PyDict_CheckExact(table->row_of) && PyDict_CheckExact(table->at_start) && PySet_Check(table->empty_at_start);
}

static PyObject *storages_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
#define FIELD_NAME(name) #name,
#define FIELD_OFFSET(name) offsetof(Storages, name),
    static const char *const names[] = {STORAGES_FIELDS(FIELD_NAME)};
    static const size_t offsets[] = {STORAGES_FIELDS(FIELD_OFFSET)};
    PyObject *self = type->tp_alloc(type, 0);
    if (self == NULL || take_fields(self, names, offsets, sizeof(names) / sizeof(names[0]), arguments, keywords)) goto failed;
    if (is_made_right((Storages *)self)) return self;
    PyErr_SetString(PyExc_TypeError, "a part of the table is of another type");
failed:
    Py_XDECREF(self);
    return NULL;
}

static PyMethodDef storages_methods[] = {
    {"close", storages_close, METH_NOARGS, NULL},
    {"rows_of", (PyCFunction)(void (*)(void))rows_of, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject StoragesType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "lowtide.trace._native.Storages",
    .tp_basicsize = sizeof(Storages),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_doc = "The hot part of lowtide.trace._storages.StorageTable, over its lists and dictionaries.",
    .tp_traverse = storages_traverse,
    .tp_clear = storages_clear,
    .tp_dealloc = storages_dealloc,
    .tp_methods = storages_methods,
    .tp_new = storages_new,
};

int add_storages(PyObject *module) {
    if (PyType_Ready(&WatchType) || PyType_Ready(&StoragesType)) return -1;
    return PyModule_AddObjectRef(module, "Storages", (PyObject *)&StoragesType);
}
