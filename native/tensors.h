/* Plain tensors on a CPU as the gradients of a job, and new tensors for the results.
 *
 * Tensors are read by DLPack's functions for C or, if this PyTorch has none, by the attributes that Python code
 * would read, so that nothing of PyTorch is linked.
 */
#ifndef TRITONCLIP_TENSORS_H
#define TRITONCLIP_TENSORS_H

#include <Python.h>

#include "job.h"

/* The parts of dlpack.h, version 1, that are used here. */
typedef struct {
    void *data;
    int32_t device_type, device_id, n_dims;
    uint8_t kind, bits;
    uint16_t lanes;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} DLTensor;

typedef struct {
    uint32_t major, minor;
    void *earlier, *allocate, *own, *give;
    int (*view)(void *tensor, DLTensor *view);
} DLPackExchange;

enum { DL_CPU = 1, DL_FLOAT = 2, DL_BFLOAT = 4, DL_COMPLEX = 5 };

/* The arguments of `register_torch`: the classes of plain tensors, the codes of dtypes, 0-d tensors of float32 and
 * float64, and functions: whether autograd records, the number of threads, Python's hypot, and DLPack's view. */
static struct {
    PyObject *tensor, *parameter, *codes, *number, *wide_number, *is_recording, *n_threads, *hypot;
    int (*view)(void *, DLTensor *);
} torch;

enum { DTYPE, IS_CPU, IS_NESTED, REQUIRES_GRAD, IS_CONJ, IS_NEG, IS_CONTIGUOUS, NUMEL, DATA_PTR, N_NAMES };
static const char *const spellings[N_NAMES] = {
    "dtype", "is_cpu", "is_nested", "requires_grad", "is_conj", "is_neg", "is_contiguous", "numel", "data_ptr",
};
static PyObject *names[N_NAMES];

/* Returns 0 with an error of Python. */
static int make_names(void) {
    for (int i = 0; i < N_NAMES; i++)
        if (!(names[i] = PyUnicode_InternFromString(spellings[i]))) return 0;
    return 1;
}

static PyObject *call(PyObject *tensor, int name) { return PyObject_CallMethodObjArgs(tensor, names[name], NULL); }

/* Whether an answer, whose reference is dropped, is True; -1 with an error of Python. */
static int is_true(PyObject *answer) {
    int is = answer ? answer == Py_True : -1;
    Py_XDECREF(answer);
    return is;
}

static int has(PyObject *tensor, int name) { return is_true(PyObject_GetAttr(tensor, names[name])); }

/* The value of a number of 0 or more, whose reference is dropped; -1 with an error of Python. */
static int64_t as_number(PyObject *number) {
    int64_t result = number ? PyLong_AsLongLong(number) : -1;
    Py_XDECREF(number);
    return result;
}

/* The elements of a tensor. */
typedef struct {
    char *address;
    int64_t size;
    /* The code of the dtype, see `native.CODES`, plus PAIRS for complex numbers. */
    long code;
    int is_contiguous;
    /* DLPack's view, if the tensor was read by DLPack. */
    DLTensor dl;
} Elements;

/* Reads a tensor by DLPack; returns 0 for another device or dtype, or with an error of Python. */
static int view_elements(PyObject *x, Elements *elements) {
    DLTensor *dl = &elements->dl;
    if (torch.view(x, dl) || dl->device_type != DL_CPU || dl->lanes != 1) return 0;
    int is_complex = dl->kind == DL_COMPLEX, bits = dl->bits >> is_complex;
    if (dl->kind == DL_BFLOAT)
        elements->code = BFLOAT16;
    else if (bits == 16 && dl->kind == DL_FLOAT)
        elements->code = FLOAT16;
    else if ((bits == 32 || bits == 64) && (is_complex || dl->kind == DL_FLOAT))
        elements->code = (bits == 32 ? FLOAT32 : FLOAT64) | (is_complex ? PAIRS : 0);
    else
        return 0;
    elements->address = (char *)dl->data + dl->byte_offset;
    elements->size = 1, elements->is_contiguous = 1;
    for (int i = dl->n_dims - 1; i >= 0; i--) {
        if (dl->shape[i] != 1 && dl->strides[i] != elements->size) elements->is_contiguous = 0;
        elements->size *= dl->shape[i];
    }
    elements->is_contiguous |= !elements->size;
    return 1;
}

