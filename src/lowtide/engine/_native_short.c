/* Calls that go the way of the call before, and their replays: see _steady.py, which says what each step is for.
 *
 * The twins in Python are `Steady.run_in_python` and `SteadyCall.replay_in_python`. What is unusual is left to them, or to the methods
 * that they use: policies, members of segments in a replay, modes and autocast, other devices.
 */

#include "_native.h"

/* Names of attributes. */
#define NAMES(NAME) \
    NAME(_alike) NAME(_around) NAME(_buffer_count) NAME(_keep_free) NAME(_pack_around) NAME(_settled) NAME(_strange) NAME(ambient) \
    NAME(args) NAME(attention) NAME(calls) NAME(copied) NAME(depth) NAME(detach) NAME(differentiates) NAME(direct) NAME(draws) \
    NAME(early_stop) NAME(end) NAME(ended_at) NAME(enter_again) NAME(expected) NAME(finder) NAME(finds_the_same) NAME(first) \
    NAME(first_saved) NAME(fixed) NAME(give_up) NAME(grads) NAME(hashes) NAME(held) NAME(index) NAME(inputs) NAME(is_as) \
    NAME(is_inference) NAME(is_leaf) NAME(keep) NAME(keeps) NAME(kept) NAME(knows) NAME(leave) NAME(left) NAME(lend) NAME(level) NAME(listener) NAME(mark) NAME(note_object) \
    NAME(note_sites) NAME(now) NAME(objects) NAME(options) NAME(others) NAME(outside) NAME(pack_hook) NAME(place) NAME(places) NAME(plain) \
    NAME(profile) NAME(python_state) NAME(random) NAME(random_end) NAME(reach) NAME(region) NAME(requires_grad) NAME(requires_grad_) \
    NAME(run_in_python) NAME(running) NAME(script) NAME(since) NAME(sites) NAME(slots) NAME(steady) NAME(take_again) NAME(take_outside) \
    NAME(target) NAME(torch_random) NAME(trained) NAME(version) NAME(watch) NAME(watches) NAME(written) \
    NAME(calls_the_same) NAME(replay_in_python) NAME(arguments) NAME(drop_values) NAME(__dict__) NAME(_version) NAME(active_count)
NAMES(DECLARE_NAME)

/* What `configure_short` is given, by name. */
#define PARTS(PART) \
    PART(DUAL_LEVEL) PART(Frame) PART(Held) PART(KeepAll) PART(NEWS) PART(NO_DEVICES) PART(OBSERVERS) PART(ONLY_CPU) PART(RANDOM_MEMORY) PART(STOPPED) \
    PART(SteadyCall) PART(StopReplay) PART(TENSOR) PART(Tensor) PART(clock) PART(copy) PART(enter_at) PART(forget) PART(functorch_active) PART(give_others) \
    PART(hooks_allowed) \
    PART(is_grad_enabled) PART(is_write_to_leaf) PART(learn_rebound) PART(moved) PART(next_sequence_number) PART(pop_hooks) \
    PART(profiler_active) PART(push_hooks) PART(put_random) PART(set_grad_enabled) PART(state) PART(surroundings) PART(take_ambient) \
    PART(take_cpu) PART(take_random) PART(threading) PART(top_hooks) PART(unpack) PART(unpack_in_replay)
PARTS(DECLARE_PART)

static PyObject *no_arguments, *nothing; /* an empty tuple and an empty list */
static const char *random_memory; /* of the CPU generator; NULL if it is to be read in another way */
static Py_ssize_t random_size;


/* An object of a class, without anything in it. */
static PyObject *made(PyObject *class) { return ((PyTypeObject *)class)->tp_new((PyTypeObject *)class, no_arguments, NULL); }

/* Whether tensors require gradients as flags say; below zero with an error. */
static int require_as(PyObject *tensors, PyObject *flags) {
    if (!PyTuple_Check(flags) || PyTuple_GET_SIZE(flags) != PyList_GET_SIZE(tensors)) return 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(tensors); i++) {
        PyObject *tensor = PyList_GET_ITEM(tensors, i), *wanted = PyTuple_GET_ITEM(flags, i);
        int same = tensor == Py_None ? wanted == Py_False : is_this(GET(tensor, requires_grad), wanted);
        if (same != 1) return same;
    }
    return 1;
}

static PyObject *random_now(void) {
    if (random_memory == NULL || PyList_GET_SIZE(the_ONLY_CPU) == 0) return CALL(take_random);
    PyObject *bytes = PyBytes_FromStringAndSize(random_memory, random_size);
    if (bytes == NULL) return NULL;
    PyObject *taken = PyTuple_Pack(2, bytes, the_NO_DEVICES);
    Py_DECREF(bytes);
    return taken;
}

/* Whether somebody drew since; below zero with an error. */
static int has_moved(PyObject *since) {
    if (random_memory != NULL && PyList_GET_SIZE(the_ONLY_CPU) && PyTuple_GET_ITEM(since, 1) == the_NO_DEVICES &&
        memcmp(PyBytes_AS_STRING(PyTuple_GET_ITEM(since, 0)), random_memory, (size_t)random_size) == 0)
        return 0;
    return truth(CALL_ONE(moved, since));
}

/* ---- Steady, see _steady.py ---- */

typedef struct {
    PyObject_HEAD
    PyObject *args, *course, *kinds, *known, *modules, *objects, *options, *profile, *script, *sites, *watches;
} Steady;

#define EACH_FIELD(DO) DO(args) DO(course) DO(kinds) DO(known) DO(modules) DO(objects) DO(options) DO(profile) DO(script) DO(sites) DO(watches)

static int steady_traverse(PyObject *self, visitproc visit, void *arg) {
    Steady *steady = (Steady *)self;
#define VISIT(field) Py_VISIT(steady->field);
    EACH_FIELD(VISIT)
    return 0;
}

static int steady_clear(PyObject *self) {
    Steady *steady = (Steady *)self;
#define CLEAR(field) Py_CLEAR(steady->field);
    EACH_FIELD(CLEAR)
    return 0;
}

static void steady_dealloc(PyObject *self) {
    PyObject_GC_UnTrack(self);
    steady_clear(self);
    Py_TYPE(self)->tp_free(self);
}

#define MEMBER(field) {#field, T_OBJECT_EX, offsetof(Steady, field), 0, NULL},
static PyMemberDef steady_members[] = {EACH_FIELD(MEMBER){NULL, 0, 0, 0, NULL}};

/* Whether the arguments are tensors where they were, and otherwise the same values; below zero with an error. */
static int are_known(Steady *steady, PyObject *args) {
    if (PyTuple_GET_SIZE(args) != PyList_GET_SIZE(steady->args)) return 0;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args); i++) {
        PyObject *arg = PyTuple_GET_ITEM(args, i), *known = PyList_GET_ITEM(steady->args, i);
        if (known == the_TENSOR) {
            if ((PyObject *)Py_TYPE(arg) != the_Tensor) return 0;
        } else if (arg != known) {
            int same = Py_TYPE(arg) == Py_TYPE(known) ? PyObject_RichCompareBool(arg, known, Py_EQ) : 0;
            if (same != 1) return same;
        }
    }
    return 1;
}

