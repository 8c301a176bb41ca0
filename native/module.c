/* The extension `tritonclip.backends._native`: loops over the memory of CPU gradients, which take a whole list in
 * one call, and the launch of kernels that Triton has compiled.
 *
 * A gradient is an address and a number of contiguous elements; `_native.pyi` describes the functions. The
 * extension uses only the stable ABI of Python, and nothing of PyTorch except its threads, so that one binary
 * serves all versions except free-threaded Python. Wrong arguments raise; every address except 0 is trusted.
 */
#include <Python.h>

#include "tensors.h"

/* The version of the functions and their arguments, which `native.py` checks. */
#define INTERFACE 17
/* From this many elements on, a call lets other threads of Python run. */
#define UNLOCKED 16384
/* The most elements, or rows, of a list, so that int64 holds numbers of bytes and sums of rounded sizes. */
#define MOST (INT64_MAX / 64)
/* A 2-norm of float64 is known if it is 0, or at least LEAST_NORM and less than LARGEST_NORM. */
#define LEAST_NORM 0x1p-450
#define LARGEST_NORM 0x1p450

/* Whether squares of float64 may have overflowed or lost digits to underflow; those of other dtypes fit. */
static int is_extreme(double norm) { return norm != 0 && !(norm >= LEAST_NORM && norm < LARGEST_NORM); }

/* Runs a job; during a long job, other threads of Python go on. */
static void run(Job *job) {
    if (job->n_elements < UNLOCKED) {
        run_job(job);
        return;
    }
    PyThreadState *state = PyEval_SaveThread();
    run_job(job);
    PyEval_RestoreThread(state);
}

/* The length of a list; -1 with an error of Python. */
static Py_ssize_t length_of(PyObject *list) {
    if (PyList_Check(list)) return PyList_Size(list);
    PyErr_Format(PyExc_TypeError, "expected a list, got %R", Py_TYPE(list));
    return -1;
}

/* Whether bytes hold n int64; otherwise sets an error of Python. */
static int has_integers(PyObject *bytes, Py_ssize_t n) {
    if (PyBytes_Size(bytes) == n * (Py_ssize_t)sizeof(int64_t)) return 1;
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "expected as many sizes as addresses");
    return 0;
}

/* The i-th int64 in bytes. */
static int64_t number_of(PyObject *bytes, Py_ssize_t i) {
    int64_t number;
    memcpy(&number, PyBytes_AsString(bytes) + i * (Py_ssize_t)sizeof number, sizeof number);
    return number;
}

/* The code of a dtype; -1 with an error of Python. */
static long read_dtype(PyObject *code) {
    long dtype = PyLong_AsLong(code);
    if (dtype >= 0 && dtype < N_DTYPES) return dtype;
    if (!PyErr_Occurred()) PyErr_Format(PyExc_ValueError, "expected a known dtype, got %ld", dtype);
    return -1;
}

/* Reads an address; NULL for 0, with an error of Python unless `may_be_0`. */
static void *read_address(PyObject *number, int may_be_0) {
    void *address = PyLong_AsVoidPtr(number);
    if (!address && !may_be_0 && !PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "expected the address of memory, got 0");
    return address;
}

/* Adds a gradient to a job that has room for it; 0 with an error of Python. */
static int read_gradient(Job *job, long dtype, PyObject *number, int64_t rows, int64_t length, int may_be_absent) {
    int64_t size;
    if (rows < 0 || rows > MOST - job->n_rows || length < 0 || __builtin_mul_overflow(rows, length, &size) ||
        size > MOST - job->n_elements) {
        PyErr_SetString(PyExc_ValueError, "expected sizes of 0 or more, whose sum int64 holds");
        return 0;
    }
    char *address = read_address(number, may_be_absent || !size);
    if (!address && PyErr_Occurred()) return 0;
    add_gradient(job, dtype, address, rows, length);
    return 1;
}

/* Makes a job from the arguments that all verbs share; returns 0 with an error of Python.
 *
 * The arguments are a list of addresses, sizes as bytes of as many int64, the code of the dtype, and the most
 * threads. By unit, sizes are the lengths of rows, and `rows` has the number of rows of each gradient, in bytes like
 * sizes; otherwise `rows` is NULL.
 */
