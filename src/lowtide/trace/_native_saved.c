/* The hooks that see what autograd saves: SavedTable._pack and _unpack in _saved.py, and the end of a slot. Copies are made there. */

#include "_native.h"

DECLARE_NAME(data)
DECLARE_NAME(index)
DECLARE_NAME(like)
DECLARE_NAME(name)
DECLARE_NAME(running_since)
DECLARE_NAME(__enter__)
DECLARE_NAME(__exit__)
static PyObject *no_name;

/* ---- Slot: what autograd holds instead of the tensor ---- */

typedef struct {
    PyObject_HEAD
    PyObject *kept, *copy, *released, *ops;
    Py_ssize_t row;
} Slot;

static void slot_dealloc(PyObject *self) {
    Slot *slot = (Slot *)self;
    PyObject *type, *value, *traceback, *clock;
    PyErr_Fetch(&type, &value, &traceback);
    clock = PyLong_FromSsize_t(PyList_GET_SIZE(slot->ops));
    if (clock == NULL || PyList_SetItem(slot->released, slot->row, clock)) PyErr_WriteUnraisable(slot->released);
    PyErr_Restore(type, value, traceback);
    Py_DECREF(slot->kept);
    Py_DECREF(slot->copy);
    Py_DECREF(slot->released);
    Py_DECREF(slot->ops);
    PyObject_Free(self);
}

static PyTypeObject SlotType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "lowtide.trace._native.Slot",
    .tp_basicsize = sizeof(Slot),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_dealloc = slot_dealloc,
};

/* ---- Saving: the hooks ---- */

/* In the order in which they are given: the table of storages; the columns of the table of what is saved, see SavedTable; its copies by
 * storage and version; the rows that are filled and emptied; the module calls that run; the ops; the table of functions; by storage, the
 * watches over copies; a context without modes; and functions. */
#define SAVING_FIELDS(X)                                                                                                                   \
    X(storages) X(made) X(uses) X(released) X(copies) X(refilled) X(running) X(ops) X(functions) X(watches) X(without_modes) X(copied)     \
    X(rebuilt) X(handed_out)

#define FIELD(name) PyObject *name;
typedef struct {
    PyObject_HEAD
    SAVING_FIELDS(FIELD)
} Saving;

static PyTypeObject SavingType;

/* What a weak reference refers to, as a new reference; NULL without an error if it is gone. */
static PyObject *strengthened(PyObject *ref) {
#if PY_VERSION_HEX >= 0x030D0000
    PyObject *object;
    return PyWeakref_GetRef(ref, &object) > 0 ? object : NULL;
#else
    PyObject *object = PyWeakref_GetObject(ref);
    return object == NULL || object == Py_None ? NULL : Py_NewRef(object);
#endif
}

/* How to get a tensor back, and the copy that this needs: see SavedTable._kept. */
static PyObject *keep(Saving *saving, PyObject *tensor, PyObject *row, PyObject **copy) {
    int stays = has_memory(tensor) ? is_resident_row(saving->storages, row) : 1;
    if (!stays) stays = truth(read_from(tensor, IS_ZERO));
    if (stays) {
        *copy = Py_NewRef(Py_None);
        return stays < 0 ? NULL : Py_NewRef(tensor);
    }
    PyObject *number = read_from(tensor, VERSION), *version = number == NULL ? NULL : PyTuple_Pack(2, row, number), *kept = NULL, *known = NULL;
    Py_XDECREF(number);
    if (version == NULL) return NULL;
    known = PyDict_GetItemWithError(saving->copies, version);
    *copy = known == NULL ? NULL : strengthened(known);
    if (*copy != NULL) {
        PyObject *like = GET(*copy, like);
        if (like != NULL) kept = PyObject_CallOneArg(like, tensor);
        Py_XDECREF(like);
    } else if (!PyErr_Occurred()) {
        PyObject *pair = PyObject_CallFunctionObjArgs(saving->copied, tensor, version, NULL);
        if (pair != NULL) {
            kept = Py_NewRef(PyTuple_GET_ITEM(pair, 0));
            *copy = Py_NewRef(PyTuple_GET_ITEM(pair, 1));
        }
        Py_XDECREF(pair);
    }
    Py_DECREF(version);
    return kept;
}

/* Whether the function that runs has run an op, so that what it saves is saved at its end. */
static PyObject *at_end(Saving *saving) {
    PyObject *since = GET(saving->functions, running_since);
    if (since == NULL || since == Py_None) {
        Py_XDECREF(since);
        return since == NULL ? NULL : Py_False;
    }
    Py_ssize_t start = PyLong_AsSsize_t(since);
    Py_DECREF(since);
    return start < PyList_GET_SIZE(saving->ops) ? Py_True : Py_False;
}