enum { NO_HOOKS, DROPS, FORGETS };

/* Whether what autograd saves here can be dropped and made again, as hooks_work says, or need not be held, in a replay; below zero with an error. */
static int may_drop(void) {
    int may = truth(CALL(hooks_allowed));
    if (may == 1 && (may = truth(CALL(functorch_active))) >= 0) may = !may;
    if (may != 1) return may;
    PyObject *mine = GET(the_state, __dict__);
    if (mine == NULL) return -1;
    PyObject *depth = PyDict_GetItemWithError(mine, n_depth), *level = PyDict_GetItemWithError(mine, n_level), *keeps;
    PyObject *now = PyDict_GetItemWithError(PyTuple_GET_ITEM(the_DUAL_LEVEL, 0), PyTuple_GET_ITEM(the_DUAL_LEVEL, 1));
    may = depth != NULL && level != NULL && now != NULL && PyLong_AsLong(now) <= PyLong_AsLong(level) ? DROPS : NO_HOOKS;
    if (may == DROPS && PyLong_AsLong(depth) != 0)
        may = (keeps = PyDict_GetItemWithError(mine, n_keeps)) == Py_False ? FORGETS : NO_HOOKS;
    Py_DECREF(mine);
    return PyErr_Occurred() ? -1 : may;
}

/* Whether it is called what was called before, see Steady.calls_the_same; below zero with an error. */
static int calls_the_same(Steady *steady, PyObject *target) {
    if (steady->sites == Py_None) return is_this(GET(steady->profile, watch), PyTuple_GET_ITEM(PyList_GET_ITEM(steady->watches, 0), 0));
    if (steady->known != Py_None && PyLong_AsSsize_t(steady->kinds) == mutable_types()) {
        PyObject *known = strengthened(steady->known);
        Py_XDECREF(known);
        if (known == target) return 1;
    }
    return truth(PyObject_CallMethodOneArg((PyObject *)steady, n_calls_the_same, target));
}

/* Whether this call may go the short way, or in a replay need not be held, as far as that can be told without looking into modules; below zero with an error. */
static int goes_on(Steady *steady, PyObject *region, PyObject *target, PyObject *args) {
    Py_ssize_t left = number(GET(steady->profile, left));
    if (left == -1 && PyErr_Occurred()) return -1;
    if (left <= 0 || PyList_GET_SIZE(the_OBSERVERS)) return 0;
    int way = may_drop(), same = way;
    if (same > 0) same = is_this(GET(region, listener), Py_None);
    if (same == 1) same = is_this(GET(region, options), steady->options);
    if (same == 1) same = are_known(steady, args);
    if (same == 1) same = calls_the_same(steady, target);
    return same == 1 ? way : same;
}

/* What is in a module; None if there are news, NULL with an error. */
static PyObject *taken_of(PyObject *watch, PyObject *trainings, PyObject *unread) {
    PyObject *settled = GET(watch, _settled), *taken = NULL;
    if (settled == NULL) return NULL;
    if (is_settled_type(settled)) taken = read_settled(settled, trainings);
    Py_DECREF(settled);
    if (taken == NULL && PyErr_Occurred()) {
        if (!PyErr_ExceptionMatches(PyExc_RuntimeError)) return NULL;
        PyErr_Clear(); /* a tensor of inference mode */
        Py_RETURN_NONE;
    }
    if (taken == NULL || taken == Py_None) {
        Py_XDECREF(taken);
        return PyObject_CallMethodObjArgs(watch, n_take_again, trainings, unread, NULL);
    }
    PyObject *written = list_of(watch, n_written);
    if (written == NULL) goto failed;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(written); i++) {
        PyObject *tensors = PyTuple_GET_ITEM(taken, 0), *versions = PyTuple_GET_ITEM(taken, 1);
        Py_ssize_t place = PyLong_AsSsize_t(PyList_GET_ITEM(written, i));
        if (place < 0 || place >= PyList_GET_SIZE(tensors)) {
            if (!PyErr_Occurred()) PyErr_Format(PyExc_IndexError, "there is no tensor at place %zd", place);
            goto failed;
        }
        int needless = PySet_Contains(unread, PyList_GET_ITEM(written, i));
        if (needless < 0 || (needless && PyList_SetItem(versions, place, PyLong_FromLong(UNREAD)))) goto failed;
        if (needless) continue;
        PyObject *copy = CALL_ONE(copy, PyList_GET_ITEM(tensors, place));
        if (copy == NULL || PyList_SetItem(tensors, place, copy) || PyList_SetItem(versions, place, PyLong_FromLong(0))) goto failed;
    }
    Py_DECREF(written);
    return taken;
failed:
    Py_XDECREF(written);
    Py_DECREF(taken);
    return NULL;
}

/* Whether an object is of a type that code is known to read attributes of; below zero with an error. */
static int is_alike(PyObject *alike, PyObject *value) {
    PyObject *type = PyLong_FromVoidPtr(Py_TYPE(value));
    int known = type == NULL ? -1 : PyDict_Contains(alike, type);
    Py_XDECREF(type);
    return known;
}

/* Whether all that the code reads of these objects is known; below zero with an error. */
static int knows(PyObject *outside, PyObject *values) {
    PyObject *alike = GET(outside, _alike);
    if (alike == NULL || !PyDict_Check(alike)) {
        Py_XDECREF(alike);
        return alike == NULL ? -1 : 0;
    }
    int none = 1;
    for (Py_ssize_t i = 0; none == 1 && PyDict_GET_SIZE(alike) && i < PyList_GET_SIZE(values); i++)
        if ((none = is_alike(alike, PyList_GET_ITEM(values, i))) >= 0) none = !none;
    Py_DECREF(alike);
    return none ? none : truth(PyObject_CallMethodOneArg(outside, n_knows, values));
}

/* What is in the modules; None if there are news, or others of their tensors require gradients. */
static PyObject *take_modules(Steady *steady, PyObject *outside) {
    PyObject *trained = GET(steady->script, trained), *watches = PyList_New(0);
    Py_ssize_t count = PyList_GET_SIZE(steady->watches);
    int same = watches != NULL && trained != NULL ? PyTuple_Check(trained) && PyTuple_GET_SIZE(trained) == count : -1;
    for (Py_ssize_t i = 0; same == 1 && i < count; i++) {
        PyObject *entry = PyList_GET_ITEM(steady->watches, i), *watch = PyTuple_GET_ITEM(entry, 0);
        PyObject *taken = taken_of(watch, PyTuple_GET_ITEM(entry, 1), PyTuple_GET_ITEM(entry, 2)), *both = NULL;
        same = taken == NULL ? -1 : taken != Py_None;
        if (same == 1 && PyList_GET_SIZE(PyTuple_GET_ITEM(taken, 3))) same = knows(outside, PyTuple_GET_ITEM(taken, 3));
        if (same == 1) same = require_as(PyTuple_GET_ITEM(taken, 0), PyTuple_GET_ITEM(trained, i));
        if (same == 1 && ((both = PyTuple_Pack(2, watch, taken)) == NULL || PyList_Append(watches, both))) same = -1;
        Py_XDECREF(both);
        Py_XDECREF(taken);
    }
    Py_XDECREF(trained);
    if (same == 1) return watches;
    Py_XDECREF(watches);
    return same < 0 ? NULL : Py_NewRef(Py_None);
}

