/* What the files of the compiled tracer share. */

#ifndef LOWTIDE_TRACE_NATIVE_H
#define LOWTIDE_TRACE_NATIVE_H

#include "../_native_helpers.h"
#include <stddef.h>
#include <structmember.h>

/* Parts of lowtide and torch that `configure` is given. */
#define TRACE_PARTS(X)                                                                                                                     \
    X(ACTIVATION) X(ADD) X(BACKWARD) X(ENOUGH) X(FORWARD) X(INPUT) X(OPTIMIZER) X(Parameter) X(REPLAY) X(STRIDED) X(TEMPORARY)    \
    X(Tensor) X(UntypedStorage) X(current_node) X(facts_of) X(graph_task_id) X(in_replay) X(is_grad_enabled) \
    X(is_users) X(next_sequence_number) X(storage_use_count)
#define EXTERN_PART(name) extern PyObject *the_##name;
TRACE_PARTS(EXTERN_PART)

/* Whether something is a tensor; whether it is one of a type that has memory of its own. */
static inline int is_tensor(PyObject *value) { return PyObject_TypeCheck(value, (PyTypeObject *)the_Tensor); }
static inline int has_memory(PyObject *value) { return (PyObject *)Py_TYPE(value) == the_Tensor || (PyObject *)Py_TYPE(value) == the_Parameter; }

/* What is read of tensors, and from `CDATA` on of storages; by whichever functions torch's classes have, once they were found. */
enum reading { IS_CPU, DTYPE, LAYOUT, SHAPE, TENSOR_NBYTES, VERSION, IS_CONTIGUOUS, IS_ZERO, STRIDE, UNTYPED_STORAGE, USE_COUNT, CDATA, NBYTES };
PyObject *read_from(PyObject *object, enum reading what);
int find_readers(void);

/* What is in a list or tuple, and how many. */
static inline int is_sequence(PyObject *value) { return PyList_CheckExact(value) || PyTuple_CheckExact(value); }
#define ITEM(sequence, index) PySequence_Fast_GET_ITEM(sequence, index)
#define SIZE(sequence) PySequence_Fast_GET_SIZE(sequence)

/* Append something that this takes over; below zero with an error, also if there is nothing. */
static inline int add_to(PyObject *list, PyObject *value) {
    int failed = value == NULL ? -1 : PyList_Append(list, value);
    Py_XDECREF(value);
    return failed;
}

/* Set the fields of an object that is being made, at these places, to what is given by name; below zero with an error. */
static inline int take_fields(PyObject *self, const char *const *names, const size_t *offsets, size_t count, PyObject *arguments, PyObject *keywords) {
    if (PyTuple_GET_SIZE(arguments) || keywords == NULL || (size_t)PyDict_GET_SIZE(keywords) != count) {
        PyErr_Format(PyExc_TypeError, "%s takes %zu parts, by name", Py_TYPE(self)->tp_name, count);
        return -1;
    }
    for (size_t index = 0; index < count; index++) {
        PyObject *value = PyDict_GetItemString(keywords, names[index]);
        if (value == NULL) {
            PyErr_Format(PyExc_TypeError, "%s takes %s", Py_TYPE(self)->tp_name, names[index]);
            return -1;
        }
        *(PyObject **)((char *)self + offsets[index]) = Py_NewRef(value);
    }
    return 0;
}

/* Storages, see StorageTable: the rows of the tensors in a list or tuple; whether one was
 * there before the step; let the row of one stand for another, 0 if that takes the long way. */
int is_storages_type(PyObject *object);
PyObject *rows_in(PyObject *storages, PyObject *tensors, PyObject *category);
int is_resident_row(PyObject *storages, PyObject *row);
int moved(PyObject *storages, PyObject *tensor, PyObject *into);

/* The line of the user's that runs, see source_line. */
PyObject *line_of_user(void);

/* Whether an addition that autograd makes would be in place, see Accumulation.is_in_place, by the reference counts of one that is; below zero
 * with an error; 2 where that takes more to tell. */
int adds_in_place(PyObject *args, PyObject *counts);

/* Each adds what is in one file to the module; below zero with an error. */
int add_recording(PyObject *module);
int add_saved(PyObject *module);
int add_storages(PyObject *module);

#endif
