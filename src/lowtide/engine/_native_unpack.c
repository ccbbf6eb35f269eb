/* What comes between autograd asking for a tensor and the replay of the call that saved it, see _unpack.py and _replay.py.
 *
 * Only for calls that went the short way, in a backward that has replayed something before, where no other thread replays the same call;
 * regions around them, whose replays they need first, have to be so, too. The twins in Python, from `_replay_for` on, do all the rest.
 */

#include "_native.h"
#include <time.h>

#define NAMES(NAME) \
    NAME(_around) NAME(__dict__) NAME(broken) NAME(calls) NAME(depth) NAME(frames) NAME(held) NAME(joined) NAME(last) NAME(level) NAME(listener) \
    NAME(recent) NAME(region) NAME(replay_s) NAME(slots) NAME(split) NAME(task)
NAMES(DECLARE_NAME)

#define PARTS(PART) \
    PART(CLAIMED) PART(OBSERVERS) PART(WAITING) PART(DUAL_LEVEL) PART(fail) PART(graph_task_id) PART(release) PART(replay_all) PART(seconds) \
    PART(state) PART(thread)
PARTS(DECLARE_PART)

static double now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* The call that a frame is of, if it can be replayed from here; NULL without an error if not. */
static PyObject *call_of(PyObject *frame) {
    if (PyList_GET_SIZE(the_OBSERVERS)) return NULL;
    int plain = truth(GET(frame, broken));
    if (plain >= 0) plain = !plain;
    if (plain == 1) {
        PyObject *region = GET(frame, region);
        plain = region == NULL ? -1 : is_this(GET(region, listener), Py_None);
        Py_XDECREF(region);
    }
    PyObject *calls = plain == 1 ? list_of(frame, n_calls) : NULL, *call = NULL;
    if (calls != NULL && PyList_GET_SIZE(calls) && is_steady_type(PyList_GET_ITEM(calls, 0))) call = Py_NewRef(PyList_GET_ITEM(calls, 0));
    Py_XDECREF(calls);
    return call;
}

/* Let go of what backward has had of the frame that was replayed before. */
static int drop_before(PyObject *before, PyObject *this) {
    if (before == Py_None || before == this || !PyWeakref_Check(before)) return 0;
    PyObject *last = PyObject_CallNoArgs(before), *slots = NULL;
    int failed = last == NULL;
    if (!failed && last != Py_None) failed = (slots = list_of(last, n_slots)) == NULL || drop_values_in(slots, 1);
    Py_XDECREF(last);
    Py_XDECREF(slots);
    return failed ? -1 : 0;
}

/* _note, in a backward that has begun and keeps nothing for later: 1, 0 if it is another, below zero with an error. */
static int note(PyObject *frame, Py_ssize_t task) {
    PyObject *recent = GET(the_thread, recent), *this = NULL, *before = NULL, *frames = NULL;
    int fine = recent == NULL ? -1 : number(GET(recent, task)) == task && !PyErr_Occurred();
    if (fine == 1 && (fine = truth(GET(recent, split))) >= 0) fine = !fine;
    if (fine == 1) {
        this = PyWeakref_NewRef(frame, NULL);
        before = GET(recent, last);
        frames = list_of(recent, n_frames);
        if (this == NULL || before == NULL || frames == NULL || drop_before(before, this) || PyList_Append(frames, this) ||
            SET(recent, last, this))
            fine = -1;
    }
    Py_XDECREF(recent);
    Py_XDECREF(this);
    Py_XDECREF(before);
    Py_XDECREF(frames);
    return PyErr_Occurred() ? -1 : fine;
}

/* Have the error that there is raised as a replay tells it. */
static void tell_error(PyObject *frame) {
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    PyErr_NormalizeException(&type, &value, &trace);
    if (trace != NULL) PyException_SetTraceback(value, trace);
    PyObject *arguments[] = {frame, value};
    PyObject *result = PyObject_Vectorcall(the_fail, arguments, 2, NULL);
    if (result != NULL) { /* it raises */
        Py_DECREF(result);
        PyErr_SetString(PyExc_SystemError, "an error of a replay was lost");
    }
    Py_XDECREF(type);
    Py_XDECREF(value);
    Py_XDECREF(trace);
}