/* Does what `view_elements` does, by attributes. */
static int ask_for_elements(PyObject *x, Elements *elements) {
    PyObject *dtype = PyObject_GetAttr(x, names[DTYPE]);
    PyObject *code = dtype ? PyDict_GetItemWithError(torch.codes, dtype) : NULL;
    elements->code = code ? PyLong_AsLong(code) : -1;
    Py_XDECREF(dtype);
    if (elements->code < 0 || has(x, IS_CPU) != 1 || has(x, IS_NESTED)) return 0;
    if ((elements->is_contiguous = is_true(call(x, IS_CONTIGUOUS))) < 0) return 0;
    if ((elements->size = as_number(call(x, NUMEL))) < 0) return 0;
    int64_t address = as_number(call(x, DATA_PTR));
    elements->address = (char *)(intptr_t)address;
    return address >= 0;
}

/* Whether the elements of two tensors lie in the same order, without gaps. Tensors that were read by attributes have
 * to be contiguous. */
static int share_order(const Elements *x, const Elements *y) {
    const DLTensor *view = &x->dl, *other = &y->dl;
    if (x->code != y->code || x->size != y->size) return 0;
    if (x->is_contiguous && y->is_contiguous) return 1;
    if (!torch.view || view->n_dims != other->n_dims) return 0;
    int64_t span = 1;
    for (int i = 0; i < view->n_dims; i++) {
        if (view->shape[i] != other->shape[i]) return 0;
        if (view->shape[i] != 1 && view->strides[i] != other->strides[i]) return 0;
        span += (view->shape[i] - 1) * view->strides[i];
    }
    return span == x->size;
}

static int read_elements(PyObject *x, Elements *elements) {
    return torch.view ? view_elements(x, elements) : ask_for_elements(x, elements);
}

static int is_plain(PyObject *x) {
    PyObject *class = (PyObject *)Py_TYPE(x);
    return class == torch.tensor || class == torch.parameter;
}

/* A norm as a tensor that `create` makes; NULL if it makes an unexpected tensor, or with an error of Python. */
static PyObject *tensor_of(double norm, int is_wide, PyObject *create) {
    Elements elements;
    PyObject *made = PyObject_CallFunctionObjArgs(create, is_wide ? torch.wide_number : torch.number, NULL);
    int is_made = made && is_plain(made) && read_elements(made, &elements) && elements.address && elements.size == 1;
    if (!is_made || elements.code != (is_wide ? FLOAT64 : FLOAT32)) {
        Py_XDECREF(made);
        return NULL;
    }
    float narrow = (float)norm;
    memcpy(elements.address, is_wide ? (void *)&norm : (void *)&narrow, is_wide ? sizeof norm : sizeof narrow);
    return made;
}

/* The leaves of a call, which are a tensor or a list of tensors and None, and the new tensors. */
typedef struct {
    int is_list;
    /* Whether tensors differ in dtype, and whether any is of float64, or of pairs. */
    int are_mixed, are_wide, have_pairs;
    int64_t n;
    /* References to the leaves, since the list may drop them; and for each leaf the new tensor, None, or NULL. */
    PyObject **all, **made;
    PyObject *few[2 * FEW];
} Leaves;

/* Takes leaves from an argument; returns 0 with an error of Python. */
static int take_leaves(Leaves *leaves, PyObject *argument) {
    leaves->is_list = PyList_CheckExact(argument);
    leaves->are_mixed = leaves->are_wide = leaves->have_pairs = 0;
    leaves->n = 0;
    size_t n = leaves->is_list ? (size_t)PyList_Size(argument) : 1;
    leaves->all = n <= FEW ? leaves->few : malloc(2 * n * sizeof *leaves->all);
    if (!leaves->all) {
        PyErr_NoMemory();
        return 0;
    }
    leaves->made = leaves->all + n;
    for (size_t i = 0; i < n; i++) {
        leaves->all[i] = Py_NewRef(leaves->is_list ? PyList_GetItem(argument, (Py_ssize_t)i) : argument);
        leaves->made[i] = NULL;
    }
    leaves->n = (int64_t)n;
    return 1;
}