/* A frame as Frame.__init__ makes it. */
static PyObject *new_frame(PyObject *region) {
    PyObject *frame = made(the_Frame);
    if (frame == NULL) return NULL;
    if (SET(frame, region, region) || give(frame, n_calls, PyList_New(0)) || give(frame, n_held, PyList_New(0)) ||
        give(frame, n_inputs, PyDict_New()) || give(frame, n_slots, PyList_New(0)) || give(frame, n__around, CALL(top_hooks)))
        Py_CLEAR(frame);
    return frame;
}

/* What hooks around a region hold of an input. */
static PyObject *packed_around(PyObject *frame, PyObject *around, PyObject *tensor) {
    PyObject *pack = PyTuple_GET_ITEM(around, 0);
    if (!is_packing_type(pack)) return PyObject_CallMethodOneArg(frame, n__pack_around, tensor);
    int grad = truth(CALL(is_grad_enabled));
    if (grad < 0 || (grad && done(CALL_ONE(set_grad_enabled, Py_False)))) return NULL;
    PyObject *packed = pack_for_region_inside(pack, tensor), *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    if (grad && done(CALL_ONE(set_grad_enabled, Py_True))) Py_CLEAR(packed);
    if (type != NULL) PyErr_Restore(type, value, trace);
    return packed;
}

/* An input cut off from the graph that made it. */
static PyObject *cut_off(PyObject *tensor, int requires) {
    int leaf = truth(GET(tensor, is_leaf));
    if (leaf) return leaf < 0 ? NULL : Py_NewRef(tensor);
    PyObject *detached = PyObject_CallMethodNoArgs(tensor, n_detach);
    if (detached != NULL && requires) Py_SETREF(detached, PyObject_CallMethodNoArgs(detached, n_requires_grad_));
    return detached;
}

/* Frame.keep for one that has no member yet. */
static PyObject *kept_in(PyObject *frame, PyObject *tensor) {
    PyObject *inputs = GET(frame, inputs), *held = list_of(frame, n_held), *around = GET(frame, _around);
    PyObject *key = PyLong_FromVoidPtr(tensor), *stands = NULL, *version = NULL, *value = NULL, *entry = NULL;
    int direct = 0;
    if (inputs == NULL || held == NULL || around == NULL || key == NULL) goto end;
    PyObject *known = PyDict_GetItemWithError(inputs, key);
    if (known != NULL) stands = Py_NewRef(PyTuple_GET_ITEM(known, 1));
    if (known != NULL || PyErr_Occurred()) goto end;
    version = GET(tensor, _version);
    if (version == NULL && PyErr_ExceptionMatches(PyExc_RuntimeError)) {
        PyErr_Clear(); /* of inference mode: hooks are never given one */
        version = PyLong_FromLong(-1);
        direct = 1;
    }
    int requires = version == NULL ? -1 : truth(GET(tensor, requires_grad));
    if (requires < 0) goto end;
    if (direct) value = Py_NewRef(tensor);
    else value = around == Py_None ? cut_off(tensor, requires) : packed_around(frame, around, tensor);
    stands = value == NULL ? NULL : made(the_Held);
    if (stands == NULL) goto end;
    if (give(stands, n_index, PyLong_FromSsize_t(PyList_GET_SIZE(held))) ||
        give(stands, n_place, PyLong_FromSsize_t(PyDict_GET_SIZE(inputs))) || SET(stands, direct, direct ? Py_True : Py_False) ||
        SET(stands, copied, Py_False) || SET(stands, version, version) || SET(stands, requires_grad, requires ? Py_True : Py_False) ||
        (entry = PyTuple_Pack(2, tensor, stands)) == NULL || PyDict_SetItem(inputs, key, entry) || PyList_Append(held, value))
        Py_CLEAR(stands);
end:
    Py_XDECREF(inputs);
    Py_XDECREF(held);
    Py_XDECREF(around);
    Py_XDECREF(key);
    Py_XDECREF(version);
    Py_XDECREF(value);
    Py_XDECREF(entry);
    return stands;
}

/* The arguments, with what stands for tensors. */
static PyObject *stored(PyObject *frame, PyObject *args, int fresh) {
    PyObject *list = PyList_New(PyTuple_GET_SIZE(args));
    for (Py_ssize_t i = 0; list != NULL && i < PyTuple_GET_SIZE(args); i++) {
        PyObject *arg = PyTuple_GET_ITEM(args, i), *part;
        if ((PyObject *)Py_TYPE(arg) != the_Tensor) part = Py_NewRef(arg);
        else part = fresh ? kept_in(frame, arg) : PyObject_CallMethodOneArg(frame, n_keep, arg);
        if (part == NULL) Py_CLEAR(list);
        else PyList_SET_ITEM(list, i, part);
    }
    return list;
}

/* A call as SteadyCall.__init__ makes it, the next member of the frame. */
static PyObject *new_call(Steady *steady, PyObject *frame, PyObject *target, PyObject *args, PyObject *watches, int fresh) {
    int attention = truth(GET(steady->profile, attention));
    if (attention < 0) return NULL;
    PyObject *call = made(the_SteadyCall), *calls = list_of(frame, n_calls), *slots = list_of(frame, n_slots), *ambient;
    if (call == NULL || calls == NULL || slots == NULL) goto failed;
    if (give(call, n_args, stored(frame, args, fresh))) goto failed;
    ambient = surroundings_now(the_surroundings, attention);
    if (ambient == Py_None) Py_SETREF(ambient, CALL_ONE(take_ambient, attention ? Py_True : Py_False));
    if (give(call, n_ambient, ambient) || SET(call, profile, steady->profile) || SET(call, target, target) ||
        SET(call, watches, watches) || SET(call, script, Py_None) || SET(call, fixed, steady->sites == Py_None ? Py_True : Py_False) ||
        give(call, n_python_state, GET(steady->options, python_state)) ||
        give(call, n_first, PyLong_FromSsize_t(PyList_GET_SIZE(slots))) || PyList_Append(calls, call))
        goto failed;
    Py_DECREF(calls);
    Py_DECREF(slots);
    return call;
failed:
    Py_XDECREF(call);
    Py_XDECREF(calls);
    Py_XDECREF(slots);
    return NULL;
}