/* Add to a number of seconds in a list or an attribute. */
static int count_seconds(PyObject *frame, double spent, int outermost) {
    PyObject *region = GET(frame, region), *before = region == NULL ? NULL : GET(region, replay_s);
    int failed = before == NULL || give(region, n_replay_s, PyFloat_FromDouble(PyFloat_AsDouble(before) + spent));
    Py_XDECREF(region);
    Py_XDECREF(before);
    if (!failed && outermost) {
        PyObject *all = PyFloat_FromDouble(PyFloat_AsDouble(PyList_GET_ITEM(the_seconds, 0)) + spent);
        failed = all == NULL || PyList_SetItem(the_seconds, 0, all);
    }
    return failed ? -1 : 0;
}

/* replay() of a call that went the short way; below zero with an error. */
static int replay_counted(PyObject *call, PyObject *frame, PyObject *slot) {
    PyObject *mine = GET(the_state, __dict__), *now = Py_XNewRef(PyDict_GetItemWithError(PyTuple_GET_ITEM(the_DUAL_LEVEL, 0), PyTuple_GET_ITEM(the_DUAL_LEVEL, 1))),
             *deeper = NULL, *depth = NULL, *level = NULL;
    int failed = -1, entered = 0;
    double started = now_s();
    if (mine == NULL || now == NULL) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_KeyError, "_current_level");
        goto end;
    }
    depth = Py_XNewRef(PyDict_GetItemWithError(mine, n_depth));
    level = Py_XNewRef(PyDict_GetItemWithError(mine, n_level));
    if (depth == NULL || level == NULL) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_KeyError, "depth");
        goto end;
    }
    deeper = PyLong_FromLong(PyLong_AsLong(depth) + 1);
    if (deeper == NULL || PyDict_SetItem(mine, n_depth, deeper) || PyDict_SetItem(mine, n_level, now)) goto end;
    entered = 1;
    failed = replay_steady(call, frame, slot);
    if (failed == 0) {
        PyObject *arguments[] = {frame, slot};
        failed = done(PyObject_Vectorcall(the_replay_all, arguments, 2, NULL));
    } else if (failed > 0) failed = 0;
    if (failed) tell_error(frame);
end:;
    PyObject *type, *value, *trace;
    PyErr_Fetch(&type, &value, &trace);
    if (entered) {
        int outermost = PyLong_AsLong(depth) == 0;
        PyObject *joined = outermost ? PyDict_GetItemWithError(mine, n_joined) : NULL;
        if (PyDict_SetItem(mine, n_depth, depth) || PyDict_SetItem(mine, n_level, level)) failed = -1;
        if (count_seconds(frame, now_s() - started, outermost)) failed = -1;
        if (joined != NULL && PyDict_Check(joined)) PyDict_Clear(joined);
    }
    Py_XDECREF(mine);
    Py_XDECREF(now);
    Py_XDECREF(deeper);
    Py_XDECREF(depth);
    Py_XDECREF(level);
    if (type != NULL) PyErr_Restore(type, value, trace);
    return failed;
}

/* Let other threads have a frame. */
static int release(PyObject *number_of_frame, PyObject *thread) {
    PyObject *type, *value, *trace, *arguments[] = {number_of_frame, thread};
    PyErr_Fetch(&type, &value, &trace);
    int failed = PyList_GET_SIZE(the_WAITING) ? done(PyObject_Vectorcall(the_release, arguments, 2, NULL))
                                               : PyDict_DelItem(the_CLAIMED, number_of_frame);
    if (type != NULL) PyErr_Restore(type, value, trace);
    return failed;
}

static int fill_in(PyObject *slot, PyObject *frame, Py_ssize_t task);