static int add_row(Saving *saving, PyObject *tensor, PyObject *row, PyObject *copy) {
    Py_ssize_t depth = PyList_GET_SIZE(saving->running);
    PyObject *call = depth ? PyTuple_GET_ITEM(PyList_GET_ITEM(saving->running, depth - 1), 0) : Py_None, *ends = at_end(saving);
    PyObject *parts[] = {read_from(tensor, TENSOR_NBYTES),
                         PyLong_FromSsize_t(PyList_GET_SIZE(saving->ops)),
                         copy == Py_None ? Py_NewRef(copy) : GET(copy, index),
                         read_from(tensor, DTYPE),
                         read_from(tensor, SHAPE),
                         PyWeakref_NewRef(tensor, NULL)};
    int failed = ends == NULL || PyErr_Occurred();
    if (!failed)
        failed = add_to(saving->made, PyTuple_Pack(9, row, parts[0], call, parts[1], parts[2], parts[3], parts[4], parts[5], ends)) ||
                 PyList_Append(saving->uses, Py_None) || PyList_Append(saving->released, Py_None);
    for (size_t index = 0; index < sizeof(parts) / sizeof(parts[0]); index++) Py_XDECREF(parts[index]);
    return failed ? -1 : 0;
}

/* Note a tensor that is saved on the storage of a row. */
static PyObject *pack_on(Saving *saving, PyObject *tensor, PyObject *row) {
    PyObject *copy = NULL, *kept = keep(saving, tensor, row, &copy);
    Slot *slot = NULL;
    if (kept != NULL && !add_row(saving, tensor, row, copy) && (slot = PyObject_New(Slot, &SlotType)) != NULL) {
        slot->kept = Py_NewRef(kept);
        slot->copy = Py_NewRef(copy);
        slot->released = Py_NewRef(saving->released);
        slot->ops = Py_NewRef(saving->ops);
        slot->row = PyList_GET_SIZE(saving->made) - 1;
    }
    Py_XDECREF(kept);
    Py_XDECREF(copy);
    return (PyObject *)slot;
}

static PyObject *pack(PyObject *self, PyObject *tensor) {
    Saving *saving = (Saving *)self;
    int is_strided = is_this(read_from(tensor, LAYOUT), the_STRIDED);
    if (is_strided <= 0) return is_strided < 0 ? NULL : Py_NewRef(tensor); /* made of tensors that may be saved by others as well */
    PyObject *alone = PyTuple_Pack(1, tensor), *rows = alone == NULL ? NULL : rows_in(saving->storages, alone, the_ACTIVATION), *packed = NULL;
    Py_XDECREF(alone);
    if (rows == NULL) return NULL;
    int seen = PyTuple_GET_SIZE(rows) > 0;
    if (seen && PySet_GET_SIZE(saving->refilled)) seen = !PySet_Contains(saving->refilled, PyTuple_GET_ITEM(rows, 0));
    if (!PyErr_Occurred()) packed = seen ? pack_on(saving, tensor, PyTuple_GET_ITEM(rows, 0)) : Py_NewRef(tensor);
    Py_DECREF(rows);
    return packed;
}

/* Backward asks for a row for the first time. */
static int note_use(Saving *saving, Py_ssize_t row) {
    PyObject *node = CALL(current_node);
    PyObject *name = node == NULL ? NULL : node == Py_None ? Py_NewRef(no_name) : PyObject_CallMethodNoArgs(node, n_name);
    PyObject *clock = PyLong_FromSsize_t(PyList_GET_SIZE(saving->ops)), *use = NULL;
    Py_XDECREF(node);
    if (name != NULL && clock != NULL) {
        PyObject *tensor = strengthened(PyTuple_GET_ITEM(PyList_GET_ITEM(saving->made, row), 7));
        use = PyTuple_Pack(3, clock, name, tensor == NULL ? Py_False : Py_True);
        Py_XDECREF(tensor);
    }
    Py_XDECREF(name);
    Py_XDECREF(clock);
    return use == NULL ? -1 : PyList_SetItem(saving->uses, row, use);
}

/* Another tensor on the same storage, of which no graph hears. */
static PyObject *another(Saving *saving, PyObject *kept) {
    if (!is_tensor(kept)) return PyObject_CallOneArg(saving->rebuilt, kept);
    if (done(PyObject_CallMethodNoArgs(saving->without_modes, n___enter__))) return NULL;
    PyObject *tensor = GET(kept, data), *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    if (done(PyObject_CallMethodObjArgs(saving->without_modes, n___exit__, Py_None, Py_None, Py_None, NULL))) Py_CLEAR(tensor);
    if (type != NULL) PyErr_Restore(type, value, traceback);
    return tensor;
}

