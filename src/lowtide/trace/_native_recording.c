/* What runs around each op of a step: see Recorder.__torch_dispatch__, and what it calls.
 *
 * Its twins are `look_at` and `tensors_in` in _ops.py, StorageTable.rows_of, CpuExecution.run, OpTable.add and Recorder._phase. The rows
 * are in the same lists and dictionaries; what is rare is left to the twins.
 */

#include "_native.h"

DECLARE_NAME(_sequence_nr)
DECLARE_NAME(alike)
DECLARE_NAME(call)
DECLARE_NAME(peak_bytes)
DECLARE_NAME(recorded)
DECLARE_NAME(seconds)
DECLARE_NAME(varies)
DECLARE_NAME(view)
DECLARE_NAME(written)
DECLARE_NAME(written_tensors)
static PyObject *nowhere; /* the line of an op that has none */

/* In the order in which they are given: the table of storages; rows of ops; the op that made each backward node; kinds, kinds of ops and
 * their peaks, None where the execution keeps others; the module calls that run; what is filled and emptied; and functions. */
#define RECORDING_FIELDS(X)                                                                                                                \
    X(storages) X(ops) X(makers) X(kinds) X(kinds_of_ops) X(peaks) X(running) X(refills) X(note_emptied) X(is_replay) X(is_in_place)       \
    X(counts) X(move) X(run)

#define FIELD(name) PyObject *name;
typedef struct {
    PyObject_HEAD
    RECORDING_FIELDS(FIELD)
    PyObject *settled; /* kind and peak of what need not be timed, by what ops of the kind have in common */
    long long last_number;
    char in_optimizer;
} Recording;

static PyTypeObject RecordingType, FactsType;

/* ---- Facts, see OpFacts ---- */

typedef struct {
    PyObject_HEAD
    PyObject *all, *call; /* of Python; of torch */
    char alike, recorded, varies, view, writes;
} Facts;

static void facts_dealloc(PyObject *self) {
    Py_XDECREF(((Facts *)self)->all);
    Py_XDECREF(((Facts *)self)->call);
    PyObject_Free(self);
}

/* They are kept for good, and refer to operators alone. */
static PyTypeObject FactsType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "lowtide.trace._native.Facts",
    .tp_basicsize = sizeof(Facts),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .tp_dealloc = facts_dealloc,
};

static PyObject *known_facts; /* by address of the operator, which its facts keep */

static int read_flag(PyObject *facts, PyObject *name, char *flag) {
    int is = truth(PyObject_GetAttr(facts, name));
    *flag = is > 0;
    return is < 0;
}

static Facts *read_facts(PyObject *func) {
    Facts *facts = PyObject_New(Facts, &FactsType);
    if (facts == NULL) return NULL;
    facts->call = NULL;
    facts->all = CALL_ONE(facts_of, func);
    if (facts->all == NULL || (facts->call = GET(facts->all, call)) == NULL || read_flag(facts->all, n_alike, &facts->alike) ||
        read_flag(facts->all, n_recorded, &facts->recorded) || read_flag(facts->all, n_varies, &facts->varies) ||
        read_flag(facts->all, n_view, &facts->view) || read_flag(facts->all, n_written, &facts->writes))
        Py_CLEAR(facts);
    return facts;
}

/* The facts of an operator, borrowed. */
static Facts *facts_for(PyObject *func) {
    PyObject *key = PyLong_FromVoidPtr(func);
    if (key == NULL) return NULL;
    PyObject *facts = PyDict_GetItemWithError(known_facts, key);
    if (facts == NULL && !PyErr_Occurred() && (facts = (PyObject *)read_facts(func)) != NULL) {
        int failed = PyDict_SetItem(known_facts, key, facts);
        Py_DECREF(facts);
        if (failed) facts = NULL;
    }
    Py_DECREF(key);
    return (Facts *)facts;
}

/* ---- What an op is given ---- */

static int describe(PyObject *values, PyObject *tensors, PyObject *like);

static int describe_tensor(PyObject *tensor, PyObject *tensors, PyObject *like) {
    int is_strided = is_this(read_from(tensor, LAYOUT), the_STRIDED);
    if (is_strided < 0 || PyList_Append(tensors, tensor)) return -1;
    /* What has no strides has contents that its size does not tell: it is like nothing else. */
    if (!is_strided) return add_to(like, PyObject_CallNoArgs((PyObject *)&PyBaseObject_Type));
    return add_to(like, read_from(tensor, DTYPE)) || add_to(like, read_from(tensor, SHAPE)) || add_to(like, read_from(tensor, STRIDE)) ? -1 : 0;
}