/* Have the inputs of a frame that hooks around it hold, and that are gone, made again first, as `_chain` says: 1, 0, below zero with an error. */
static int fill_inputs(PyObject *frame, Py_ssize_t task) {
    int fine = is_this(GET(frame, _around), Py_None);
    if (fine) return fine;
    PyObject *held = list_of(frame, n_held), *last = NULL, *around = NULL;
    Py_ssize_t place = -1;
    fine = held == NULL ? -1 : 1;
    for (Py_ssize_t i = 0; fine == 1 && i < PyList_GET_SIZE(held); i++) {
        Py_ssize_t index;
        PyObject *owner;
        int is_gone = is_gone_slot(PyList_GET_ITEM(held, i), &index, &owner);
        if (is_gone < 0) fine = 0;
        if (is_gone <= 0 || (last != NULL && index <= place)) continue;
        Py_XSETREF(last, Py_NewRef(PyList_GET_ITEM(held, i)));
        Py_XSETREF(around, Py_NewRef(owner));
        place = index;
    }
    if (fine == 1 && last != NULL) fine = Py_EnterRecursiveCall(" in the replay of a nested region") ? -1 : 1;
    if (fine == 1 && last != NULL) {
        fine = fill_in(last, around, task);
        Py_LeaveRecursiveCall();
    }
    Py_XDECREF(held);
    Py_XDECREF(last);
    Py_XDECREF(around);
    return fine;
}

int fill_slot(PyObject *slot, PyObject *frame) {
    if (the_state == NULL) return 0;
    Py_ssize_t task = number(CALL(graph_task_id));
    if (task < 0) return PyErr_Occurred() ? -1 : 0;
    return fill_in(slot, frame, task);
}

static int fill_in(PyObject *slot, PyObject *frame, Py_ssize_t task) {
    PyObject *call = call_of(frame), *key = NULL, *thread = NULL;
    int fine = call != NULL;
    if (fine && (fine = fill_inputs(frame, task)) == 1) {
        PyObject *unused;
        Py_ssize_t place;
        if (is_gone_slot(slot, &place, &unused) == 0) { /* a replay around it went through it */
            Py_DECREF(call);
            return 1;
        }
    }
    if (fine == 1 && ((key = PyLong_FromVoidPtr(frame)) == NULL || (thread = PyLong_FromUnsignedLong(PyThread_get_thread_ident())) == NULL))
        fine = -1;
    int claimed = fine == 1 ? PyDict_Contains(the_CLAIMED, key) : 0;
    if (fine == 1) fine = claimed < 0 ? -1 : !claimed;
    if (fine == 1) fine = note(frame, task);
    if (fine == 1) { /* nobody else ran since it was looked whether somebody has claimed it, or it would have been for tensors that went */
        PyObject *now = PyDict_SetDefault(the_CLAIMED, key, thread);
        fine = now == NULL ? -1 : now == thread;
    }
    if (fine == 1) {
        Py_INCREF(frame);
        if (replay_counted(call, frame, slot)) fine = -1;
        if (release(key, thread)) fine = -1;
        Py_DECREF(frame);
    }
    Py_XDECREF(call);
    Py_XDECREF(key);
    Py_XDECREF(thread);
    return PyErr_Occurred() ? -1 : fine;
}

/* Note the parts of lowtide and torch that all of this uses. */
static PyObject *configure_unpack(PyObject *module, PyObject *parts) {
    struct part all[] = {PARTS(PART_ENTRY)};
    if (note_parts(parts, all, sizeof(all) / sizeof(all[0]))) return NULL;
    if (!PyDict_Check(the_CLAIMED) || !PyList_Check(the_OBSERVERS) || !PyList_Check(the_WAITING) || !PyList_Check(the_seconds))
        return PyErr_Format(PyExc_TypeError, "claims are in a dict; who waits, who looks on, and the seconds in lists");
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"configure_unpack", configure_unpack, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

int add_unpack(PyObject *module) {
    NAMES(INTERN)
    return PyModule_AddFunctions(module, functions);
}
