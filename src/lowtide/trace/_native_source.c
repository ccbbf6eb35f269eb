/* What is asked now and then about an op: the user's line that runs, and whether autograd would have added in place. */

#include "_native.h"

static PyObject *are_users; /* by name of a file */

static int is_of_user(PyObject *filename) {
    if (are_users == NULL && (are_users = PyDict_New()) == NULL) return -1;
    PyObject *known = PyDict_GetItemWithError(are_users, filename);
    if (known != NULL || PyErr_Occurred()) return known == NULL ? -1 : known == Py_True;
    PyObject *found = CALL_ONE(is_users, filename);
    int failed = found == NULL || PyDict_SetItem(are_users, filename, found);
    int is = found == Py_True;
    Py_XDECREF(found);
    return failed ? -1 : is;
}

PyObject *line_of_user(void) {
    PyFrameObject *frame = PyThreadState_GetFrame(PyThreadState_Get());
    PyObject *line = NULL;
    while (frame != NULL) {
        PyCodeObject *code = PyFrame_GetCode(frame);
        int is_users = is_of_user(code->co_filename);
        if (is_users > 0) line = PyUnicode_FromFormat("%U:%d", code->co_filename, PyFrame_GetLineNumber(frame));
        Py_DECREF(code);
        PyFrameObject *back = is_users ? NULL : PyFrame_GetBack(frame);
        Py_DECREF(frame);
        frame = back;
    }
    return line != NULL || PyErr_Occurred() ? line : PyUnicode_New(0, 0);
}

static int is_number(PyObject *found, PyObject *wanted) {
    if (found == NULL) return -1;
    int is = PyObject_RichCompareBool(found, wanted, Py_EQ);
    Py_DECREF(found);
    return is;
}

static int are_alike(PyObject *one, PyObject *other) {
    PyObject *shape = read_from(one, SHAPE), *wanted = shape == NULL ? NULL : read_from(other, SHAPE);
    int are = wanted == NULL ? -1 : PyObject_RichCompareBool(shape, wanted, Py_EQ);
    Py_XDECREF(shape);
    Py_XDECREF(wanted);
    return are;
}

static int has_counts(PyObject *tensor, PyObject *counts) {
    int has = is_number(read_from(tensor, USE_COUNT), PyTuple_GET_ITEM(counts, 0));
    if (has <= 0) return has;
    PyObject *storage = read_from(tensor, UNTYPED_STORAGE), *key = storage == NULL ? NULL : read_from(storage, CDATA);
    has = key == NULL ? -1 : is_number(CALL_ONE(storage_use_count, key), PyTuple_GET_ITEM(counts, 1));
    Py_XDECREF(storage);
    Py_XDECREF(key);
    return has;
}

int adds_in_place(PyObject *args, PyObject *counts) {
    if (PyTuple_GET_SIZE(args) != 2) return 0;
    PyObject *into = PyTuple_GET_ITEM(args, 0), *other = PyTuple_GET_ITEM(args, 1);
    if (!has_memory(into) || !has_memory(other)) return 2;
    int may_be = is_this(read_from(into, LAYOUT), the_STRIDED);
    if (may_be > 0) may_be = is_this(read_from(other, LAYOUT), the_STRIDED);
    if (may_be > 0) may_be = are_alike(into, other);
    if (may_be > 0) may_be = has_counts(into, counts);
    if (may_be <= 0) return may_be;
    int is_contiguous = truth(read_from(into, IS_CONTIGUOUS));
    return is_contiguous ? is_contiguous : 2;
}