/* Frame.pack_hook, with what a function needs. */
static PyObject *pack_of(Steady *steady, PyObject *region, PyObject *frame) {
    PyObject *pack = NULL, *slots = NULL, *expected = NULL, *plain = NULL, *grads = NULL, *free = NULL, *sites = NULL;
    int all = is_this(GET(steady->options, first_saved), Py_None);
    if (all < 0) return NULL;
    if (!all) pack = PyObject_CallMethodNoArgs(frame, n_pack_hook);
    else if ((slots = list_of(frame, n_slots)) != NULL && (expected = GET(steady->profile, expected)) != NULL &&
             (plain = expected == Py_None ? Py_NewRef(nothing) : list_of(expected, n_plain)) != NULL &&
             (grads = expected == Py_None ? Py_NewRef(nothing) : list_of(expected, n_grads)) != NULL &&
             (free = GET(frame, _keep_free)) != NULL && (steady->sites == Py_None || (sites = list_of(frame, n_sites)) != NULL))
        pack = new_packing(slots, plain, grads, PyList_GET_SIZE(slots), frame, region, free, 1, sites);
    Py_XDECREF(slots);
    Py_XDECREF(expected);
    Py_XDECREF(plain);
    Py_XDECREF(grads);
    Py_XDECREF(free);
    if (pack != NULL && sites == NULL && steady->sites != Py_None) Py_SETREF(pack, PyObject_CallMethodOneArg(frame, n_note_sites, pack));
    Py_XDECREF(sites);
    if (pack != NULL && !is_packing_type(pack)) Py_SETREF(pack, PyObject_CallMethodOneArg(frame, n_mark, pack));
    return pack;
}

/* Set the time at which the outermost region was entered, if times count; what was there, NULL if they do not, or with an error. */
static PyObject *enter_since(PyObject *since) {
    PyObject *before = GET(the_state, since);
    if (before != NULL && SET(the_state, since, since)) Py_CLEAR(before);
    return before;
}

static int put_back_since(PyObject *before) {
    if (before == NULL) return 0;
    int failed = SET(the_state, since, before);
    Py_DECREF(before);
    return failed;
}

/* Call it under a pack hook; what it did to the thread is undone whatever comes of it. */
static PyObject *run_packing(PyObject *frame, PyObject *target, PyObject *args, PyObject *pack) {
    int counted = truth(GET(the_clock, now));
    if (counted < 0) return NULL;
    PyObject *since = counted ? CALL_ONE(enter_at, frame) : NULL;
    if (counted && since == NULL) return NULL;
    PyObject *before = counted ? enter_since(since) : NULL;
    Py_XDECREF(since);
    if (counted && before == NULL) return NULL;
    PyObject *hooks[] = {pack, the_unpack};
    int pushed = !done(PyObject_Vectorcall(the_push_hooks, hooks, 2, NULL)), failed = 0;
    PyObject *result = pushed ? PyObject_Call(target, args, NULL) : NULL, *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    if (type != NULL && done(PyObject_CallMethodNoArgs(frame, n_give_up))) failed = 1;
    if (pushed && done(CALL(pop_hooks))) failed = 1;
    failed = put_back_since(before) || failed;
    if (failed) Py_CLEAR(result);
    if (type != NULL) PyErr_Restore(type, value, trace);
    return result;
}

/* Note what is known of the random state by the end of a call. */
static int note_draws(PyObject *call, int may_draw, int crowded) {
    if (!may_draw) {
        PyObject *random = GET(call, random);
        int has = random == NULL ? -1 : has_moved(random);
        Py_XDECREF(random);
        return has < 0 ? -1 : has ? 0 : SET(call, draws, Py_False) || PyObject_DelAttr(call, n_random) ? -1 : 0;
    }
    Py_ssize_t threads = crowded ? 2 : number(PyObject_CallMethodNoArgs(the_threading, n_active_count));
    if (threads == -1 && PyErr_Occurred()) return -1;
    return threads > 1 ? give(call, n_random_end, CALL(take_cpu)) : 0;
}

/* Frame.leave_as; below zero with an error. */
static int leaves_as(Steady *steady, PyObject *frame, PyObject *call) {
    PyObject *slots = list_of(frame, n_slots), *plain = list_of(steady->script, n_plain), *inputs = GET(frame, inputs), *entry;
    Py_ssize_t first = number(GET(call, first)), at = 0;
    int same = slots == NULL || plain == NULL || inputs == NULL || (first == -1 && PyErr_Occurred()) ? -1 : 1;
    if (same == 1) same = PyList_GET_SIZE(slots) - first == PyList_GET_SIZE(plain);
    if (same == 1 && (same = truth(GET(frame, _strange))) >= 0) same = !same;
    while (same == 1 && PyDict_Next(inputs, &at, NULL, &entry)) {
        Py_ssize_t then = number(GET(PyTuple_GET_ITEM(entry, 1), version));
        long long now = -1;
        if (then == -1 && PyErr_Occurred()) same = -1;
        else if (then == -1) continue; /* of inference mode */
        else same = version_of(PyTuple_GET_ITEM(entry, 0), &now) ? -1 : now == then;
    }
    if (same == 1 && (give(frame, n_inputs, PyDict_New()) || SET(frame, running, Py_False) ||
                      give(call, n_ended_at, CALL(next_sequence_number)) || SET(call, script, steady->script)))
        same = -1;
    Py_XDECREF(slots);
    Py_XDECREF(plain);
    Py_XDECREF(inputs);
    return same;
}

/* Whether nothing of a module has changed since it was settled, and it was then as when it was taken; below zero with an error. */
static int is_settled_as(PyObject *watch, PyObject *taken) {
    PyObject *settled = GET(watch, _settled);
    if (settled == NULL) return -1;
    int same = 0;
    if (is_settled_type(settled)) {
        PyObject *written = list_of(watch, n_written);
        same = written == NULL ? -1 : settled_has_these(settled, taken, written);
        Py_XDECREF(written);
    }
    Py_DECREF(settled);
    return same;
}

/* Whether attributes of modules may be others than at the beginning of a call; below zero with an error. */
static int may_be_rebound(PyObject *watches) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(watches); i++) {
        PyObject *pair = PyList_GET_ITEM(watches, i);
        int same = is_settled_as(PyTuple_GET_ITEM(pair, 0), PyTuple_GET_ITEM(pair, 1));
        if (same != 1) return same < 0 ? -1 : 1;
    }
    return 0;
}

/* Call.note_object of what is called. */
static int note_object(Steady *steady, PyObject *call, PyObject *target) {
    PyObject *own = steady->known == Py_None ? NULL : PyObject_GenericGetDict(target, NULL), *entry = NULL, *objects = NULL;
    int failed = 0, noted = 0, wanted = own == NULL ? 0 : truth(GET(steady->options, python_state));
    if (wanted > 0 && PyDict_CheckExact(own) && PyDict_GET_SIZE(own)) {
        PyObject *values = PyDict_Values(own);
        entry = values == NULL ? NULL : PyTuple_Pack(2, own, values);
        objects = list_of(call, n_objects);
        noted = !(failed = entry == NULL || objects == NULL || PyList_Append(objects, entry));
        Py_XDECREF(values);
    }
    Py_XDECREF(own);
    Py_XDECREF(entry);
    Py_XDECREF(objects);
    if (own == NULL) PyErr_Clear();
    return failed || wanted < 0 ? -1 : noted ? 0 : done(PyObject_CallMethodOneArg(call, n_note_object, target));
}