static int read_job(Job *job, Verb verb, PyObject *const *arguments, PyObject *rows) {
    long dtype = read_dtype(arguments[2]), threads = dtype < 0 ? 0 : PyLong_AsLong(arguments[3]);
    if (threads < 1) {
        if (!PyErr_Occurred()) PyErr_Format(PyExc_ValueError, "expected 1 thread or more, got %ld", threads);
        return 0;
    }
    /* From here on no code of Python runs that might change the list. */
    Py_ssize_t n = length_of(arguments[0]);
    if (n < 0 || !has_integers(arguments[1], n) || (rows && !has_integers(rows, n))) return 0;
    int is_made = make_job(job, verb, threads, n), is_read = is_made;
    for (Py_ssize_t i = 0; is_read && i < n; i++) {
        int64_t n_rows = rows ? number_of(rows, i) : 1, length = number_of(arguments[1], i);
        is_read = read_gradient(job, dtype, PyList_GetItem(arguments[0], i), n_rows, length, rows != NULL);
    }
    if (!is_made || (is_read && !(is_read = make_parts(job)))) PyErr_NoMemory();
    if (!is_read) free_job(job);
    return is_read;
}

static int has_arguments(Py_ssize_t got, Py_ssize_t expected) {
    if (got == expected) return 1;
    PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", expected, got);
    return 0;
}

/* Reads n numbers; 0 with an error of Python. */
static int read_doubles(PyObject *const *arguments, int n, double *numbers) {
    for (int i = 0; i < n; i++)
        if ((numbers[i] = PyFloat_AsDouble(arguments[i])) == -1 && PyErr_Occurred()) return 0;
    return 1;
}

/* Reads a number, or the i-th number of a list; returns 0 with an error of Python. */
static int read_number(PyObject *numbers, Py_ssize_t i, double *number) {
    /* A reference, because the list may lose the number meanwhile. */
    PyObject *own = Py_XNewRef(PyList_Check(numbers) ? PyList_GetItem(numbers, i) : numbers);
    *number = PyFloat_AsDouble(own);
    Py_XDECREF(own);
    return *number != -1 || !PyErr_Occurred();
}

/* Whether an argument is a number or a list of n numbers; otherwise sets an error of Python. */
static int has_numbers(PyObject *numbers, Py_ssize_t n) {
    if (!PyList_Check(numbers) || PyList_Size(numbers) == n) return 1;
    PyErr_Format(PyExc_ValueError, "expected %zd numbers, got %zd", n, PyList_Size(numbers));
    return 0;
}


/* Runs a job unless there is an error, and frees it; returns None, or NULL with the error. */
static PyObject *finish(Job *job) {
    int failed = PyErr_Occurred() != NULL;
    if (!failed) run(job);
    free_job(job);
    return failed ? NULL : Py_NewRef(Py_None);
}

/* Reads the order of a norm as the verb that measures it; returns 0 with an error of Python. */
static int read_order(PyObject *number, Verb *verb) {
    double order = PyFloat_AsDouble(number);
    if (order != 1 && order != 2 && order != INFINITY) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "expected a norm of order 1, 2 or inf");
        return 0;
    }
    *verb = order == 2 ? SUM_SQUARES : order == 1 ? SUM_MAGNITUDES : LARGEST;
    return 1;
}

/* Measures a list by the norm whose order is the fifth argument; returns 0 with an error of Python. */
static int measure(Job *job, PyObject *const *arguments, Py_ssize_t n_arguments) {
    if (!has_arguments(n_arguments, 5)) return 0;
    Verb verb;
    if (!read_order(arguments[4], &verb) || !read_job(job, verb, arguments, NULL)) return 0;
    run(job);
    return 1;
}

static PyObject *norm(PyObject *module, PyObject *const *arguments, Py_ssize_t n_arguments) {
    Job job;
    if (!measure(&job, arguments, n_arguments)) return NULL;
    double norm = norm_of(&job, 0, job.n_parts);
    free_job(&job);
    return PyFloat_FromDouble(norm);
}