static int describe_value(PyObject *value, PyObject *tensors, PyObject *like) {
    if (is_tensor(value)) return describe_tensor(value, tensors, like);
    if (is_sequence(value)) return add_to(like, PyLong_FromSsize_t(SIZE(value))) || describe(value, tensors, like) ? -1 : 0;
    /* The type, for 1, 1.0 and True are equal. */
    return PyList_Append(like, (PyObject *)Py_TYPE(value)) || PyList_Append(like, value) ? -1 : 0;
}

/* Gather the tensors in a list or tuple, and what tells it from others: see look_at. */
static int describe(PyObject *values, PyObject *tensors, PyObject *like) {
    for (Py_ssize_t index = 0; index < SIZE(values); index++)
        if (describe_value(ITEM(values, index), tensors, like)) return -1;
    return 0;
}

static int describe_named(PyObject *values, PyObject *tensors, PyObject *like) {
    PyObject *name, *value;
    Py_ssize_t position = 0;
    while (values != NULL && PyDict_Next(values, &position, &name, &value))
        if (PyList_Append(like, name) || describe_value(value, tensors, like)) return -1;
    return 0;
}

/* Gather the tensors in a list or tuple: see tensors_in. */
static int gather(PyObject *values, PyObject *tensors) {
    for (Py_ssize_t index = 0; index < SIZE(values); index++) {
        PyObject *value = ITEM(values, index);
        if (is_tensor(value) ? PyList_Append(tensors, value) : is_sequence(value) && gather(value, tensors)) return -1;
    }
    return 0;
}

/* Rows of the tensors that an op reads, and what it has in common with those that cost the same. */
static PyObject *look(Recording *recording, Facts *facts, PyObject *recorded_gradients, PyObject *args, PyObject *kwargs, PyObject *category,
                      PyObject **like) {
    PyObject *tensors = PyList_New(0), *list = PyList_New(0), *reads = NULL;
    *like = NULL;
    /* Some kernels look whether gradients are recorded, and return more where they are. */
    int failed = tensors == NULL || list == NULL || PyList_Append(list, facts->all) || PyList_Append(list, recorded_gradients);
    if (!failed && !(facts->alike ? gather(args, tensors) : describe(args, tensors, list) || describe_named(kwargs, tensors, list)))
        reads = rows_in(recording->storages, tensors, category);
    if (reads != NULL && (*like = PyList_AsTuple(list)) == NULL) Py_CLEAR(reads);
    Py_XDECREF(tensors);
    Py_XDECREF(list);
    return reads;
}

/* Rows of the tensors that an op changes. */
static PyObject *written_rows(Recording *recording, Facts *facts, PyObject *args, PyObject *kwargs, PyObject *category) {
    if (!facts->writes) return PyTuple_New(0);
    PyObject *named = kwargs == NULL ? PyDict_New() : Py_NewRef(kwargs), *tensors = NULL, *rows = NULL;
    if (named != NULL) tensors = PyObject_CallMethodObjArgs(facts->all, n_written_tensors, args, named, NULL);
    if (tensors != NULL) rows = rows_in(recording->storages, tensors, category);
    Py_XDECREF(named);
    Py_XDECREF(tensors);
    return rows;
}

/* Rows of what an op returned. */
static PyObject *returned_rows(Recording *recording, PyObject *out, PyObject *category) {
    PyObject *tensors = PyList_New(0), *rows = NULL;
    int failed = tensors == NULL || (is_tensor(out) ? PyList_Append(tensors, out) : is_sequence(out) && gather(out, tensors));
    if (!failed) rows = rows_in(recording->storages, tensors, category);
    Py_XDECREF(tensors);
    return rows;
}

/* ---- Running it ---- */

/* Whether all that is asked about ops of a kind is known; below zero with an error. */
static int is_settled(Facts *facts, PyObject *kind) {
    if (facts->varies) return 0;
    int unseen = facts->view ? 0 : is_this(GET(kind, peak_bytes), Py_None);
    if (unseen) return unseen < 0 ? -1 : 0;
    PyObject *seconds = GET(kind, seconds);
    if (seconds == NULL) return -1;
    int enough = PyList_Check(seconds) && PyList_GET_SIZE(seconds) >= PyLong_AsSsize_t(the_ENOUGH);
    Py_DECREF(seconds);
    return enough;
}

