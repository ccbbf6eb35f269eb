/* The hot path of a trace: what runs for each op of a step, for each storage and for each record of it.
 *
 * Each name here has a twin in Python that does the same, as `_acceleration.py` says; where this could not be compiled, the twins run.
 */

#include "_native.h"

#define API 1 /* `_acceleration.py` takes no other */

#define DEFINE_PART(name) PyObject *the_##name;
TRACE_PARTS(DEFINE_PART)

static PyObject *configure(PyObject *module, PyObject *given) {
    static struct part parts[] = {TRACE_PARTS(PART_ENTRY)};
    if (note_parts(given, parts, sizeof(parts) / sizeof(parts[0]))) return NULL;
    if (PyType_Check(the_Tensor) && PyLong_CheckExact(the_ENOUGH) && !find_readers()) Py_RETURN_NONE;
    return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_TypeError, "a part is of another type");
}

/* ---- Records ---- */

/* Where objects of a class with slots hold its fields, in their order; NULL with an error. */
static Py_ssize_t *places_of_fields(PyTypeObject *record, Py_ssize_t count) {
    PyObject *names = PyObject_GetAttrString((PyObject *)record, "__match_args__");
    Py_ssize_t *places = PyMem_New(Py_ssize_t, count + 1);
    if (names != NULL && places == NULL) PyErr_NoMemory();
    if (names != NULL && places != NULL && (!PyTuple_Check(names) || PyTuple_GET_SIZE(names) != count))
        PyErr_Format(PyExc_TypeError, "%s takes other columns than these %zd", record->tp_name, count);
    for (Py_ssize_t index = 0; !PyErr_Occurred() && index < count; index++) {
        PyObject *member = PyDict_GetItemWithError(record->tp_dict, PyTuple_GET_ITEM(names, index));
        PyMemberDef *slot = member != NULL && Py_IS_TYPE(member, &PyMemberDescr_Type) ? ((PyMemberDescrObject *)member)->d_member : NULL;
        if (slot != NULL && slot->type == T_OBJECT_EX) places[index] = slot->offset;
        else if (!PyErr_Occurred()) PyErr_Format(PyExc_TypeError, "%s has fields without slots", record->tp_name);
    }
    Py_XDECREF(names);
    if (PyErr_Occurred()) {
        PyMem_Free(places);
        return NULL;
    }
    return places;
}

static int are_columns(PyObject *const *columns, Py_ssize_t count) {
    for (Py_ssize_t index = 0; index < count; index++)
        if (!is_sequence(columns[index]) || SIZE(columns[index]) != SIZE(columns[0])) return 0;
    return count > 0;
}

/* Records made of the columns of a table: a frozen class of data sets its fields through functions of Python, which takes ten times as long. */
static PyObject *records_of(PyObject *module, PyObject *const *arguments, Py_ssize_t count) {
    if (count < 2 || !PyType_Check(arguments[0]) || !are_columns(arguments + 1, count - 1))
        return PyErr_Format(PyExc_TypeError, "it takes a class and lists or tuples of one length");
    PyTypeObject *type = (PyTypeObject *)arguments[0];
    PyObject *const *columns = arguments + 1, *records = NULL;
    Py_ssize_t *places = places_of_fields(type, count - 1);
    if (places == NULL || (records = PyTuple_New(SIZE(columns[0]))) == NULL) goto end;
    for (Py_ssize_t row = 0; row < SIZE(columns[0]); row++) {
        PyObject *record = type->tp_alloc(type, 0);
        if (record == NULL) {
            Py_CLEAR(records);
            goto end;
        }
        for (Py_ssize_t index = 0; index < count - 1; index++) *(PyObject **)((char *)record + places[index]) = Py_NewRef(ITEM(columns[index], row));
        PyTuple_SET_ITEM(records, row, record);
    }
end:
    PyMem_Free(places);
    return records;
}

static PyMethodDef functions[] = {
    {"configure", configure, METH_O, NULL},
    {"records_of", (PyCFunction)(void (*)(void))records_of, METH_FASTCALL, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "_native", .m_size = -1, .m_methods = functions};

PyMODINIT_FUNC PyInit__native(void) {
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL || PyModule_AddIntConstant(module, "API", API) || add_storages(module) || add_recording(module) || add_saved(module)) {
        Py_XDECREF(module);
        return NULL;
    }
    return module;
}