/* The norm of each gradient of a job that ran, as a list. */
static PyObject *parts_of_each(const Job *job) {
    PyObject *result = PyList_New((Py_ssize_t)job->n);
    for (Py_ssize_t i = 0; result && i < job->n; i++) {
        int64_t from = job->gradients[i].first_part;
        PyObject *own = PyFloat_FromDouble(norm_of(job, from, from + blocks_of(job->gradients[i].size)));
        if (!own || PyList_SetItem(result, i, own)) Py_CLEAR(result);
    }
    return result;
}

static PyObject *norms(PyObject *module, PyObject *const *arguments, Py_ssize_t n_arguments) {
    Job job;
    if (!measure(&job, arguments, n_arguments)) return NULL;
    PyObject *result = parts_of_each(&job);
    free_job(&job);
    return result;
}

/* min(1, limit / (norm + eps)), with every step rounded to float32 unless `wide`; 1 if norm + eps is 0; NaN
 * stays. */
static double coefficient_of(double norm, double limit, double eps, int wide) {
    double bound = wide ? norm + eps : (double)((float)norm + (float)eps);
    if (!wide) limit = (float)limit;
    if (bound <= limit || bound == 0) return 1;
    return wide ? limit / bound : (double)((float)limit / (float)bound);
}

static PyObject *coefficients(PyObject *module, PyObject *const *arguments, Py_ssize_t n_arguments) {
    if (!has_arguments(n_arguments, 4)) return NULL;
    double eps, least = 1;
    int wide = read_doubles(arguments + 2, 1, &eps) ? PyObject_IsTrue(arguments[3]) : -1;
    Py_ssize_t n = wide < 0 ? -1 : length_of(arguments[0]);
    if (n < 0 || !has_numbers(arguments[1], n)) return NULL;
    PyObject *result = PyList_New(n);
    for (Py_ssize_t i = 0; result && i < n; i++) {
        double norm, limit, coefficient = 0;
        int is_read = read_number(arguments[0], i, &norm) && read_number(arguments[1], i, &limit);
        if (is_read) coefficient = coefficient_of(norm, limit, eps, wide);
        if (coefficient < least || coefficient != coefficient) least = coefficient;
        PyObject *own = is_read ? PyFloat_FromDouble(coefficient) : NULL;
        if (!own || PyList_SetItem(result, i, own)) Py_CLEAR(result);
    }
    return result ? Py_BuildValue("(Nd)", result, least) : NULL;
}

/* Gives each gradient its factor; returns 0 with an error of Python. */
static int read_factors(Job *job, PyObject *numbers) {
    int is_valid = has_numbers(numbers, (Py_ssize_t)job->n);
    for (int64_t i = 0; is_valid && i < job->n; i++)
        is_valid = read_number(numbers, (Py_ssize_t)i, &job->gradients[i].factor);
    return is_valid;
}

static PyObject *multiply(PyObject *module, PyObject *const *arguments, Py_ssize_t n_arguments) {
    Job job;
    if (!has_arguments(n_arguments, 5) || !read_job(&job, MULTIPLY, arguments, NULL)) return NULL;
    read_factors(&job, arguments[4]);
    return finish(&job);
}

/* Measures a list and multiplies it by the coefficient of its norm; see `_native.pyi`. */
static PyObject *clip(PyObject *module, PyObject *const *arguments, Py_ssize_t n_arguments) {
    if (!has_arguments(n_arguments, 11)) return NULL;
    double numbers[4] = {0};
    int wide = read_doubles(arguments + 4, 4, numbers) ? PyObject_IsTrue(arguments[8]) : -1;
    double order = numbers[0], limit = numbers[1], eps = numbers[2], scale = numbers[3];
    Job job;
    if (wide < 0 || !measure(&job, arguments, 5)) return NULL;
    double norm = norm_of(&job, 0, job.n_parts);
    free_job(&job);
    if (wide && order == 2 && is_extreme(norm)) return Py_NewRef(Py_None);
    norm /= scale;
    if (!wide) norm = (float)norm, scale = (float)scale;
    double coefficient = coefficient_of(norm, limit, eps, wide), factor = coefficient / scale;
    if (!wide) factor = (float)factor;
    if (factor != 1) {
        PyObject *done = PyObject_CallFunctionObjArgs(arguments[9], arguments[10], NULL);
        if (!done) return NULL;
        Py_DECREF(done);
        if (!read_job(&job, MULTIPLY, arguments, NULL)) return NULL;
        for (int64_t i = 0; i < job.n; i++) job.gradients[i].factor = factor;
        run(&job);
        free_job(&job);
    }
    return PyFloat_FromDouble(norm);
}