/* From now on ops of this kind are neither timed nor observed. */
static int settle(Recording *recording, PyObject *like, PyObject *kind) {
    PyObject *peak = GET(kind, peak_bytes);
    if (peak == Py_None) Py_SETREF(peak, PyLong_FromLong(0));
    PyObject *settled = peak == NULL ? NULL : PyTuple_Pack(2, kind, peak);
    int failed = settled == NULL || PyDict_SetItem(recording->settled, like, settled);
    Py_XDECREF(peak);
    Py_XDECREF(settled);
    return failed ? -1 : 0;
}

static int settle_if_known(Recording *recording, Facts *facts, PyObject *like) {
    PyObject *kind = recording->kinds == Py_None ? NULL : PyDict_GetItemWithError(recording->kinds, like);
    if (kind == NULL) return PyErr_Occurred() ? -1 : 0;
    int known = is_settled(facts, kind);
    return known > 0 ? settle(recording, like, kind) : known;
}

/* As CpuExecution.run where an op is neither timed nor observed. */
static PyObject *run_settled(Recording *recording, Facts *facts, PyObject *settled, PyObject *args, PyObject *kwargs) {
    Py_INCREF(settled);
    PyObject *out = PyObject_Call(facts->call, args, kwargs);
    /* Only now, for an op that raises is none of the step, which may well go on. */
    if (out != NULL && (PyList_Append(recording->kinds_of_ops, PyTuple_GET_ITEM(settled, 0)) ||
                        PyList_Append(recording->peaks, PyTuple_GET_ITEM(settled, 1))))
        Py_CLEAR(out);
    Py_DECREF(settled);
    return out;
}

static PyObject *run_op(Recording *recording, Facts *facts, PyObject *args, PyObject *kwargs, PyObject *like) {
    PyObject *settled = PyDict_GetItemWithError(recording->settled, like);
    if (settled != NULL) return run_settled(recording, facts, settled, args, kwargs);
    if (PyErr_Occurred()) return NULL;
    PyObject *named = kwargs == NULL ? PyDict_New() : Py_NewRef(kwargs);
    PyObject *out = named == NULL ? NULL : PyObject_CallFunctionObjArgs(recording->run, facts->all, args, named, like, NULL);
    if (out != NULL && settle_if_known(recording, facts, like)) Py_CLEAR(out);
    Py_XDECREF(named);
    return out;
}

/* ---- Noting it ---- */

/* See Recorder._phase; borrowed. */
static PyObject *phase_of(Recording *recording, PyObject *recorded_gradients) {
    PyObject *task = CALL(graph_task_id);
    if (task == NULL) return NULL;
    Py_ssize_t number_of_task = number(task);
    if (number_of_task == -1 && PyErr_Occurred()) return NULL;
    if (number_of_task == -1) return recording->in_optimizer && recorded_gradients != Py_True ? the_OPTIMIZER : the_FORWARD;
    int replay = truth(CALL(in_replay));
    if (!replay && PyList_GET_SIZE(recording->running)) replay = truth(PyObject_CallNoArgs(recording->is_replay));
    return replay < 0 ? NULL : replay ? the_REPLAY : the_BACKWARD;
}

/* The op that made the backward node that runs, as OpTable.add finds it: borrowed, None without one. */
static PyObject *origin_of(Recording *recording) {
    PyObject *node = CALL(current_node);
    if (node == NULL || node == Py_None) {
        Py_XDECREF(node);
        return node;
    }
    PyObject *sequence = PyObject_CallMethodNoArgs(node, n__sequence_nr);
    Py_DECREF(node);
    if (sequence == NULL) return NULL;
    PyObject *origin = PyDict_GetItemWithError(recording->makers, sequence);
    Py_DECREF(sequence);
    return origin == NULL && !PyErr_Occurred() ? Py_None : origin;
}

/* Whoever runs when a number was given out is the maker of its node. */
static int note_maker(Recording *recording) {
    PyObject *next = CALL(next_sequence_number);
    if (next == NULL) return -1;
    long long number_of_node = PyLong_AsLongLong(next);
    Py_DECREF(next);
    if (number_of_node == -1 && PyErr_Occurred()) return -1;
    if (number_of_node == recording->last_number) return 0;
    recording->last_number = number_of_node;
    PyObject *made = PyLong_FromLongLong(number_of_node - 1), *op = PyLong_FromSsize_t(PyList_GET_SIZE(recording->ops));
    int failed = made == NULL || op == NULL || PyDict_SetDefault(recording->makers, made, op) == NULL;
    Py_XDECREF(made);
    Py_XDECREF(op);
    return failed ? -1 : 0;
}

