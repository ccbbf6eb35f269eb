/* The inner loops of the engine: what runs for each tensor that autograd saves, and for each tensor of the modules that a region runs.
 *
 * Each name here has a twin in Python that does the same, in the module that `_acceleration.py` says; where this file could not be
 * compiled, the twins run. It uses nothing but CPython's interface, so it does not depend on the release of PyTorch.
 */

#include "_native.h"

#define API 11 /* `_acceleration.py` takes no other */

PyObject *name_version;
static PyObject *name_dtype, *name_shape, *name_requires_grad, *name_is_leaf, *name_base, *name_strange, *name_around, *name_inputs, *name_held,
    *name_copied, *name_index;

/* What `configure` was given. */
static PyTypeObject *slot_class;
static PyObject *gone, *stop_replay, *unpack_otherwise;

int version_of(PyObject *tensor, long long *version) {
    PyObject *number = PyObject_GetAttr(tensor, name_version);
    if (number == NULL) return -1;
    *version = PyLong_AsLongLong(number);
    Py_DECREF(number);
    return *version == -1 && PyErr_Occurred() ? -1 : 0;
}

PyObject *strengthened(PyObject *ref) {
#if PY_VERSION_HEX >= 0x030D0000
    PyObject *object;
    return PyWeakref_GetRef(ref, &object) > 0 ? object : NULL;
#else
    PyObject *object = PyWeakref_GET_OBJECT(ref);
    return object == Py_None ? NULL : Py_NewRef(object);
#endif
}

/* ---- Slot, see _slot.py ---- */

typedef struct {
    PyObject_HEAD
    PyObject *weak_references, *dtype, *frame, *ref, *shape, *value;
    Py_ssize_t index;
    long long version;
    char given;
} Slot;

static int slot_traverse(PyObject *self, visitproc visit, void *arg) {
    Slot *slot = (Slot *)self;
    Py_VISIT(slot->dtype);
    Py_VISIT(slot->frame);
    Py_VISIT(slot->ref);
    Py_VISIT(slot->shape);
    Py_VISIT(slot->value);
    return 0;
}

static int slot_clear(PyObject *self) {
    Slot *slot = (Slot *)self;
    Py_CLEAR(slot->dtype);
    Py_CLEAR(slot->frame);
    Py_CLEAR(slot->ref);
    Py_CLEAR(slot->shape);
    Py_CLEAR(slot->value);
    return 0;
}

static void slot_dealloc(PyObject *self) {
    PyObject_GC_UnTrack(self);
    if (((Slot *)self)->weak_references != NULL) PyObject_ClearWeakRefs(self);
    slot_clear(self);
    Py_TYPE(self)->tp_free(self);
}