static PyObject *clamp(PyObject *module, PyObject *const *arguments, Py_ssize_t n_arguments) {
    Job job;
    if (!has_arguments(n_arguments, 6) || !read_job(&job, CLAMP, arguments, NULL)) return NULL;
    double bounds[2];
    if (read_doubles(arguments + 4, 2, bounds)) job.low = bounds[0], job.high = bounds[1];
    return finish(&job);
}

/* Adds an index to a list; returns 0 with an error of Python. */
static int append_index(PyObject *list, int64_t index) {
    PyObject *number = PyLong_FromLongLong(index);
    int failed = !number || PyList_Append(list, number);
    Py_XDECREF(number);
    return !failed;
}

static PyObject *unit_norms(PyObject *module, PyObject *const *arguments, Py_ssize_t n_arguments) {
    Job job;
    if (!has_arguments(n_arguments, 6)) return NULL;
    if (!read_job(&job, SUM_SQUARES, arguments, arguments[4])) return NULL;
    double *norms = read_address(arguments[5], !job.n_rows), *own = norms;
    PyObject *unknown = PyErr_Occurred() ? NULL : PyList_New(0);
    for (int64_t i = 0; unknown && i < job.n; own += job.gradients[i++].rows)
        if (job.gradients[i].length <= BLOCK) job.gradients[i].norms = own;
    if (unknown) run(&job);
    for (int64_t i = 0; unknown && i < job.n; i++) {
        const Gradient *gradient = job.gradients + i;
        int64_t part = gradient->first_part, n_parts = blocks_of(gradient->length);
        int is_absent = !gradient->elements && gradient->size, is_unknown = is_absent;
        for (int64_t row = 0; row < gradient->rows; row++, part += n_parts, norms++) {
            if (is_absent || !n_parts)
                *norms = is_absent ? INFINITY : 0;
            else if (!gradient->norms)
                *norms = norm_of(&job, part, part + n_parts);
            is_unknown |= gradient->code == FLOAT64 && is_extreme(*norms);
        }
        if (is_unknown && !append_index(unknown, i)) Py_CLEAR(unknown);
    }
    free_job(&job);
    return unknown;
}

/* The coefficient of a unit, min(1, ratio * max(weights, eps) / norm). It is 1 if the norm is 0 or the limit is
 * infinite; NaN stays. */
static double unit_coefficient(double norm, double weights, double ratio, double eps) {
    double limit = ratio * (weights < eps ? eps : weights);
    if (weights == INFINITY || ratio == INFINITY) limit = INFINITY;
    if (norm == 0 || norm <= limit) return 1;
    return limit / norm;
}