/* Take everything down, run, and see whether it went as before. */
static PyObject *run_in_frame(Steady *steady, PyObject *region, PyObject *frame, PyObject *target, PyObject *args, PyObject *watches,
                              PyObject *outside, int fresh) {
    PyObject *call = new_call(steady, frame, target, args, watches, fresh), *pack = NULL, *result = NULL, *sites = NULL;
    int may_draw = call == NULL ? -1 : truth(GET(steady->profile, torch_random)), crowded = 0, same;
    if (may_draw < 0) goto end;
    if (outside != Py_None && SET(call, outside, outside)) goto end;
    if (steady->sites != Py_None &&
        (give(frame, n_sites, PyList_New(0)) || give(call, n_objects, PyList_New(0)) ||
         note_object(steady, call, target)))
        goto end;
    if (may_draw) {
        Py_ssize_t threads = number(PyObject_CallMethodNoArgs(the_threading, n_active_count));
        if (threads == -1) goto end;
        crowded = threads > 1;
    }
    if (give(call, n_random, random_now()) || SET(call, draws, Py_True)) goto end;
    pack = pack_of(steady, region, frame);
    result = pack == NULL ? NULL : run_packing(frame, target, args, pack);
    if (result == NULL || note_draws(call, may_draw, crowded)) goto failed;
    same = 1;
    if (steady->sites != Py_None && (sites = GET(frame, sites)) != NULL) same = PyObject_RichCompareBool(sites, steady->sites, Py_EQ);
    else if (steady->sites != Py_None) same = -1;
    if (same == 1) same = leaves_as(steady, frame, call);
    if (same < 0) goto failed;
    if (!same && (SET(steady->profile, steady, Py_None) || done(PyObject_CallMethodOneArg(frame, n_leave, call)))) goto failed;
    same = may_be_rebound(watches);
    if (same < 0 || (same && done(CALL_ONE(learn_rebound, call)))) goto failed;
    goto end;
failed:
    Py_CLEAR(result);
end:
    Py_XDECREF(call);
    Py_XDECREF(pack);
    Py_XDECREF(sites);
    return result;
}

/* Hand inputs of a region to the hooks around it, each once; below zero with an error. */
static int pack_all_around(PyObject *around, PyObject *args) {
    int failed = 0;
    for (Py_ssize_t i = 0; !failed && i < PyTuple_GET_SIZE(args); i++) {
        PyObject *tensor = PyTuple_GET_ITEM(args, i), *pack = PyTuple_GET_ITEM(around, 0);
        int needless = (PyObject *)Py_TYPE(tensor) != the_Tensor;
        for (Py_ssize_t before = 0; !needless && before < i; before++) needless = PyTuple_GET_ITEM(args, before) == tensor;
        if (!needless) needless = truth(PyObject_CallMethodNoArgs(tensor, n_is_inference)); /* see Frame.keep */
        if (needless == 0) failed = done(is_packing_type(pack) ? pack_for_region_inside(pack, tensor) : PyObject_CallOneArg(pack, tensor));
        else failed = needless < 0;
    }
    return failed ? -1 : 0;
}

/* _run_forgetting, see _region.py. */
static PyObject *run_forgetting(PyObject *target, PyObject *args) {
    PyObject *around = CALL(top_hooks), *result = NULL, *type, *value, *trace;
    if (around == NULL) return NULL;
    int grad = around == Py_None ? 0 : truth(CALL(is_grad_enabled)), failed = grad < 0;
    if (grad > 0) failed = done(CALL_ONE(set_grad_enabled, Py_False));
    if (!failed && around != Py_None) {
        failed = pack_all_around(around, args);
        PyErr_Fetch(&type, &value, &trace);
        if (grad > 0 && done(CALL_ONE(set_grad_enabled, Py_True))) failed = -1;
        if (type != NULL) PyErr_Restore(type, value, trace);
    }
    Py_DECREF(around);
    PyObject *hooks[] = {the_forget, the_unpack_in_replay};
    if (failed || done(PyObject_Vectorcall(the_push_hooks, hooks, 2, NULL))) return NULL;
    result = PyObject_Call(target, args, NULL);
    PyErr_Fetch(&type, &value, &trace);
    if (done(CALL(pop_hooks))) Py_CLEAR(result);
    if (type != NULL) PyErr_Restore(type, value, trace);
    return result;
}

/* What is read outside; None if there are news. */
static PyObject *take_outside(Steady *steady, PyObject *places) {
    PyObject *taken = NULL;
    if (PyList_GET_SIZE(places) == 0) return Py_NewRef(Py_None);
    if (PyLong_AsSsize_t(steady->kinds) == mutable_types()) taken = outside_again(places, steady->modules, steady->objects);
    if (taken == NULL && !PyErr_Occurred()) taken = PyObject_CallMethodNoArgs((PyObject *)steady, n_take_outside);
    return taken;
}

static PyObject *steady_run(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    Steady *steady = (Steady *)self;
    if (count < 3 || count > 4 || !PyTuple_Check(arguments[2])) return PyErr_Format(PyExc_TypeError, "run(region, target, args, frame=None)");
    PyObject *region = arguments[0], *target = arguments[1], *args = arguments[2], *given = count == 4 ? arguments[3] : Py_None;
    if (steady->course == NULL || steady->watches == NULL || the_NEWS == NULL || steady->course != Py_None)
        return PyObject_CallMethodObjArgs(self, n_run_in_python, region, target, args, given, NULL);
    Py_INCREF(self); /* a call that goes another way has its profile let go of it */
    PyObject *reached = GET(steady->profile, outside), *places = NULL, *outside = NULL, *watches = NULL, *frame = NULL, *members = NULL;
    PyObject *result = NULL;
    int same = reached == NULL ? -1 : goes_on(steady, region, target, args);
    if (same == FORGETS) {
        int copied = given == Py_None ? truth(GET(steady->profile, copied)) : 1;
        same = copied < 0 ? -1 : !copied;
        if (same == 1) result = run_forgetting(target, args);
        goto end;
    }
    if (same != 1) goto end;
    if ((places = list_of(reached, n_places)) == NULL) goto end;
    outside = take_outside(steady, places);
    if (outside == NULL || (same = !(PyList_GET_SIZE(places) && outside == Py_None)) == 0) goto end;
    watches = take_modules(steady, reached);
    if (watches == NULL || (same = watches != Py_None) == 0) goto end;
    Py_ssize_t left = number(GET(steady->profile, left));
    if ((left == -1 && PyErr_Occurred()) || give(steady->profile, n_left, PyLong_FromSsize_t(left - 1)) ||
        SET(region, profile, steady->profile))
        goto end;
    frame = given == Py_None ? new_frame(region) : Py_NewRef(given);
    members = frame == NULL ? NULL : list_of(frame, n_calls);
    if (members == NULL || (PyList_GET_SIZE(members) && done(PyObject_CallMethodNoArgs(frame, n_enter_again)))) goto end;
    result = run_in_frame(steady, region, frame, target, args, watches, outside, PyList_GET_SIZE(members) == 0);
end:
    if (same == 0 && !PyErr_Occurred()) result = Py_NewRef(the_NEWS);
    Py_XDECREF(reached);
    Py_XDECREF(places);
    Py_XDECREF(outside);
    Py_XDECREF(watches);
    Py_XDECREF(frame);
    Py_XDECREF(members);
    Py_DECREF(self);
    return result;
}