static PyMemberDef slot_members[] = {
    {"dtype", T_OBJECT_EX, offsetof(Slot, dtype), 0, NULL},
    {"frame", T_OBJECT_EX, offsetof(Slot, frame), 0, NULL},
    {"ref", T_OBJECT_EX, offsetof(Slot, ref), 0, NULL},
    {"shape", T_OBJECT, offsetof(Slot, shape), 0, NULL},
    {"value", T_OBJECT, offsetof(Slot, value), 0, NULL},
    {"index", T_PYSSIZET, offsetof(Slot, index), 0, NULL},
    {"version", T_LONGLONG, offsetof(Slot, version), 0, NULL},
    {"given", T_BOOL, offsetof(Slot, given), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyTypeObject SlotType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "lowtide.engine._native.Slot",
    .tp_basicsize = sizeof(Slot),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE,
    .tp_doc = "The fields of lowtide.engine._slot.Slot.",
    .tp_traverse = slot_traverse,
    .tp_clear = slot_clear,
    .tp_dealloc = slot_dealloc,
    .tp_weaklistoffset = offsetof(Slot, weak_references),
    .tp_members = slot_members,
    .tp_new = PyType_GenericNew,
};

/* A slot for a tensor that is dropped; `kind` as in Script.plain. */
static Slot *new_slot(PyObject *frame, Py_ssize_t index, PyObject *tensor, long kind) {
    Slot *slot = (Slot *)slot_class->tp_alloc(slot_class, 0);
    if (slot == NULL) return NULL;
    slot->frame = Py_NewRef(frame);
    slot->index = index;
    slot->dtype = PyObject_GetAttr(tensor, name_dtype);
    if (slot->dtype == NULL) goto failed;
    slot->shape = PyObject_GetAttr(tensor, name_shape);
    if (slot->shape == NULL) { /* a layout that has none */
        if (!PyErr_ExceptionMatches(PyExc_RuntimeError)) goto failed;
        PyErr_Clear();
        slot->shape = Py_NewRef(Py_None);
    }
    if (kind == 2) {
        slot->ref = Py_NewRef(gone);
    } else {
        slot->ref = version_of(tensor, &slot->version) ? NULL : PyWeakref_NewRef(tensor, NULL);
        if (slot->ref == NULL) goto failed;
    }
    return slot;
failed:
    Py_DECREF(slot);
    return NULL;
}

static int is_full(Slot *slot) { return slot->value != NULL && slot->value != Py_None; }

/* The slot at a place, as a new reference; NULL without an error if autograd holds none there. */
static Slot *slot_at(PyObject *slots, Py_ssize_t place) {
    PyObject *ref = PyList_GET_ITEM(slots, place);
    if (ref == Py_None) return NULL;
    PyObject *object = PyWeakref_Check(ref) ? strengthened(ref) : Py_NewRef(ref);
    if (object != NULL && !PyObject_TypeCheck(object, &SlotType)) {
        PyErr_Format(PyExc_TypeError, "there is a %s among the slots", Py_TYPE(object)->tp_name);
        Py_CLEAR(object);
    }
    return (Slot *)object;
}

int is_gone_slot(PyObject *object, Py_ssize_t *index, PyObject **frame) {
    if (Py_TYPE(object) != slot_class) return 0;
    Slot *slot = (Slot *)object;
    if (is_full(slot)) return 0;
    if (slot->ref != gone) {
        PyObject *alive = slot->ref != NULL && PyWeakref_Check(slot->ref) ? strengthened(slot->ref) : NULL;
        Py_XDECREF(alive);
        if (alive != NULL || slot->ref == NULL) return -1;
    }
    if (slot->frame == NULL) return -1;
    *index = slot->index;
    *frame = slot->frame;
    return 1;
}

/* ---- Packing, see _packing.py ---- */

typedef struct {
    PyObject_HEAD
    vectorcallfunc call;
    PyObject *slots, *plain, *grads, *frame, *region, *keep_free, *sites; /* the last is NULL where they are not noted */
    Py_ssize_t first;
    char usual; /* keep_free is Frame._keep_free of the frame */
} Packing;

static int packing_traverse(PyObject *self, visitproc visit, void *arg) {
    Packing *packing = (Packing *)self;
    Py_VISIT(packing->slots);
    Py_VISIT(packing->plain);
    Py_VISIT(packing->grads);
    Py_VISIT(packing->frame);
    Py_VISIT(packing->region);
    Py_VISIT(packing->keep_free);
    Py_VISIT(packing->sites);
    return 0;
}

static int packing_clear(PyObject *self) {
    Packing *packing = (Packing *)self;
    Py_CLEAR(packing->slots);
    Py_CLEAR(packing->plain);
    Py_CLEAR(packing->grads);
    Py_CLEAR(packing->frame);
    Py_CLEAR(packing->region);
    Py_CLEAR(packing->keep_free);
    Py_CLEAR(packing->sites);
    return 0;
}

static void packing_dealloc(PyObject *self) {
    PyObject_GC_UnTrack(self);
    packing_clear(self);
    Py_TYPE(self)->tp_free(self);
}

/* Whether a tensor is a leaf that requires gradients; below zero with an error. */
static int is_parameter(PyObject *tensor) {
    PyObject *leaf = PyObject_GetAttr(tensor, name_is_leaf);
    if (leaf == NULL) return -1;
    Py_DECREF(leaf);
    if (leaf != Py_True) return 0;
    PyObject *requires = PyObject_GetAttr(tensor, name_requires_grad);
    if (requires == NULL) return -1;
    Py_DECREF(requires);
    return requires == Py_True;
}

/* What is held of an input of the frame, where no hooks are around it, as Frame._keep_free says it; NULL without an error if it is none. */
static PyObject *held_as_input(Packing *packing, PyObject *tensor) {
    PyObject *around = PyObject_GetAttr(packing->frame, name_around), *inputs = NULL, *held = NULL, *key = NULL, *found = NULL;
    if (around == Py_None && (inputs = PyObject_GetAttr(packing->frame, name_inputs)) != NULL &&
        (held = PyObject_GetAttr(packing->frame, name_held)) != NULL && (key = PyLong_FromVoidPtr(tensor)) != NULL && PyDict_Check(inputs) &&
        PyList_Check(held)) {
        PyObject *entry = PyDict_GetItemWithError(inputs, key);
        PyObject *stands = entry != NULL && PyTuple_Check(entry) && PyTuple_GET_SIZE(entry) == 2 ? PyTuple_GET_ITEM(entry, 1) : NULL;
        PyObject *copied = stands == NULL ? NULL : PyObject_GetAttr(stands, name_copied);
        if (copied == Py_False) {
            PyObject *index = PyObject_GetAttr(stands, name_index), *version = PyObject_GetAttr(tensor, name_version);
            Py_ssize_t place = index == NULL ? -1 : PyLong_AsSsize_t(index);
            if (version != NULL && place >= 0 && place < PyList_GET_SIZE(held))
                found = PyTuple_Pack(3, PyList_GET_ITEM(held, place), version, packing->region);
            Py_XDECREF(index);
            Py_XDECREF(version);
        }
        Py_XDECREF(copied);
    }
    Py_XDECREF(around);
    Py_XDECREF(inputs);
    Py_XDECREF(held);
    Py_XDECREF(key);
    if (found == NULL) PyErr_Clear(); /* what stands for results of earlier members has no such attribute: the twin knows */
    return found;
}

/* What is held of a tensor that is not dropped: NULL without an error if it is. */
static PyObject *held_as_it_is(Packing *packing, PyObject *tensor) {
    PyObject *base = PyObject_GetAttr(tensor, name_base);
    if (base == NULL) return NULL;
    int parameter = is_parameter(base == Py_None ? tensor : base);
    Py_DECREF(base);
    if (parameter < 0) return NULL;
    if (parameter) {
        PyObject *version = PyObject_GetAttr(tensor, name_version);
        if (version == NULL) return NULL;
        PyObject *held = PyTuple_Pack(3, tensor, version, packing->region);
        Py_DECREF(version);
        return held;
    }
    PyObject *arguments[] = {tensor, packing->region};
    PyObject *held = packing->usual ? held_as_input(packing, tensor) : NULL;
    if (held == NULL) held = PyObject_Vectorcall(packing->keep_free, arguments, 2, NULL);
    if (held == Py_None) Py_CLEAR(held);
    return held;
}

/* As site_of in _frame.py says it of the code that runs. */
static PyObject *site_now(void) {
    PyFrameObject *frame = PyEval_GetFrame();
    if (frame == NULL) return PyLong_FromLong(0);
    PyCodeObject *code = PyFrame_GetCode(frame);
    PyObject *number = PyLong_FromVoidPtr(code), *offset = PyLong_FromLong(PyFrame_GetLasti(frame)), *site = NULL;
    if (number != NULL && offset != NULL) site = PyNumber_Add(number, offset);
    Py_DECREF(code);
    Py_XDECREF(number);
    Py_XDECREF(offset);
    return site;
}

/* Add a site, which this takes over, to those of a hook that notes them; below zero with an error. */
static int note_site(Packing *packing, PyObject *site) {
    int failed = site == NULL || PyList_Append(packing->sites, site);
    Py_XDECREF(site);
    return failed ? -1 : 0;
}

static PyObject *pack(Packing *packing, PyObject *tensor) {
    Py_ssize_t index = PyList_GET_SIZE(packing->slots), place = index - packing->first;
    long kind = 0;
    if (place < PyList_GET_SIZE(packing->plain)) {
        kind = PyLong_AsLong(PyList_GET_ITEM(packing->plain, place));
        if (kind == -1 && PyErr_Occurred()) return NULL;
        if (place >= PyList_GET_SIZE(packing->grads)) {
            PyErr_SetString(PyExc_IndexError, "a script that knows fewer flags than tensors");
            return NULL;
        }
        PyObject *requires = PyObject_GetAttr(tensor, name_requires_grad);
        if (requires == NULL) return NULL;
        Py_DECREF(requires);
        if (requires != PyList_GET_ITEM(packing->grads, place) && PyObject_SetAttr(packing->frame, name_strange, Py_True)) return NULL;
    }
    if (kind == 0) {
        PyObject *held = held_as_it_is(packing, tensor);
        if (held != NULL) {
            if (PyList_Append(packing->slots, Py_None)) Py_CLEAR(held);
            return held;
        }
        if (PyErr_Occurred()) return NULL;
    }
    Slot *slot = new_slot(packing->frame, index, tensor, kind);
    if (slot == NULL) return NULL;
    PyObject *ref = PyWeakref_NewRef((PyObject *)slot, NULL);
    if (ref == NULL || PyList_Append(packing->slots, ref)) Py_CLEAR(slot);
    Py_XDECREF(ref);
    return (PyObject *)slot;
}

static PyObject *packing_call(PyObject *self, PyObject *const *arguments, size_t count, PyObject *keywords) {
    Packing *packing = (Packing *)self;
    if (PyVectorcall_NARGS(count) != 1 || keywords != NULL) {
        PyErr_SetString(PyExc_TypeError, "a pack hook takes one tensor");
        return NULL;
    }
    if (packing->sites != NULL && note_site(packing, site_now())) return NULL;
    return pack(packing, arguments[0]);
}

PyObject *pack_for_region_inside(PyObject *self, PyObject *tensor) {
    Packing *packing = (Packing *)self;
    if (packing->sites != NULL && note_site(packing, PyLong_FromLong(SITE_OF_REGION))) return NULL;
    return pack(packing, tensor);
}

static PyObject *packing_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    PyObject *slots, *plain, *grads, *frame, *region, *keep_free;
    Py_ssize_t first;
    if (!PyArg_ParseTuple(arguments, "O!O!O!nOOO", &PyList_Type, &slots, &PyList_Type, &plain, &PyList_Type, &grads, &first, &frame,
                          &region, &keep_free))
        return NULL;
    return new_packing(slots, plain, grads, first, frame, region, keep_free, 0, NULL);
}