static PyObject *unit_factors(PyObject *module, PyObject *const *arguments, Py_ssize_t n_arguments) {
    if (!has_arguments(n_arguments, 7)) return NULL;
    double numbers[2], least = 1;
    int wide = read_doubles(arguments + 3, 2, numbers) ? PyObject_IsTrue(arguments[5]) : -1;
    long dtype = wide < 0 ? -1 : read_dtype(arguments[6]);
    if (dtype < 0) return NULL;
    double eps = numbers[0], scale = numbers[1];
    Py_ssize_t n = PyBytes_Size(arguments[1]) / (Py_ssize_t)sizeof(int64_t);
    if (!has_integers(arguments[1], n) || !has_numbers(arguments[2], n)) return NULL;
    int64_t n_units = 0;
    for (Py_ssize_t i = 0; i < n; i++) {
        int64_t rows = number_of(arguments[1], i);
        if (rows < 0 || rows > MOST - n_units) {
            PyErr_SetString(PyExc_ValueError, "expected 0 rows or more, whose sum int64 holds");
            return NULL;
        }
        n_units += rows;
    }
    const double *norms = read_address(arguments[0], !n_units);
    if (PyErr_Occurred()) return NULL;
    PyObject *changed = PyList_New(0), *result = NULL;
    PyObject *bytes = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)sizeof(double) * n_units);
    double *factors = bytes ? (double *)(void *)PyBytes_AsString(bytes) : NULL;
    for (Py_ssize_t i = 0; changed && factors && i < n; i++) {
        double ratio;
        int is_read = read_number(arguments[2], i, &ratio), is_changed = 0;
        for (int64_t row = is_read ? number_of(arguments[1], i) : 0; row; row--, norms++, factors++) {
            double coefficient = unit_coefficient(*norms / scale, norms[n_units], ratio, eps);
            if (!wide) coefficient = (float)coefficient;
            if (coefficient < least || coefficient != coefficient) least = coefficient;
            *factors = coefficient / (wide ? scale : (double)(float)scale);
            /* Elements are multiplied by the factor in this dtype. */
            if (!wide || dtype != FLOAT64) *factors = (float)*factors;
            is_changed |= *factors != 1;
        }
        if (!is_read || (is_changed && !append_index(changed, i))) Py_CLEAR(changed);
    }
    if (changed && bytes) result = Py_BuildValue("(OOd)", bytes, changed, least);
    Py_XDECREF(changed);
    Py_XDECREF(bytes);
    return result;
}

static PyObject *multiply_units(PyObject *module, PyObject *const *arguments, Py_ssize_t n_arguments) {
    Job job;
    if (!has_arguments(n_arguments, 6) || !read_job(&job, MULTIPLY, arguments, arguments[4])) return NULL;
    const double *factors = (const double *)(const void *)PyBytes_AsString(arguments[5]);
    if (factors && PyBytes_Size(arguments[5]) != job.n_rows * (Py_ssize_t)sizeof(double))
        PyErr_SetString(PyExc_ValueError, "expected a factor for each unit");
    for (int64_t i = 0; !PyErr_Occurred() && i < job.n; factors += job.gradients[i++].rows)
        job.gradients[i].factors = factors;
    return finish(&job);
}

#include "functional.h"

#include "kernel.h"

typedef struct {
    uint64_t start, end;
} Bytes;

static int compare_starts(const void *left, const void *right) {
    uint64_t a = ((const Bytes *)left)->start, b = ((const Bytes *)right)->start;
    return (a > b) - (a < b);
}

static PyObject *are_apart(PyObject *module, PyObject *const *arguments, Py_ssize_t n_arguments) {
    if (!has_arguments(n_arguments, 2)) return NULL;
    Py_ssize_t n = length_of(arguments[0]), kept = 0;
    if (n < 0 || length_of(arguments[1]) != n) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "expected a span for each address");
        return NULL;
    }
    Bytes few[FEW], *all = few;
    if (n > FEW && !(all = malloc(sizeof(Bytes) * (size_t)n))) return PyErr_NoMemory();
    for (Py_ssize_t i = 0; i < n; i++) {
        uint64_t start = PyLong_AsUnsignedLongLong(PyList_GetItem(arguments[0], i));
        uint64_t span = PyLong_AsUnsignedLongLong(PyList_GetItem(arguments[1], i));
        if (span) all[kept++] = (Bytes){start, start + span};
    }
    int apart = 1;
    if (!PyErr_Occurred()) {
        qsort(all, (size_t)kept, sizeof(Bytes), compare_starts);
        for (Py_ssize_t i = 1; i < kept; i++) apart &= all[i - 1].end <= all[i].start;
    }
    if (all != few) free(all);
    return PyErr_Occurred() ? NULL : PyBool_FromLong(apart);
}