static PyMethodDef steady_methods[] = {
    {"run", (PyCFunction)(void (*)(void))steady_run, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject SteadyType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "lowtide.engine._native.Steady",
    .tp_basicsize = sizeof(Steady),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE,
    .tp_doc = "The fields of lowtide.engine._steady.Steady, and how such calls run.",
    .tp_traverse = steady_traverse,
    .tp_clear = steady_clear,
    .tp_dealloc = steady_dealloc,
    .tp_members = steady_members,
    .tp_methods = steady_methods,
    .tp_new = PyType_GenericNew,
};

/* ---- replays, see SteadyCall.replay_in_python ---- */

/* Whether modules have in them what they had; below zero with an error. */
static int are_in_place(PyObject *call, PyObject *watches, PyObject *trained) {
    if (!PyTuple_Check(trained) || PyTuple_GET_SIZE(trained) != PyList_GET_SIZE(watches)) return 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(watches); i++) {
        PyObject *pair = PyList_GET_ITEM(watches, i), *watch = PyTuple_GET_ITEM(pair, 0), *taken = PyTuple_GET_ITEM(pair, 1);
        int same = is_settled_as(watch, taken);
        if (!same) {
            PyObject *attributes = GET(call, python_state);
            PyObject *values[] = {watch, taken, attributes};
            static PyObject *keyword;
            if (keyword == NULL && (keyword = Py_BuildValue("(s)", "attributes")) == NULL) return -1;
            same = attributes == NULL ? -1 : truth(PyObject_VectorcallMethod(n_is_as, values, 2, keyword));
            Py_XDECREF(attributes);
        }
        if (same != 1) return same;
        PyObject *written = list_of(watch, n_written);
        Py_ssize_t buffers = written == NULL ? -1 : number(GET(watch, _buffer_count)), copied = written == NULL ? 0 : PyList_GET_SIZE(written);
        if (buffers > 0) { /* Watch.has_still_buffers */
            int still = copied < buffers || PyLong_AsSsize_t(PyList_GET_ITEM(written, buffers - 1)) >= buffers;
            if (still) same = is_surely_unmodified(taken);
        } else if (buffers < 0) same = -1;
        Py_XDECREF(written);
        if (same == 1) same = require_as(PyTuple_GET_ITEM(taken, 0), PyTuple_GET_ITEM(trained, i));
        if (same != 1) return same;
    }
    return 1;
}

/* Whether an attribute holds nothing; below zero with an error. */
static int is_without(PyObject *object, PyObject *name) {
    int there = truth(PyObject_GetAttr(object, name));
    return there < 0 ? -1 : !there;
}

/* Whether nobody looks on, and this thread is in no replay around this one; below zero with an error. */
static int is_alone(void) {
    if (PyList_GET_SIZE(the_OBSERVERS)) return 0;
    PyObject *mine = GET(the_state, __dict__);
    if (mine == NULL) return -1;
    PyObject *depth = PyDict_GetItemWithError(mine, n_depth), *finder = PyDict_GetItemWithError(mine, n_finder);
    int alone = depth != NULL && finder == Py_None && PyLong_AsLong(depth) <= 1;
    Py_DECREF(mine);
    if (alone) alone = truth(CALL(profiler_active)) == 0;
    return PyErr_Occurred() ? -1 : alone;
}

/* SteadyCall.finds_the_same; below zero with an error. */
static int finds_the_same(PyObject *call) {
    PyObject *outside = GET(call, outside), *objects = outside == NULL ? NULL : GET(call, objects);
    int some = objects == NULL ? -1 : PyObject_IsTrue(outside), same = some > 0 ? outside_is_as(outside) : some < 0 ? -1 : 1;
    if (same == 1) same = (some = PyObject_IsTrue(objects)) > 0 ? objects_are_as(objects) : some < 0 ? -1 : 1;
    Py_XDECREF(outside);
    Py_XDECREF(objects);
    return same == 0 ? truth(PyObject_CallMethodNoArgs(call, n_finds_the_same)) : same;
}

/* SteadyCall.is_known_in_python; below zero with an error. */
static int is_known(PyObject *call, PyObject *frame, PyObject *script) {
    int plain = script == Py_None ? 0 : is_this(GET(frame, hashes), Py_None);
    if (plain == 1) plain = is_this(GET(call, random_end), Py_None);
    if (plain != 1) return plain;
    PyObject *watches = list_of(call, n_watches), *trained = GET(script, trained), *profile = GET(call, profile), *ambient = NULL;
    int same = watches == NULL || trained == NULL || profile == NULL ? -1 : are_in_place(call, watches, trained);
    if (same == 1) same = is_alone();
    if (same == 1) same = is_without(frame, n_running);
    if (same == 1) same = is_without(profile, n_differentiates);
    if (same == 1) same = finds_the_same(call);
    if (same == 1) same = (ambient = GET(call, ambient)) == NULL ? -1 : surroundings_are_so(the_surroundings, ambient);
    Py_XDECREF(watches);
    Py_XDECREF(trained);
    Py_XDECREF(profile);
    Py_XDECREF(ambient);
    return same;
}