/* A tensor on a copy is on its way to backward: see SavedTable._hand_out, which is called for the first one on each. */
static int hand_out(Saving *saving, PyObject *tensor, PyObject *copy) {
    PyObject *storage = read_from(tensor, UNTYPED_STORAGE), *key = storage == NULL ? NULL : read_from(storage, CDATA);
    int watched = key == NULL ? -1 : PyDict_Contains(saving->watches, key);
    if (!watched) watched = done(PyObject_CallFunctionObjArgs(saving->handed_out, tensor, copy, NULL));
    Py_XDECREF(storage);
    Py_XDECREF(key);
    return watched < 0 ? -1 : 0;
}

static PyObject *unpack(PyObject *self, PyObject *packed) {
    if (!Py_IS_TYPE(packed, &SlotType)) return Py_NewRef(packed);
    Saving *saving = (Saving *)self;
    Slot *slot = (Slot *)packed;
    if (PyList_GET_ITEM(saving->uses, slot->row) == Py_None && note_use(saving, slot->row)) return NULL;
    if (slot->copy == Py_None) return Py_NewRef(slot->kept);
    PyObject *tensor = another(saving, slot->kept);
    if (tensor != NULL && hand_out(saving, tensor, slot->copy)) Py_CLEAR(tensor);
    return tensor;
}

static PyObject *saving_call(PyObject *self, PyObject *arguments, PyObject *keywords) {
    if (PyTuple_GET_SIZE(arguments) != 1 || keywords != NULL) return PyErr_Format(PyExc_TypeError, "it takes a tensor");
    return pack(self, PyTuple_GET_ITEM(arguments, 0));
}

static int saving_clear(PyObject *self) {
    Saving *saving = (Saving *)self;
#define CLEAR_FIELD(name) Py_CLEAR(saving->name);
    SAVING_FIELDS(CLEAR_FIELD)
    return 0;
}

static int saving_traverse(PyObject *self, visitproc visit, void *arg) {
    Saving *saving = (Saving *)self;
#define VISIT_FIELD(name) Py_VISIT(saving->name);
    SAVING_FIELDS(VISIT_FIELD)
    return 0;
}

static void saving_dealloc(PyObject *self) {
    PyObject_GC_UnTrack(self);
    saving_clear(self);
    Py_TYPE(self)->tp_free(self);
}

/* Whether the fields that are looked into are what they have to be. */
static int is_made_right(Saving *saving) {
    PyObject *const lists[] = {saving->made, saving->uses, saving->released, saving->running, saving->ops};
    for (size_t index = 0; index < sizeof(lists) / sizeof(lists[0]); index++)
        if (!PyList_CheckExact(lists[index])) return 0;
    return is_storages_type(saving->storages) && PyDict_CheckExact(saving->copies) && PyDict_CheckExact(saving->watches) &&
           PySet_Check(saving->refilled);
}

static PyObject *saving_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
#define FIELD_NAME(name) #name,
#define FIELD_OFFSET(name) offsetof(Saving, name),
    static const char *const names[] = {SAVING_FIELDS(FIELD_NAME)};
    static const size_t offsets[] = {SAVING_FIELDS(FIELD_OFFSET)};
    PyObject *self = type->tp_alloc(type, 0);
    if (self == NULL || take_fields(self, names, offsets, sizeof(names) / sizeof(names[0]), arguments, keywords)) goto failed;
    if (is_made_right((Saving *)self)) return self;
    PyErr_SetString(PyExc_TypeError, "a part of the table is of another type");
failed:
    Py_XDECREF(self);
    return NULL;
}

static PyMethodDef saving_methods[] = {
    {"unpack", unpack, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject SavingType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "lowtide.trace._native.Saving",
    .tp_basicsize = sizeof(Saving),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_doc = "The hooks of lowtide.trace._saved.SavedTable: the one that packs, and `unpack`.",
    .tp_traverse = saving_traverse,
    .tp_clear = saving_clear,
    .tp_dealloc = saving_dealloc,
    .tp_call = saving_call,
    .tp_methods = saving_methods,
    .tp_new = saving_new,
};

int add_saved(PyObject *module) {
    INTERN(data)
    INTERN(index)
    INTERN(like)
    INTERN(name)
    INTERN(running_since)
    INTERN(__enter__)
    INTERN(__exit__)
    if ((no_name = PyUnicode_InternFromString("")) == NULL || PyType_Ready(&SlotType) || PyType_Ready(&SavingType)) return -1;
    /* Whose hooks are in force is told by it: see transforms_allowed. */
    PyObject *whose = PyUnicode_FromString("lowtide.trace._native");
    int failed = whose == NULL || PyDict_SetItemString(SavingType.tp_dict, "__module__", whose);
    Py_XDECREF(whose);
    if (failed) return -1;
    return PyModule_AddObjectRef(module, "Saving", (PyObject *)&SavingType);
}