static int add_op(Recording *recording, PyObject *facts, PyObject *phase, PyObject *reads, PyObject *writes, PyObject *births) {
    Py_ssize_t depth = PyList_GET_SIZE(recording->running);
    PyObject *origin = Py_None, *source = NULL, *call = depth ? PyTuple_GET_ITEM(PyList_GET_ITEM(recording->running, depth - 1), 0) : Py_None;
    if (phase == the_BACKWARD && (origin = origin_of(recording)) == NULL) return -1;
    if (origin != Py_None) {
        PyObject *row = PyList_GetItem(recording->ops, PyLong_AsSsize_t(origin));
        if (row == NULL) return -1;
        call = PyTuple_GET_ITEM(row, 2);
        source = Py_NewRef(PyTuple_GET_ITEM(row, 3));
    } else {
        source = phase == the_FORWARD || phase == the_REPLAY ? line_of_user() : Py_NewRef(nowhere);
    }
    int failed = source == NULL || note_maker(recording) ||
                 add_to(recording->ops, PyTuple_Pack(8, facts, phase, call, source, reads, writes, births, origin));
    Py_XDECREF(source);
    return failed ? -1 : 0;
}

/* Run an op of which it is known what it reads, and note it. */
static PyObject *run_and_note(Recording *recording, Facts *facts, PyObject *phase, PyObject *category, PyObject *args, PyObject *kwargs,
                              PyObject *reads, PyObject *like, int may_be_in_place) {
    PyObject *writes = written_rows(recording, facts, args, kwargs, category), *births = NULL;
    if (writes == NULL) return NULL;
    int in_place = may_be_in_place ? adds_in_place(args, recording->counts) : 0;
    if (in_place == 2) in_place = truth(PyObject_CallOneArg(recording->is_in_place, args));
    PyObject *out = in_place < 0 ? NULL : run_op(recording, facts, args, kwargs, like);
    if (out != NULL && in_place) {
        int was_moved = is_sequence(args) && SIZE(args) ? moved(recording->storages, ITEM(args, 0), out) : 0;
        if (!was_moved) was_moved = done(PyObject_CallFunctionObjArgs(recording->move, ITEM(args, 0), out, NULL));
        if (was_moved >= 0) births = Py_NewRef(Py_None);
    } else if (out != NULL) {
        births = returned_rows(recording, out, category);
    }
    if (births == NULL || add_op(recording, facts->all, phase, reads, writes, births)) Py_CLEAR(out);
    Py_XDECREF(births);
    Py_DECREF(writes);
    return out;
}

static PyObject *note_op(Recording *recording, PyObject *func, Facts *facts, PyObject *recorded_gradients, PyObject *args, PyObject *kwargs) {
    PyObject *phase = phase_of(recording, recorded_gradients), *like;
    if (phase == NULL) return NULL;
    PyObject *category = phase == the_FORWARD || phase == the_REPLAY ? the_ACTIVATION : the_TEMPORARY;
    if (PyList_GET_SIZE(recording->refills) && done(PyObject_CallNoArgs(recording->note_emptied))) return NULL;
    PyObject *reads = look(recording, facts, recorded_gradients, args, kwargs, category, &like);
    if (reads == NULL) return NULL;
    /* Autograd adds gradients up while it records none, in backward. */
    int may_be_in_place = func == the_ADD && recorded_gradients != Py_True && (phase == the_BACKWARD || phase == the_REPLAY);
    PyObject *out = run_and_note(recording, facts, phase, category, args, kwargs, reads, like, may_be_in_place);
    Py_DECREF(reads);
    Py_DECREF(like);
    return out;
}

/* Called as a method of the mode: with the mode, the operator, types, arguments and, if there are any, those by name. */
static PyObject *dispatch(PyObject *self, PyObject *const *given, Py_ssize_t count) {
    if (count < 4 || count > 5) return PyErr_Format(PyExc_TypeError, "it takes a mode and what a mode is given");
    PyObject *func = given[1], *args = given[3], *kwargs = count > 4 && given[4] != Py_None ? given[4] : NULL;
    if (!PyTuple_CheckExact(args) || (kwargs != NULL && !PyDict_CheckExact(kwargs)))
        return PyErr_Format(PyExc_TypeError, "arguments are a tuple and a dict");
    Facts *facts = facts_for(func);
    if (facts == NULL) return NULL;
    if (!facts->recorded) return PyObject_Call(facts->call, args, kwargs);
    PyObject *recorded_gradients = CALL(is_grad_enabled);
    if (recorded_gradients == NULL) return NULL;
    PyObject *out = note_op((Recording *)self, func, facts, recorded_gradients, args, kwargs);
    Py_DECREF(recorded_gradients);
    return out;
}