/* The only argument of a call, if it is a tensor that is there as it was; NULL without an error if it takes more to have it. */
static PyObject *only_argument(PyObject *call, PyObject *frame) {
    PyObject *args = GET(call, args), *held = list_of(frame, n_held), *around = GET(frame, _around), *tensor = NULL;
    int same = args == NULL || held == NULL || around == NULL ? -1 : 1;
    if (same == 1) same = PyList_Check(args) && PyList_GET_SIZE(args) == 1 && (PyObject *)Py_TYPE(PyList_GET_ITEM(args, 0)) == the_Held;
    PyObject *stands = same == 1 ? PyList_GET_ITEM(args, 0) : NULL;
    if (same == 1 && around != Py_None) {
        Py_ssize_t index = number(GET(stands, index));
        same = is_without(stands, n_direct) == 1 && PyTuple_Check(around) && PyTuple_GET_ITEM(around, 1) == the_unpack;
        if (same && (same = index >= 0 && index < PyList_GET_SIZE(held))) {
            Py_ssize_t unused;
            PyObject *owner;
            same = is_gone_slot(PyList_GET_ITEM(held, index), &unused, &owner) == 0;
        }
        PyObject *requires = same ? GET(stands, requires_grad) : NULL;
        PyObject *kept = requires == NULL ? NULL : unpack_held(PyList_GET_ITEM(held, index));
        if (kept != NULL && is_this(GET(kept, requires_grad), requires) == 1) tensor = Py_NewRef(kept);
        Py_XDECREF(requires);
        Py_XDECREF(kept);
    } else if (same == 1) {
        Py_ssize_t index = number(GET(stands, index));
        same = is_without(stands, n_copied);
        if (same == 1 && index >= 0 && index < PyList_GET_SIZE(held)) {
            PyObject *kept = PyList_GET_ITEM(held, index), *version = GET(stands, version), *requires = GET(stands, requires_grad);
            long long now = -1, then = version == NULL ? -1 : PyLong_AsLongLong(version);
            if (requires != NULL && then >= 0 && version_of(kept, &now) == 0 && now == then && is_this(GET(kept, requires_grad), requires) == 1)
                tensor = Py_NewRef(kept);
            Py_XDECREF(version);
            Py_XDECREF(requires);
        }
    }
    Py_XDECREF(args);
    Py_XDECREF(held);
    Py_XDECREF(around);
    return tensor;
}

/* What to call, and with what. */
static int find_arguments(PyObject *call, PyObject *frame, PyObject **target, PyObject **args) {
    PyObject *tensor = only_argument(call, frame);
    if (tensor == NULL && PyErr_Occurred()) {
        if (!PyErr_ExceptionMatches(PyExc_RuntimeError)) return -1;
        PyErr_Clear();
    }
    if (tensor != NULL) {
        *args = PyTuple_Pack(1, tensor);
        Py_DECREF(tensor);
        *target = *args == NULL ? NULL : GET(call, target);
    } else {
        PyObject *all = PyObject_CallMethodObjArgs(call, n_arguments, frame, nothing, NULL);
        if (all == NULL) return -1;
        *target = Py_NewRef(PyTuple_GET_ITEM(all, 0));
        *args = PySequence_Tuple(PyTuple_GET_ITEM(all, 1));
        Py_DECREF(all);
    }
    return *target == NULL || *args == NULL ? -1 : 0;
}

/* Have copies of what the call writes to in place, and add what was there to a list, also of those before one that failed. */
static int lend_all(PyObject *call, PyObject *lent) {
    PyObject *watches = list_of(call, n_watches);
    int failed = watches == NULL;
    for (Py_ssize_t i = 0; !failed && i < PyList_GET_SIZE(watches); i++) {
        PyObject *pair = PyList_GET_ITEM(watches, i), *written = list_of(PyTuple_GET_ITEM(pair, 0), n_written), *more = NULL;
        failed = written == NULL;
        if (!failed && PyList_GET_SIZE(written)) {
            more = PyObject_CallMethodOneArg(PyTuple_GET_ITEM(pair, 0), n_lend, PyTuple_GET_ITEM(pair, 1));
            failed = more == NULL || PyList_SetSlice(lent, PyList_GET_SIZE(lent), PyList_GET_SIZE(lent), more);
        }
        Py_XDECREF(written);
        Py_XDECREF(more);
    }
    Py_XDECREF(watches);
    return failed ? -1 : 0;
}

static int put_back_lent(PyObject *lent) {
    int failed = 0;
    for (Py_ssize_t i = PyList_GET_SIZE(lent) - 1; i >= 0; i--) { /* one module may be part of another */
        PyObject *entry = PyList_GET_ITEM(lent, i);
        if (PyObject_SetItem(PyTuple_GET_ITEM(entry, 0), PyTuple_GET_ITEM(entry, 1), PyTuple_GET_ITEM(entry, 2))) failed = -1;
    }
    Py_DECREF(lent);
    return failed;
}

/* In the context of its forward. */
static PyObject *call_in_context(PyObject *call, PyObject *target, PyObject *args) {
    PyObject *ambient = GET(call, ambient);
    PyObject *context = ambient == NULL ? NULL : PyContext_Copy(PyTuple_GET_ITEM(ambient, 0)), *result = NULL;
    Py_XDECREF(ambient);
    if (context == NULL || PyContext_Enter(context)) {
        Py_XDECREF(context);
        return NULL;
    }
    result = PyObject_Call(target, args, NULL);
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    if (PyContext_Exit(context)) Py_CLEAR(result);
    if (type != NULL) PyErr_Restore(type, value, trace);
    Py_DECREF(context);
    return result;
}

/* SteadyCall.run_again: what it did to the thread is undone whatever comes of it. */
static PyObject *run_again(PyObject *call, PyObject *target, PyObject *args, PyObject *pack, PyObject *since) {
    PyObject *random = NULL, *then = NULL, *lent = NULL, *before = NULL, *result = NULL;
    int failed = 0, pushed = 0, grad = -1, draws = truth(GET(call, draws)), counted = draws < 0 ? -1 : truth(GET(the_clock, now));
    if (counted < 0 || (counted && (before = enter_since(since)) == NULL) || (grad = truth(CALL(is_grad_enabled))) < 0) goto end;
    if (draws && ((random = random_now()) == NULL || (then = GET(call, random)) == NULL || done(CALL_ONE(put_random, then)))) goto end;
    if ((lent = PyList_New(0)) == NULL || lend_all(call, lent) || done(CALL_ONE(set_grad_enabled, Py_True))) goto end;
    PyObject *hooks[] = {pack, the_unpack_in_replay};
    if (done(PyObject_Vectorcall(the_push_hooks, hooks, 2, NULL))) goto end;
    pushed = 1;
    result = call_in_context(call, target, args);
    if (result == NULL && (PyErr_ExceptionMatches(the_StopReplay) || PyErr_ExceptionMatches(the_KeepAll))) {
        PyErr_Clear();
        result = Py_NewRef(the_STOPPED);
    }
end:;
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    if (pushed && done(CALL(pop_hooks))) failed = -1;
    if (grad >= 0 && done(CALL_ONE(set_grad_enabled, grad ? Py_True : Py_False))) failed = -1;
    if (lent != NULL && put_back_lent(lent)) failed = -1;
    if (random != NULL && done(CALL_ONE(put_random, random))) failed = -1;
    if (put_back_since(before)) failed = -1;
    Py_XDECREF(random);
    Py_XDECREF(then);
    if (failed) Py_CLEAR(result);
    if (type != NULL) PyErr_Restore(type, value, trace);
    return result;
}

