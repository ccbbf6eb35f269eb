/* Attributes of tensors and storages, and what their methods without arguments return.
 *
 * They are read through the functions that torch's classes hold, which are looked up once; objects of other types are asked by name.
 */

#include "_native.h"

struct reader {
    const char *name;
    int is_method;
    PyObject *interned;
    getter get;
    void *closure;
    PyCFunction method;
    int takes_tuple;
};

static struct reader readers[] = {
    [IS_CPU] = {.name = "is_cpu"},
    [DTYPE] = {.name = "dtype"},
    [LAYOUT] = {.name = "layout"},
    [SHAPE] = {.name = "shape"},
    [TENSOR_NBYTES] = {.name = "nbytes"},
    [VERSION] = {.name = "_version"},
    [IS_CONTIGUOUS] = {.name = "is_contiguous", .is_method = 1},
    [IS_ZERO] = {.name = "_is_zerotensor", .is_method = 1},
    [STRIDE] = {.name = "stride", .is_method = 1},
    [UNTYPED_STORAGE] = {.name = "untyped_storage", .is_method = 1},
    [USE_COUNT] = {.name = "_use_count", .is_method = 1},
    [CDATA] = {.name = "_cdata"},
    [NBYTES] = {.name = "nbytes", .is_method = 1},
};
static PyObject *no_arguments;

PyObject *read_from(PyObject *object, enum reading what) {
    struct reader *reader = &readers[what];
    int is_plain = what < CDATA ? has_memory(object) : (PyObject *)Py_TYPE(object) == the_UntypedStorage;
    if (is_plain && reader->get != NULL) return reader->get(object, reader->closure);
    if (is_plain && reader->method != NULL && !reader->takes_tuple) return reader->method(object, NULL);
    if (is_plain && reader->method != NULL) return ((PyCFunctionWithKeywords)(void (*)(void))reader->method)(object, no_arguments, NULL);
    return reader->is_method ? PyObject_CallMethodNoArgs(object, reader->interned) : PyObject_GetAttr(object, reader->interned);
}

static int find_function(struct reader *reader, PyObject *type) {
    PyObject *found = PyObject_GetAttr(type, reader->interned);
    if (found == NULL) return -1;
    if (!reader->is_method && Py_IS_TYPE(found, &PyGetSetDescr_Type)) {
        PyGetSetDef *definition = ((PyGetSetDescrObject *)found)->d_getset;
        reader->get = definition->get;
        reader->closure = definition->closure;
    } else if (reader->is_method && Py_IS_TYPE(found, &PyMethodDescr_Type)) {
        PyMethodDef *definition = ((PyMethodDescrObject *)found)->d_method;
        int kind = definition->ml_flags & (METH_NOARGS | METH_VARARGS | METH_KEYWORDS | METH_FASTCALL | METH_O);
        reader->takes_tuple = kind == (METH_VARARGS | METH_KEYWORDS);
        reader->method = kind == METH_NOARGS || reader->takes_tuple ? definition->ml_meth : NULL;
    }
    Py_DECREF(found);
    return 0;
}

int find_readers(void) {
    if (no_arguments == NULL && (no_arguments = PyTuple_New(0)) == NULL) return -1;
    for (size_t what = 0; what < sizeof(readers) / sizeof(readers[0]); what++) {
        struct reader *reader = &readers[what];
        if (reader->interned == NULL && (reader->interned = PyUnicode_InternFromString(reader->name)) == NULL) return -1;
        if (find_function(reader, what < CDATA ? the_Tensor : the_UntypedStorage)) return -1;
    }
    return 0;
}