static PyMemberDef packing_members[] = {
    {"frame", T_OBJECT_EX, offsetof(Packing, frame), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyTypeObject PackingType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "lowtide.engine._native.Packing",
    .tp_basicsize = sizeof(Packing),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_doc = "The pack hook of a forward.",
    .tp_traverse = packing_traverse,
    .tp_clear = packing_clear,
    .tp_dealloc = packing_dealloc,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(Packing, call),
    .tp_members = packing_members,
    .tp_new = packing_new,
};

PyObject *new_packing(PyObject *slots, PyObject *plain, PyObject *grads, Py_ssize_t first, PyObject *frame, PyObject *region, PyObject *keep_free,
                      int usual, PyObject *sites) {
    if (slot_class == NULL) {
        PyErr_SetString(PyExc_TypeError, "configure() has to be called first");
        return NULL;
    }
    Packing *packing = (Packing *)PackingType.tp_alloc(&PackingType, 0);
    if (packing == NULL) return NULL;
    packing->call = packing_call;
    packing->slots = Py_NewRef(slots);
    packing->plain = Py_NewRef(plain);
    packing->grads = Py_NewRef(grads);
    packing->frame = Py_NewRef(frame);
    packing->region = Py_NewRef(region);
    packing->keep_free = Py_NewRef(keep_free);
    packing->sites = Py_XNewRef(sites);
    packing->first = first;
    packing->usual = (char)usual;
    return (PyObject *)packing;
}

int is_packing_type(PyObject *object) { return Py_TYPE(object) == &PackingType; }

/* ---- Filling, see _packing.py ---- */

typedef struct {
    PyObject_HEAD
    vectorcallfunc call;
    PyObject *slots;
    Py_ssize_t index, last, stop;
} Filling;

static int filling_traverse(PyObject *self, visitproc visit, void *arg) {
    Py_VISIT(((Filling *)self)->slots);
    return 0;
}

static int filling_clear(PyObject *self) {
    Py_CLEAR(((Filling *)self)->slots);
    return 0;
}

static void filling_dealloc(PyObject *self) {
    PyObject_GC_UnTrack(self);
    filling_clear(self);
    Py_TYPE(self)->tp_free(self);
}

/* Whether a tensor has dtype and shape of a slot; below zero with an error. */
static int fits(Slot *slot, PyObject *tensor) {
    PyObject *dtype = PyObject_GetAttr(tensor, name_dtype);
    if (dtype == NULL) return -1;
    Py_DECREF(dtype);
    if (dtype != slot->dtype) return 0;
    if (slot->shape == NULL || slot->shape == Py_None) return 1;
    PyObject *shape = PyObject_GetAttr(tensor, name_shape);
    if (shape == NULL) return -1;
    int same = PyObject_RichCompareBool(shape, slot->shape, Py_EQ);
    Py_DECREF(shape);
    return same;
}

/* Put a tensor into the slot at a place, if that is still held and empty: 1, 0 if it does not fit, below zero with an error. */
static int fill(PyObject *slots, Py_ssize_t place, PyObject *tensor) {
    Slot *slot = slot_at(slots, place);
    if (slot == NULL) return PyErr_Occurred() ? -1 : 1;
    int fine = 1;
    if (!is_full(slot)) {
        fine = fits(slot, tensor);
        if (fine > 0) {
            Py_XSETREF(slot->value, Py_NewRef(tensor)); /* not detached, see Recorder */
            if (version_of(tensor, &slot->version)) fine = -1;
        }
    }
    Py_DECREF(slot);
    return fine;
}

static PyObject *filling_call(PyObject *self, PyObject *const *arguments, size_t count, PyObject *keywords) {
    Filling *filling = (Filling *)self;
    if (PyVectorcall_NARGS(count) != 1 || keywords != NULL) {
        PyErr_SetString(PyExc_TypeError, "a pack hook takes one tensor");
        return NULL;
    }
    Py_ssize_t index = ++filling->index;
    if (index >= 0 && index <= filling->last && index < PyList_GET_SIZE(filling->slots)) {
        int fine = fill(filling->slots, index, arguments[0]);
        if (fine < 0) return NULL;
        if (!fine) {
            filling->index = -PY_SSIZE_T_MAX;
            PyErr_SetNone(stop_replay);
            return NULL;
        }
    }
    if (index >= filling->stop || index >= PyList_GET_SIZE(filling->slots)) {
        PyErr_SetNone(stop_replay);
        return NULL;
    }
    Py_RETURN_NONE;
}

static PyObject *filling_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
    PyObject *slots;
    Py_ssize_t last, stop;
    if (!PyArg_ParseTuple(arguments, "O!nn", &PyList_Type, &slots, &last, &stop)) return NULL;
    return new_filling(slots, last, stop);
}