/* Whether the error that there is is autograd's, for a write in place to a leaf: then it is cleared. */
static int was_write_to_leaf(void) {
    if (!PyErr_ExceptionMatches(PyExc_RuntimeError)) return 0;
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    int writes = truth(CALL_ONE(is_write_to_leaf, value));
    if (writes == 0) {
        PyErr_Restore(type, value, trace);
        return 0;
    }
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
    return writes > 0;
}

/* The number at a place in a list of the script; -1 with an error. */
static Py_ssize_t number_at(PyObject *script, PyObject *name, Py_ssize_t place) {
    PyObject *list = list_of(script, name), *value = list == NULL ? NULL : PyList_GetItem(list, place);
    Py_ssize_t found = value == NULL ? -1 : PyLong_AsSsize_t(value);
    Py_XDECREF(list);
    return found;
}

/* Fill the slots that are wanted; 1, 0 if it does something else by now, below zero with an error. */
static int replay(PyObject *call, PyObject *frame, PyObject *wanted, PyObject *script) {
    PyObject *slots = list_of(frame, n_slots), *options = NULL, *region = NULL, *watches = NULL, *target = NULL, *args = NULL, *pack = NULL;
    PyObject *since = NULL, *result = NULL;
    Py_ssize_t index = number(GET(wanted, index)), last, stop = PY_SSIZE_T_MAX;
    int fine = -1, early, others = is_without(script, n_others);
    if (slots == NULL || index < 0 || others < 0) goto end;
    if (!others) {
        PyObject *places = GET(script, others);
        PyObject *arguments[] = {frame, places};
        if (places == NULL || done(PyObject_Vectorcall(the_give_others, arguments, 2, NULL))) {
            Py_XDECREF(places);
            goto end;
        }
        Py_DECREF(places);
    }
    last = number_at(script, n_reach, index);
    if (last < 0 || (last = last_wanted_in(slots, index, last)) < 0) goto end;
    if ((region = GET(frame, region)) == NULL || (options = GET(region, options)) == NULL || (early = truth(GET(options, early_stop))) < 0) goto end;
    if (early && (stop = number_at(script, n_end, last)) < 0) goto end;
    if (find_arguments(call, frame, &target, &args) || (pack = new_filling(slots, last, stop)) == NULL) goto end;
    if ((since = GET(frame, since)) == NULL) goto end;
    result = run_again(call, target, args, pack, since);
    fine = result != NULL ? 1 : was_write_to_leaf() ? 0 : -1;
    if (fine == 1) {
        Py_ssize_t reached = filling_reached(pack);
        fine = reached == stop || reached + 1 == PyList_GET_SIZE(slots);
    }
    if (fine == 1) fine = (watches = list_of(call, n_watches)) == NULL ? -1 : are_surely_unmodified(watches);
    if (fine == 0 && done(PyObject_CallMethodNoArgs(frame, n_drop_values))) fine = -1;
end:
    Py_XDECREF(slots);
    Py_XDECREF(options);
    Py_XDECREF(region);
    Py_XDECREF(watches);
    Py_XDECREF(target);
    Py_XDECREF(args);
    Py_XDECREF(pack);
    Py_XDECREF(since);
    Py_XDECREF(result);
    return fine;
}

int is_steady_type(PyObject *call) { return (PyObject *)Py_TYPE(call) == the_SteadyCall; }

int replay_steady(PyObject *call, PyObject *frame, PyObject *wanted) {
    PyObject *calls = list_of(frame, n_calls), *script = NULL;
    int one = calls == NULL ? -1 : the_NEWS != NULL && PyList_GET_SIZE(calls) == 1;
    Py_XDECREF(calls);
    if (one == 1) one = is_this(GET(call, kept), Py_None);
    if (one < 0) return -1;
    if (!one) return truth(PyObject_CallMethodObjArgs(call, n_replay_in_python, frame, wanted, NULL));
    if ((script = GET(call, script)) == NULL) return -1;
    int fine = is_known(call, frame, script);
    if (fine == 1) fine = replay(call, frame, wanted, script);
    Py_DECREF(script);
    return fine;
}

static PyObject *short_replay(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    if (count != 2) return PyErr_Format(PyExc_TypeError, "replay(frame, wanted)");
    int fine = replay_steady(self, arguments[0], arguments[1]);
    return fine < 0 ? NULL : PyBool_FromLong(fine);
}

static PyObject *short_is_known(PyObject *self, PyObject *frame) {
    PyObject *script = the_NEWS == NULL ? PyErr_Format(PyExc_TypeError, "configure_short() has to be called first") : GET(self, script);
    if (script == NULL) return NULL;
    int known = is_known(self, frame, script);
    Py_DECREF(script);
    return known < 0 ? NULL : PyBool_FromLong(known);
}

static PyObject *short_run_again(PyObject *self, PyObject *const *arguments, Py_ssize_t count) {
    if (count != 4 || the_NEWS == NULL) return PyErr_Format(PyExc_TypeError, "run_again(target, args, pack, since)");
    PyObject *args = PySequence_Tuple(arguments[1]);
    PyObject *result = args == NULL ? NULL : run_again(self, arguments[0], args, arguments[2], arguments[3]);
    Py_XDECREF(args);
    return result;
}

static PyMethodDef call_methods[] = {
    {"is_known", short_is_known, METH_O, NULL},
    {"run_again", (PyCFunction)(void (*)(void))short_run_again, METH_FASTCALL, NULL},
    {"replay", (PyCFunction)(void (*)(void))short_replay, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static PyTypeObject CallType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "lowtide.engine._native.Replayed",
    .tp_basicsize = sizeof(PyObject),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .tp_doc = "How calls that went the short way are replayed.",
    .tp_methods = call_methods,
    .tp_new = PyType_GenericNew,
};

/* Note the parts of lowtide and torch that all of this uses. */
static PyObject *configure_short(PyObject *module, PyObject *parts) {
    struct part all[] = {PARTS(PART_ENTRY)};
    if (note_parts(parts, all, sizeof(all) / sizeof(all[0]))) return NULL;
    if (!PyList_Check(the_OBSERVERS) || !PyList_Check(the_ONLY_CPU) || !PyTuple_Check(the_DUAL_LEVEL)) return PyErr_Format(PyExc_TypeError, "observers are in a list");
    random_memory = NULL;
    if (the_RANDOM_MEMORY != Py_None) {
        unsigned long long address;
        if (!PyArg_ParseTuple(the_RANDOM_MEMORY, "Kn", &address, &random_size)) return NULL;
        random_memory = (const char *)(uintptr_t)address;
    }
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"configure_short", configure_short, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

int add_short(PyObject *module) {
    NAMES(INTERN)
    if ((no_arguments = PyTuple_New(0)) == NULL || (nothing = PyList_New(0)) == NULL) return -1;
    if (PyType_Ready(&SteadyType) || PyType_Ready(&CallType) || PyModule_AddFunctions(module, functions)) return -1;
    if (PyModule_AddObjectRef(module, "Steady", (PyObject *)&SteadyType)) return -1;
    return PyModule_AddObjectRef(module, "Replayed", (PyObject *)&CallType);
}