static PyObject *use_plain_loops(PyObject *module, PyObject *flag) {
    int is_portable = PyObject_IsTrue(flag);
    if (is_portable < 0) return NULL;
    loops_of = is_portable ? plain_loops : fastest_loops();
    return Py_NewRef(Py_None);
}

static PyObject *register_torch(PyObject *module, PyObject *const *arguments, Py_ssize_t n_arguments) {
    PyObject **const registered[] = {
        &torch.tensor, &torch.parameter, &torch.codes, &torch.number, &torch.wide_number,
        &torch.is_recording, &torch.n_threads, &torch.hypot,
    };
    enum { N_REGISTERED = sizeof registered / sizeof *registered };
    if (!has_arguments(n_arguments, N_REGISTERED + 1)) return NULL;
    if (!PyDict_Check(arguments[2]))
        return PyErr_Format(PyExc_TypeError, "expected codes in a dict, got %R", Py_TYPE(arguments[2]));
    const DLPackExchange *exchange = NULL;
    PyObject *capsule = arguments[N_REGISTERED];
    if (capsule != Py_None && !(exchange = PyCapsule_GetPointer(capsule, "dlpack_exchange_api"))) return NULL;
    torch.view = exchange && exchange->major == 1 ? exchange->view : NULL;
    for (int i = 0; i < N_REGISTERED; i++) {
        PyObject *earlier = *registered[i];
        *registered[i] = Py_NewRef(arguments[i]);
        Py_XDECREF(earlier);
    }
    return Py_NewRef(Py_None);
}

static PyObject *use_threads(PyObject *module, PyObject *address) {
    void *function = PyLong_AsVoidPtr(address);
    if (PyErr_Occurred()) return NULL;
    memcpy(&parallel, &function, sizeof parallel);
    return Py_NewRef(Py_None);
}

#define FAST(function) (PyCFunction)(void (*)(void)) function, METH_FASTCALL

static PyMethodDef methods[] = {
    {"norm", FAST(norm), NULL},
    {"norms", FAST(norms), NULL},
    {"coefficients", FAST(coefficients), NULL},
    {"multiply_", FAST(multiply), NULL},
    {"unit_norms", FAST(unit_norms), NULL},
    {"unit_factors", FAST(unit_factors), NULL},
    {"multiply_units_", FAST(multiply_units), NULL},
    {"clip_", FAST(clip), NULL},
    {"clamp_", FAST(clamp), NULL},
    {"clamped", FAST(clamped), NULL},
    {"clipped", FAST(clipped), NULL},
    {"clipped_each", FAST(clipped_each), NULL},
    {"measured", FAST(measured), NULL},
    {"are_apart", FAST(are_apart), NULL},
    {"kernel", FAST(kernel), NULL},
    {"launch", FAST(launch), NULL},
    {"use_plain_loops", use_plain_loops, METH_O, NULL},
    {"register_torch", FAST(register_torch), NULL},
    {"use_threads", use_threads, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_native", "Loops over CPU gradients.", -1, methods, NULL, NULL, NULL, NULL,
};

/* Returns 0 with an error of Python. */
static int add_number(PyObject *module, const char *name, double value) {
    PyObject *number = PyFloat_FromDouble(value);
    int is_added = number && !PyModule_AddObjectRef(module, name, number);
    Py_XDECREF(number);
    return is_added;
}

PyMODINIT_FUNC PyInit__native(void) {
    loops_of = fastest_loops();
    PyObject *module = PyModule_Create(&definition);
    if (module && (!make_names() || PyModule_AddIntConstant(module, "SHARED", SHARED) ||
                   PyModule_AddIntConstant(module, "GRAIN", GRAIN) ||
                   PyModule_AddIntConstant(module, "PAIRS", PAIRS) ||
                   PyModule_AddIntConstant(module, "INTERFACE", INTERFACE) ||
                   !add_number(module, "LEAST_NORM", LEAST_NORM) || !add_number(module, "LARGEST_NORM", LARGEST_NORM)))
        Py_CLEAR(module);
    return module;
}