static void free_leaves(Leaves *leaves) {
    for (int64_t i = 0; i < leaves->n; i++) Py_XDECREF(leaves->all[i]), Py_XDECREF(leaves->made[i]);
    if (leaves->all != leaves->few) free(leaves->all);
}

/* The new tensors, in a list if the leaves were in one; NULL with an error of Python. */
static PyObject *made_of(const Leaves *leaves) {
    if (!leaves->is_list) return Py_NewRef(leaves->made[0]);
    PyObject *list = PyList_New((Py_ssize_t)leaves->n);
    for (int64_t i = 0; list && i < leaves->n; i++)
        if (PyList_SetItem(list, (Py_ssize_t)i, Py_NewRef(leaves->made[i]))) Py_CLEAR(list);
    return list;
}

/* Whether autograd would record operations on a tensor; -1 with an error of Python. */
static int is_recorded(PyObject *x) {
    int requires_grad = has(x, REQUIRES_GRAD);
    return requires_grad == 1 ? is_true(PyObject_CallNoArgs(torch.is_recording)) : requires_grad;
}

/* Adds a tensor to a job; its target is a tensor like it that `create` makes, unless `create` is NULL. Returns 0 if
 * the loops cannot serve the tensor, or with an error of Python. */
static int add_tensor(Job *job, Leaves *leaves, PyObject *x, PyObject *create, PyObject **made) {
    Elements elements, own;
    if (!is_plain(x) || !read_elements(x, &elements)) return 0;
    /* A tensor whose memory was freed has no address. */
    if ((elements.size && !elements.address) || is_true(call(x, IS_NEG))) return 0;
    if (is_recorded(x)) return 0;
    int are_pairs = elements.code >= PAIRS;
    int is_of_pairs = job->verb == SUM_SQUARES || job->verb == MULTIPLY;
    if (are_pairs && (!is_of_pairs || is_true(call(x, IS_CONJ)))) return 0;
    Gradient *gradient = add_gradient(job, elements.code, elements.address, 1, elements.size << are_pairs);
    leaves->are_mixed |= job->gradients->code != elements.code;
    leaves->are_wide |= elements.code % PAIRS == FLOAT64;
    leaves->have_pairs |= are_pairs;
    if (!create) return elements.is_contiguous;
    /* A mode may have made a tensor of another kind. */
    *made = PyObject_CallFunctionObjArgs(create, x, NULL);
    if (!*made || !is_plain(*made) || !read_elements(*made, &own) || (own.size && !own.address)) return 0;
    gradient->target = own.address;
    return share_order(&elements, &own);
}

/* Whether operators serve a tensor that was not read; otherwise an interrupt came. Reading tensors without memory,
 * such as sparse ones, raises errors, which are cleared. */
static int is_refused(void) {
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception)) return 0;
    PyErr_Clear();
    return 1;
}

/* Makes a job of leaves, and new tensors unless `create` is NULL. Returns 1; or 0 if operators have to serve the
 * leaves; or -1 with an error of Python. */
static int read_leaves(Job *job, Leaves *leaves, Verb verb, PyObject *argument, PyObject *create) {
    make_job(job, verb, 1, 0);
    if (!take_leaves(leaves, argument)) return -1;
    if (!torch.tensor) return 0;
    if (!make_job(job, verb, 1, leaves->n)) return PyErr_NoMemory(), -1;
    int64_t largest = 0;
    for (int64_t i = 0; i < leaves->n; i++) {
        PyObject *x = leaves->all[i];
        if (x == Py_None) {
            leaves->made[i] = Py_NewRef(x);
        } else if (!add_tensor(job, leaves, x, create, leaves->made + i)) {
            return is_refused() ? 0 : -1;
        } else if (job->gradients[job->n - 1].size > largest) {
            largest = job->gradients[job->n - 1].size;
        }
    }
    if (!job->n) return 0;
    if (job->n_elements >= SHARED * (largest >= GRAIN ? 1 : 2)) {
        int64_t threads = as_number(PyObject_CallNoArgs(torch.n_threads));
        if (threads < 0) return -1;
        job->threads = (long)threads;
    }
    return make_parts(job) ? 1 : (PyErr_NoMemory(), -1);
}

#endif