static PyMemberDef filling_members[] = {
    {"reached", T_PYSSIZET, offsetof(Filling, index), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyTypeObject FillingType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "lowtide.engine._native.Filling",
    .tp_basicsize = sizeof(Filling),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL,
    .tp_doc = "The pack hook of a replay.",
    .tp_traverse = filling_traverse,
    .tp_clear = filling_clear,
    .tp_dealloc = filling_dealloc,
    .tp_call = PyVectorcall_Call,
    .tp_vectorcall_offset = offsetof(Filling, call),
    .tp_members = filling_members,
    .tp_new = filling_new,
};

PyObject *new_filling(PyObject *slots, Py_ssize_t last, Py_ssize_t stop) {
    Filling *filling = (Filling *)FillingType.tp_alloc(&FillingType, 0);
    if (filling == NULL) return NULL;
    filling->call = filling_call;
    filling->slots = Py_NewRef(slots);
    filling->index = -1;
    filling->last = last;
    filling->stop = stop;
    return (PyObject *)filling;
}

Py_ssize_t filling_reached(PyObject *filling) { return ((Filling *)filling)->index; }

/* ---- all slots of a frame, see _packing.py ---- */

Py_ssize_t last_wanted_in(PyObject *slots, Py_ssize_t wanted, Py_ssize_t end) {
    if (end > PyList_GET_SIZE(slots)) {
        PyErr_Format(PyExc_IndexError, "there are %zd slots", PyList_GET_SIZE(slots));
        return -1;
    }
    for (Py_ssize_t place = end - 1; place > wanted && place >= 0; place--) {
        Slot *slot = slot_at(slots, place);
        if (slot == NULL && PyErr_Occurred()) return -1;
        if (slot == NULL) continue;
        int full = is_full(slot);
        Py_DECREF(slot);
        if (!full) return place;
    }
    return wanted;
}

static PyObject *last_wanted(PyObject *module, PyObject *arguments) {
    PyObject *slots;
    Py_ssize_t wanted, end;
    if (!PyArg_ParseTuple(arguments, "O!nn", &PyList_Type, &slots, &wanted, &end)) return NULL;
    Py_ssize_t place = last_wanted_in(slots, wanted, end);
    return place == -1 && PyErr_Occurred() ? NULL : PyLong_FromSsize_t(place);
}

int drop_values_in(PyObject *slots, int given_only) {
    for (Py_ssize_t place = 0; place < PyList_GET_SIZE(slots); place++) { /* a tensor that goes may take slots with it */
        Slot *slot = slot_at(slots, place);
        if (slot == NULL && PyErr_Occurred()) return -1;
        if (slot == NULL) continue;
        if (is_full(slot) && (slot->given || !given_only)) {
            Py_CLEAR(slot->value);
            slot->given = 0;
        }
        Py_DECREF(slot);
    }
    return 0;
}

static PyObject *drop_values(PyObject *module, PyObject *arguments) {
    PyObject *slots;
    int given_only;
    if (!PyArg_ParseTuple(arguments, "O!p", &PyList_Type, &slots, &given_only) || drop_values_in(slots, given_only)) return NULL;
    Py_RETURN_NONE;
}

/* ---- unpack, see _unpack.py ---- */

PyObject *unpack_held(PyObject *packed) {
    PyObject *tensor = NULL;
    long long now, then = 0;
    Slot *slot = NULL;
    if (PyTuple_CheckExact(packed) && PyTuple_GET_SIZE(packed) == 3) {
        tensor = PyTuple_GET_ITEM(packed, 0);
        then = PyLong_AsLongLong(PyTuple_GET_ITEM(packed, 1));
        if (then == -1 && PyErr_Occurred()) return NULL;
    } else if (Py_TYPE(packed) == slot_class) {
        slot = (Slot *)packed;
        if (!is_full(slot) && slot->ref == gone && slot->frame != NULL && fill_slot(packed, slot->frame) < 0) return NULL;
        tensor = slot->value == Py_None ? NULL : slot->value;
        then = slot->version;
    }
    if (tensor != NULL) {
        Py_INCREF(tensor);
        if (version_of(tensor, &now)) {
            Py_DECREF(tensor);
            return NULL;
        }
        if (now == then) {
            if (slot != NULL) slot->given = 1;
            return tensor;
        }
        Py_DECREF(tensor);
    }
    return PyObject_CallOneArg(unpack_otherwise, packed);
}

static PyObject *unpack(PyObject *module, PyObject *packed) { return unpack_held(packed); }

/* The pack hook under which nothing is saved, see _region.py. */
static PyObject *forget(PyObject *module, PyObject *tensor) { Py_RETURN_NONE; }

/* ---- tables of modules, see _guards/_reading.py ---- */

static int are_lists(PyObject *const *arguments, Py_ssize_t count, Py_ssize_t wanted) {
    int fine = count == wanted;
    for (Py_ssize_t index = 0; fine && index < count; index++) fine = PyList_Check(arguments[index]);
    if (!fine) PyErr_Format(PyExc_TypeError, "it takes %zd lists", wanted);
    return fine;
}

/* How many values there are in tables of these sizes; below zero if they have others: without an error, or with one if something is no table. */
static Py_ssize_t total_of(PyObject *tables, PyObject *sizes) {
    Py_ssize_t total = 0;
    if (PyList_GET_SIZE(tables) != PyList_GET_SIZE(sizes)) return -1;
    for (Py_ssize_t index = 0; index < PyList_GET_SIZE(tables); index++) {
        PyObject *table = PyList_GET_ITEM(tables, index);
        if (!PyDict_Check(table)) {
            PyErr_SetString(PyExc_TypeError, "a table is a dict");
            return -1;
        }
        Py_ssize_t size = PyLong_AsSsize_t(PyList_GET_ITEM(sizes, index));
        if (size == -1 && PyErr_Occurred()) return -1;
        if (PyDict_GET_SIZE(table) != size) return -1;
        total += size;
    }
    return total;
}

static PyObject *same_values(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    if (!are_lists(arguments, count, 4)) return NULL;
    PyObject *tables = arguments[0], *values = arguments[2], *skipped = arguments[3], *value;
    Py_ssize_t at = 0, skip = 0, skips = PyList_GET_SIZE(skipped), total = total_of(tables, arguments[1]);
    if (total < 0 && PyErr_Occurred()) return NULL;
    if (total != PyList_GET_SIZE(values)) Py_RETURN_FALSE;
    for (Py_ssize_t index = 0; index < PyList_GET_SIZE(tables); index++) {
        Py_ssize_t position = 0;
        while (at < total && PyDict_Next(PyList_GET_ITEM(tables, index), &position, NULL, &value)) {
            if (skip < skips && PyLong_AsSsize_t(PyList_GET_ITEM(skipped, skip)) == at) skip++;
            else if (PyList_GET_ITEM(values, at) != value) Py_RETURN_FALSE;
            at++;
        }
    }
    if (PyErr_Occurred()) return NULL;
    Py_RETURN_TRUE;
}

static PyObject *values_of(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    if (!are_lists(arguments, count, 2)) return NULL;
    PyObject *tables = arguments[0], *value;
    Py_ssize_t at = 0, total = total_of(tables, arguments[1]);
    if (total < 0) {
        if (PyErr_Occurred()) return NULL;
        Py_RETURN_NONE;
    }
    PyObject *values = PyList_New(total);
    if (values == NULL) return NULL;
    for (Py_ssize_t index = 0; index < PyList_GET_SIZE(tables); index++) {
        Py_ssize_t position = 0;
        while (at < total && PyDict_Next(PyList_GET_ITEM(tables, index), &position, NULL, &value)) PyList_SET_ITEM(values, at++, Py_NewRef(value));
    }
    return values;
}

/* As versions_of, of a list. */
PyObject *versions_in(PyObject *tensors) {
    PyObject *versions = PyList_New(PyList_GET_SIZE(tensors));
    for (Py_ssize_t index = 0; versions != NULL && index < PyList_GET_SIZE(versions); index++) {
        PyObject *tensor = PyList_GET_ITEM(tensors, index);
        PyObject *version = tensor == Py_None ? PyLong_FromLong(-1) : PyObject_GetAttr(tensor, name_version);
        if (version == NULL) Py_CLEAR(versions);
        else PyList_SET_ITEM(versions, index, version);
    }
    return versions;
}

static PyObject *versions_of(PyObject *module, PyObject *tensors) {
    if (!PyList_Check(tensors)) return PyErr_Format(PyExc_TypeError, "it takes a list");
    return versions_in(tensors);
}

static PyObject *are_versions(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    if (!are_lists(arguments, count, 2)) return NULL;
    PyObject *tensors = arguments[0], *versions = arguments[1];
    if (PyList_GET_SIZE(tensors) != PyList_GET_SIZE(versions)) Py_RETURN_FALSE;
    for (Py_ssize_t index = 0; index < PyList_GET_SIZE(tensors); index++) {
        long long now = -1, then = PyLong_AsLongLong(PyList_GET_ITEM(versions, index));
        PyObject *tensor = PyList_GET_ITEM(tensors, index);
        if (then == -1 && PyErr_Occurred()) return NULL;
        if (then == UNREAD) continue;
        if (tensor != Py_None && version_of(tensor, &now)) return NULL;
        if (now != then) Py_RETURN_FALSE;
    }
    Py_RETURN_TRUE;
}

static PyObject *configure(PyObject *module, PyObject *arguments) {
    PyObject *slot, *nothing, *stop, *otherwise;
    if (!PyArg_ParseTuple(arguments, "O!OOO", &PyType_Type, &slot, &nothing, &stop, &otherwise)) return NULL;
    if (!PyType_IsSubtype((PyTypeObject *)slot, &SlotType)) return PyErr_Format(PyExc_TypeError, "slots are of a subclass of Slot");
    Py_XSETREF(slot_class, (PyTypeObject *)Py_NewRef(slot));
    Py_XSETREF(gone, Py_NewRef(nothing));
    Py_XSETREF(stop_replay, Py_NewRef(stop));
    Py_XSETREF(unpack_otherwise, Py_NewRef(otherwise));
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"are_versions", (PyCFunction)(void (*)(void))are_versions, METH_FASTCALL, NULL},
    {"drop_values", drop_values, METH_VARARGS, NULL},
    {"forget", forget, METH_O, NULL},
    {"last_wanted", last_wanted, METH_VARARGS, NULL},
    {"configure", configure, METH_VARARGS, NULL},
    {"same_values", (PyCFunction)(void (*)(void))same_values, METH_FASTCALL, NULL},
    {"unpack", unpack, METH_O, NULL},
    {"values_of", (PyCFunction)(void (*)(void))values_of, METH_FASTCALL, NULL},
    {"versions_of", versions_of, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "_native", .m_size = -1, .m_methods = functions};

/* Have objects of a type say whose they are: whether hooks are lowtide's is told by it, see _transforms.py. */
static int say_module(PyTypeObject *type) {
    PyObject *whose = PyUnicode_FromString("lowtide.engine._native");
    int failed = whose == NULL || PyDict_SetItemString(type->tp_dict, "__module__", whose);
    Py_XDECREF(whose);
    return failed;
}

PyMODINIT_FUNC PyInit__native(void) {
    struct { PyObject **name; const char *text; } names[] = {
        {&name_version, "_version"}, {&name_dtype, "dtype"}, {&name_shape, "shape"}, {&name_requires_grad, "requires_grad"},
        {&name_is_leaf, "is_leaf"}, {&name_base, "_base"}, {&name_strange, "_strange"},
        {&name_around, "_around"}, {&name_inputs, "inputs"}, {&name_held, "held"}, {&name_copied, "copied"}, {&name_index, "index"},
    };
    for (size_t index = 0; index < sizeof(names) / sizeof(names[0]); index++)
        if ((*names[index].name = PyUnicode_InternFromString(names[index].text)) == NULL) return NULL;
    if (PyType_Ready(&SlotType) || PyType_Ready(&PackingType) || PyType_Ready(&FillingType)) return NULL;
    if (say_module(&PackingType) || say_module(&FillingType)) return NULL;
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL || PyModule_AddIntConstant(module, "API", API) || add_guards(module) || add_settled(module) || add_short(module) ||
        add_unpack(module) || add_outside(module) ||
        PyModule_AddObjectRef(module, "Slot", (PyObject *)&SlotType) ||
        PyModule_AddObjectRef(module, "Packing", (PyObject *)&PackingType) ||
        PyModule_AddObjectRef(module, "Filling", (PyObject *)&FillingType)) {
        Py_XDECREF(module);
        return NULL;
    }
    return module;
}