/* ---- The type ---- */

static int recording_clear(PyObject *self) {
    Recording *recording = (Recording *)self;
#define CLEAR_FIELD(name) Py_CLEAR(recording->name);
    RECORDING_FIELDS(CLEAR_FIELD)
    CLEAR_FIELD(settled)
    return 0;
}

static int recording_traverse(PyObject *self, visitproc visit, void *arg) {
    Recording *recording = (Recording *)self;
#define VISIT_FIELD(name) Py_VISIT(recording->name);
    RECORDING_FIELDS(VISIT_FIELD)
    VISIT_FIELD(settled)
    return 0;
}

static void recording_dealloc(PyObject *self) {
    PyObject_GC_UnTrack(self);
    recording_clear(self);
    Py_TYPE(self)->tp_free(self);
}

/* Whether the fields that are looked into are what they have to be. */
static int is_made_right(Recording *recording) {
    PyObject *const lists[] = {recording->ops, recording->running, recording->refills};
    for (size_t index = 0; index < sizeof(lists) / sizeof(lists[0]); index++)
        if (!PyList_CheckExact(lists[index])) return 0;
    int is_timed = recording->kinds != Py_None;
    if (is_timed && !(PyDict_Check(recording->kinds) && PyList_CheckExact(recording->kinds_of_ops) && PyList_CheckExact(recording->peaks))) return 0;
    if (!PyTuple_CheckExact(recording->counts) || PyTuple_GET_SIZE(recording->counts) != 2) return 0;
    return is_storages_type(recording->storages) && PyDict_CheckExact(recording->makers);
}

static PyObject *recording_new(PyTypeObject *type, PyObject *arguments, PyObject *keywords) {
#define FIELD_NAME(name) #name,
#define FIELD_OFFSET(name) offsetof(Recording, name),
    static const char *const names[] = {RECORDING_FIELDS(FIELD_NAME)};
    static const size_t offsets[] = {RECORDING_FIELDS(FIELD_OFFSET)};
    Recording *recording = (Recording *)type->tp_alloc(type, 0);
    if (recording == NULL || take_fields((PyObject *)recording, names, offsets, sizeof(names) / sizeof(names[0]), arguments, keywords)) goto failed;
    if (!is_made_right(recording)) {
        PyErr_SetString(PyExc_TypeError, "a part of the recording is of another type");
        goto failed;
    }
    if ((recording->settled = PyDict_New()) == NULL) goto failed;
    recording->last_number = -1;
    return (PyObject *)recording;
failed:
    Py_XDECREF(recording);
    return NULL;
}

static PyMethodDef recording_methods[] = {
    {"dispatch", (PyCFunction)(void (*)(void))dispatch, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef recording_members[] = {
    {"in_optimizer", T_BOOL, offsetof(Recording, in_optimizer), 0, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyTypeObject RecordingType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "lowtide.trace._native.Recording",
    .tp_basicsize = sizeof(Recording),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_doc = "What lowtide.trace._recorder.Recorder does for each op.",
    .tp_traverse = recording_traverse,
    .tp_clear = recording_clear,
    .tp_dealloc = recording_dealloc,
    .tp_methods = recording_methods,
    .tp_members = recording_members,
    .tp_new = recording_new,
};

int add_recording(PyObject *module) {
    INTERN(_sequence_nr)
    INTERN(alike)
    INTERN(call)
    INTERN(peak_bytes)
    INTERN(recorded)
    INTERN(seconds)
    INTERN(varies)
    INTERN(view)
    INTERN(written)
    INTERN(written_tensors)
    if ((nowhere = PyUnicode_InternFromString("")) == NULL || (known_facts = PyDict_New()) == NULL) return -1;
    if (PyType_Ready(&FactsType) || PyType_Ready(&RecordingType)) return -1;
    return PyModule_AddObjectRef(module, "Recording", (PyObject *)&RecordingType);
}
