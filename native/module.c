/* The extension `tritonclip.backends._native`: loops over the memory of CPU gradients, each of a
 * whole list in one call.
 *
 * A gradient is an address and a number of contiguous elements; `_native.pyi` describes the
 * functions. Of Python only the stable ABI is used, and nothing of PyTorch but its threads: one
 * binary serves all versions, but for those of free-threaded Python.
 */
#include <Python.h>

#include <float.h>
#include <limits.h>

#include "tensors.h"

/* Of the functions and their arguments, for `native.py`. */
#define INTERFACE 5
/* Elements from which a call lets other threads of Python run. */
#define UNLOCKED 16384
/* A norm of float64 of order 2 is known where it is 0, or lies from the first up to the second: a smaller one
 * may have lost squares to underflow, a larger one overflowed. Those of other dtypes fit float64. */
#define LEAST_NORM 0x1p-450
#define LARGEST_NORM 0x1p450

/* Runs a job; while it is long, other threads of Python go on. */
static void run(Job *job) {
    if (job->n_elements < UNLOCKED) {
        run_job(job);
        return;
    }
    PyThreadState *state = PyEval_SaveThread();
    run_job(job);
    PyEval_RestoreThread(state);
}

/* Makes a job from the arguments that all verbs have; 0 with an error of Python.
 *
 * addresses: a list of ints; sizes: bytes of as many int64; dtype: its code; threads: at most.
 */
static int read_job(Job *job, Verb verb, PyObject *const *arguments) {
    Py_ssize_t n = PyList_Size(arguments[0]);
    const char *sizes = PyBytes_AsString(arguments[1]);
    long dtype = PyLong_AsLong(arguments[2]), threads = PyLong_AsLong(arguments[3]);
    if (PyErr_Occurred()) return 0;
    if (PyBytes_Size(arguments[1]) != n * (Py_ssize_t)sizeof(int64_t) || dtype < 0 || dtype >= N_DTYPES) {
        PyErr_SetString(PyExc_ValueError, "expected as many sizes as addresses, and a known dtype");
        return 0;
    }
    int has_room = make_job(job, verb, threads, n);
    for (Py_ssize_t i = 0; has_room && i < n; i++) {
        int64_t size;
        memcpy(&size, sizes + i * (Py_ssize_t)sizeof size, sizeof size);
        add_gradient(job, dtype, PyLong_AsVoidPtr(PyList_GetItem(arguments[0], i)), size);
    }
    if (!has_room || !make_parts(job)) PyErr_NoMemory();
    if (!PyErr_Occurred()) return 1;
    free_job(job);
    return 0;
}

static int has_arguments(Py_ssize_t got, Py_ssize_t expected) {
    if (got == expected) return 1;
    PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", expected, got);
    return 0;
}

/* Runs a job unless there is an error, and frees it; returns None, or NULL with the error. */
static PyObject *finish(Job *job) {
    int failed = PyErr_Occurred() != NULL;
    if (!failed) run(job);
    free_job(job);
    return failed ? NULL : Py_NewRef(Py_None);
}

/* The verb that measures a norm of an order; 0 with an error of Python. */
static int read_order(PyObject *number, Verb *verb) {
    double order = PyFloat_AsDouble(number);
    if (order != 0 && order != 1 && order != 2 && order != INFINITY) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "expected a norm of order 0, 1, 2 or inf");
        return 0;
    }
    *verb = order == 2 ? SUM_SQUARES : order == 1 ? SUM_MAGNITUDES : order == 0 ? COUNT : LARGEST;
    return 1;
}

/* Measures a list by the order of a norm, the fifth argument; 0 with an error of Python. */
static int measure(Job *job, PyObject *const *arguments, Py_ssize_t n_arguments) {
    if (!has_arguments(n_arguments, 5)) return 0;
    Verb verb;
    if (!read_order(arguments[4], &verb) || !read_job(job, verb, arguments)) return 0;
    run(job);
    return 1;
}

static PyObject *norm(PyObject *module, PyObject *const *arguments, Py_ssize_t n_arguments) {
    (void)module;
    Job job;
    if (!measure(&job, arguments, n_arguments)) return NULL;
    double norm = norm_of(&job, 0, job.n_blocks);
    free_job(&job);
    return PyFloat_FromDouble(norm);
}

/* The parts of each gradient of a job that ran, put together, as a list. */
static PyObject *parts_of_each(const Job *job) {
    PyObject *result = PyList_New((Py_ssize_t)job->n);
    for (Py_ssize_t i = 0; result && i < job->n; i++) {
        int64_t from = job->gradients[i].first_block;
        PyObject *own = PyFloat_FromDouble(norm_of(job, from, from + blocks_of(job->gradients[i].size)));
        if (!own || PyList_SetItem(result, i, own)) Py_CLEAR(result);
    }
    return result;
}

static PyObject *norms(PyObject *module, PyObject *const *arguments, Py_ssize_t n_arguments) {
    (void)module;
    Job job;
    if (!measure(&job, arguments, n_arguments)) return NULL;
    PyObject *result = parts_of_each(&job);
    free_job(&job);
    return result;
}

/* min(1, limit / (norm + eps)), every step rounded to float32 unless `wide`; 1 where there is nothing
 * to clip; NaN stays. */
static double coefficient_of(double norm, double limit, double eps, int wide) {
    double bound = wide ? norm + eps : (double)((float)norm + (float)eps);
    if (!wide) limit = (float)limit;
    if (bound <= limit || bound == 0) return 1;
    return wide ? limit / bound : (double)((float)limit / (float)bound);
}

/* A number, or that of an index in a list of numbers. */
static double number_at(PyObject *numbers, Py_ssize_t i) {
    return PyFloat_AsDouble(PyList_Check(numbers) ? PyList_GetItem(numbers, i) : numbers);
}

/* Whether an argument is a number, or a list of n; else an error of Python. */
static int has_numbers(PyObject *numbers, Py_ssize_t n) {
    if (!PyList_Check(numbers) || PyList_Size(numbers) == n) return 1;
    PyErr_Format(PyExc_ValueError, "expected %zd numbers, got %zd", n, PyList_Size(numbers));
    return 0;
}

static PyObject *coefficients(PyObject *module, PyObject *const *arguments, Py_ssize_t n_arguments) {
    (void)module;
    if (!has_arguments(n_arguments, 4)) return NULL;
    Py_ssize_t n = PyList_Size(arguments[0]);
    double eps = PyFloat_AsDouble(arguments[2]), least = 1;
    int wide = PyObject_IsTrue(arguments[3]);
    if (PyErr_Occurred() || !has_numbers(arguments[1], n)) return NULL;
    PyObject *result = PyList_New(n);
    for (Py_ssize_t i = 0; result && i < n; i++) {
        double norm = PyFloat_AsDouble(PyList_GetItem(arguments[0], i));
        double coefficient = coefficient_of(norm, number_at(arguments[1], i), eps, wide);
        if (coefficient < least || coefficient != coefficient) least = coefficient;
        PyObject *own = PyErr_Occurred() ? NULL : PyFloat_FromDouble(coefficient);
        if (!own || PyList_SetItem(result, i, own)) Py_CLEAR(result);
    }
    return result ? Py_BuildValue("(Nd)", result, least) : NULL;
}

/* Gives each gradient its factor; 0 with an error of Python. */
static int read_factors(Job *job, PyObject *numbers) {
    int is_valid = has_numbers(numbers, (Py_ssize_t)job->n);
    for (int64_t i = 0; is_valid && i < job->n; i++)
        job->gradients[i].factor = number_at(numbers, (Py_ssize_t)i);
    return is_valid && !PyErr_Occurred();
}

static PyObject *multiply(PyObject *module, PyObject *const *arguments, Py_ssize_t n_arguments) {
    (void)module;
    Job job;
    if (!has_arguments(n_arguments, 5) || !read_job(&job, MULTIPLY, arguments)) return NULL;
    read_factors(&job, arguments[4]);
    return finish(&job);
}

static PyObject *clamp(PyObject *module, PyObject *const *arguments, Py_ssize_t n_arguments) {
    (void)module;
    Job job;
    if (!has_arguments(n_arguments, 6) || !read_job(&job, CLAMP, arguments)) return NULL;
    job.low = PyFloat_AsDouble(arguments[4]);
    job.high = PyFloat_AsDouble(arguments[5]);
    return finish(&job);
}

/* Ends a function of leaves: what it made, whose reference is taken; None where operators have to serve the
 * leaves; NULL with an error of Python. */
static PyObject *finish_leaves(Job *job, Leaves *leaves, int is_done, PyObject *made) {
    free_job(job);
    free_leaves(leaves);
    return is_done ? made : Py_NewRef(Py_None);
}

/* A bound as a number, `none` where there is none; NaN for one that only operators take. */
static double as_bound(PyObject *bound, double none) {
    if (bound == Py_None) return none;
    if (PyFloat_CheckExact(bound)) return PyFloat_AsDouble(bound);
    long long whole = PyLong_CheckExact(bound) ? PyLong_AsLongLong(bound) : LLONG_MAX;
    if (PyErr_Occurred()) PyErr_Clear();
    /* Others may be rounded on the way. */
    return whole >= -(1LL << 53) && whole <= 1LL << 53 ? (double)whole : NAN;
}

static PyObject *clamped(PyObject *module, PyObject *const *arguments, Py_ssize_t n_arguments) {
    (void)module;
    if (!has_arguments(n_arguments, 4)) return NULL;
    double low = as_bound(arguments[2], -INFINITY), high = as_bound(arguments[3], INFINITY);
    /* Two that are None, cross or are NaN are an error of the caller. */
    if (!(low <= high) || (arguments[2] == Py_None && arguments[3] == Py_None)) return Py_NewRef(Py_None);
    Job job;
    Leaves leaves;
    int is_read = read_leaves(&job, &leaves, CLAMP, arguments[0], arguments[1]);
    if (is_read == 1) {
        job.low = low, job.high = high;
        run(&job);
    }
    return finish_leaves(&job, &leaves, is_read, is_read == 1 ? made_of(&leaves) : NULL);
}

static PyObject *has_at_bounds(PyObject *module, PyObject *const *arguments, Py_ssize_t n_arguments) {
    (void)module;
    if (!has_arguments(n_arguments, 3)) return NULL;
    double low = as_bound(arguments[1], -INFINITY), high = as_bound(arguments[2], INFINITY);
    if (!(low <= high)) return Py_NewRef(Py_None);
    Job job;
    Leaves leaves;
    int is_read = read_leaves(&job, &leaves, COUNT_AT_BOUNDS, arguments[0], Py_None);
    PyObject *result = NULL;
    if (is_read == 1) {
        job.low = low, job.high = high;
        run(&job);
        result = PyBool_FromLong(norm_of(&job, 0, job.n_blocks) > 0);
    }
    return finish_leaves(&job, &leaves, is_read, result);
}

/* A pair of two objects, whose references it takes; NULL where one is. */
static PyObject *pair_of(PyObject *first, PyObject *second) {
    PyObject *pair = first && second ? PyTuple_Pack(2, first, second) : NULL;
    Py_XDECREF(first);
    Py_XDECREF(second);
    return pair;
}

/* Whether a norm that was measured is right: squares of float64 may have overflowed or lost digits. */
static int is_known(const Job *job, const Leaves *leaves, double norm) {
    int may_overflow = job->verb == SUM_SQUARES && leaves->are_wide;
    return !may_overflow || !norm || (norm >= LEAST_NORM && norm < LARGEST_NORM);
}

/* The limit of the norm of a tensor, for one that is divided by a power of its number of elements. */
static double limit_of(double limit, int64_t n, double power) {
    if (!n || !power) return limit;
    return limit * (power == 1 ? (double)n : sqrt((double)n));
}

/* Whether products have all their digits: those of narrow elements and a factor that float32 does not hold,
 * because it is of float64 and below the normal numbers, have not. */
static int keep_digits(const Job *job) {
    for (int64_t i = 0; i < job->n; i++) {
        double factor = job->gradients[i].factor;
        int is_lost = fabs(factor) < FLT_MIN && (double)(float)factor != factor;
        if (is_lost && job->gradients[i].code % PAIRS != FLOAT64) return 0;
    }
    return 1;
}

/* A limit, a number of 0 or more; NaN for others. */
static double as_limit(PyObject *limit) {
    double number = as_bound(limit, NAN);
    /* -0.0 would flip signs. */
    return number >= 0 ? number + 0.0 : NAN;
}

/* A float, which is dropped; errors as those of PyFloat_AsDouble. */
static double as_double(PyObject *number) {
    double result = number ? PyFloat_AsDouble(number) : -1;
    Py_XDECREF(number);
    return result;
}

/* The norm of all tensors of a job that ran: of those of each dtype first, as groups of a list are measured.
 * 0 where it is not known, or with an error of Python. */
static int norm_of_all(const Job *job, const Leaves *leaves, double *norm) {
    if (!leaves->are_mixed) {
        *norm = norm_of(job, 0, job->n_blocks);
        return is_known(job, leaves, *norm);
    }
    double sums[2 * N_DTYPES] = {0}, total = 0;
    int order[2 * N_DTYPES], n = 0;
    for (int64_t i = 0; i < job->n; i++) {
        const Gradient *gradient = job->gradients + i;
        int at = 0;
        while (at < n && order[at] != gradient->code) at++;
        if (at == n) order[n++] = (int)gradient->code;
        for (int64_t j = 0; j < blocks_of(gradient->size); j++) sums[at] += job->parts[gradient->first_block + j];
    }
    PyObject *norms = PyTuple_New(n);
    int is_right = norms != NULL;
    for (int i = 0; is_right && i < n; i++) {
        total += sums[i] = sqrt(sums[i]);
        is_right = is_known(job, leaves, sums[i]) && !PyTuple_SetItem(norms, i, PyFloat_FromDouble(sums[i]));
    }
    /* NaN, before inf, which hypot prefers. */
    *norm = !is_right || isnan(total) ? total : as_double(PyObject_CallObject(torch.hypot, norms));
    Py_XDECREF(norms);
    return is_right && !PyErr_Occurred();
}

static PyObject *clipped(PyObject *module, PyObject *const *arguments, Py_ssize_t n_arguments) {
    (void)module;
    if (!has_arguments(n_arguments, 4)) return NULL;
    int is_given = arguments[3] != Py_None;
    double limit = as_limit(arguments[2]), norm = is_given ? as_limit(arguments[3]) : 0;
    if (isnan(limit) || isnan(norm)) return Py_NewRef(Py_None);
    Job job;
    Leaves leaves;
    PyObject *result = NULL;
    int is_done = read_leaves(&job, &leaves, is_given ? MULTIPLY : SUM_SQUARES, arguments[0], arguments[1]);
    if (is_done == 1 && !is_given) {
        run(&job);
        is_done = norm_of_all(&job, &leaves, &norm);
        if (PyErr_Occurred()) is_done = -1;
    }
    if (is_done == 1) {
        double factor = coefficient_of(norm, limit, 0, leaves.are_wide);
        /* A norm of 0 that is given may be that of elements that are not: 0/0 counts as 0. */
        if (is_given && factor == 1 && !norm && !limit) factor = 0;
        for (int64_t i = 0; i < job.n; i++) job.gradients[i].factor = factor;
        is_done = keep_digits(&job);
    }
    if (is_done == 1) {
        job.verb = MULTIPLY;
        run(&job);
        result = pair_of(made_of(&leaves), number_of(norm, leaves.are_wide, arguments[1]));
        if (!result) is_done = is_refused() ? 0 : -1;
    }
    return finish_leaves(&job, &leaves, is_done, result);
}

static PyObject *clipped_each(PyObject *module, PyObject *const *arguments, Py_ssize_t n_arguments) {
    (void)module;
    Verb verb;
    if (!has_arguments(n_arguments, 5) || !read_order(arguments[3], &verb)) return NULL;
    int has_list = PyList_CheckExact(arguments[2]);
    double limit = has_list ? 0 : as_limit(arguments[2]), power = PyFloat_AsDouble(arguments[4]);
    if (PyErr_Occurred()) return NULL;
    if (isnan(limit)) return Py_NewRef(Py_None);
    Job job;
    Leaves leaves;
    PyObject *norms = NULL, *result = NULL;
    int is_done = read_leaves(&job, &leaves, verb, arguments[0], arguments[1]);
    if (is_done == 1 && has_list && !has_numbers(arguments[2], (Py_ssize_t)job.n)) is_done = -1;
    if (is_done == 1) {
        run(&job);
        norms = parts_of_each(&job);
    }
    for (int64_t i = 0; norms && is_done == 1 && i < job.n; i++) {
        Gradient *gradient = job.gradients + i;
        double norm = number_at(norms, (Py_ssize_t)i);
        double own = has_list ? number_at(arguments[2], (Py_ssize_t)i) : limit_of(limit, gradient->size, power);
        gradient->factor = coefficient_of(norm, own, 0, leaves.are_wide);
        is_done = is_known(&job, &leaves, norm) && !(power && leaves.have_pairs);
    }
    if (is_done == 1) is_done = keep_digits(&job);
    if (PyErr_Occurred()) is_done = -1;
    if (is_done == 1) {
        job.verb = MULTIPLY;
        run(&job);
        result = pair_of(made_of(&leaves), Py_NewRef(norms));
    }
    Py_XDECREF(norms);
    return finish_leaves(&job, &leaves, is_done, result);
}

static PyObject *scaled(PyObject *module, PyObject *const *arguments, Py_ssize_t n_arguments) {
    (void)module;
    if (!has_arguments(n_arguments, 3)) return NULL;
    Job job;
    Leaves leaves;
    PyObject *result = NULL;
    int is_done = read_leaves(&job, &leaves, MULTIPLY, arguments[0], arguments[1]);
    if (is_done == 1) is_done = read_factors(&job, arguments[2]) ? keep_digits(&job) : -1;
    if (is_done == 1) {
        run(&job);
        result = made_of(&leaves);
    }
    return finish_leaves(&job, &leaves, is_done, result);
}

static PyObject *measured(PyObject *module, PyObject *const *arguments, Py_ssize_t n_arguments) {
    (void)module;
    if (!has_arguments(n_arguments, 2)) return NULL;
    Job job;
    Leaves leaves;
    PyObject *result = NULL;
    int is_done = read_leaves(&job, &leaves, SUM_SQUARES, arguments[0], Py_None);
    if (is_done == 1) {
        double norm;
        run(&job);
        is_done = norm_of_all(&job, &leaves, &norm);
        if (PyErr_Occurred()) is_done = -1;
        if (is_done == 1) result = number_of(norm, leaves.are_wide, arguments[1]);
        if (is_done == 1 && !result) is_done = is_refused() ? 0 : -1;
    }
    return finish_leaves(&job, &leaves, is_done, result);
}

static PyObject *measured_each(PyObject *module, PyObject *const *arguments, Py_ssize_t n_arguments) {
    (void)module;
    Verb verb;
    if (!has_arguments(n_arguments, 2) || !read_order(arguments[1], &verb)) return NULL;
    Job job;
    Leaves leaves;
    PyObject *result = NULL;
    int is_done = read_leaves(&job, &leaves, verb, arguments[0], Py_None);
    if (is_done == 1) {
        run(&job);
        result = parts_of_each(&job);
        for (int64_t i = 0; result && i < job.n; i++)
            is_done &= is_known(&job, &leaves, PyFloat_AsDouble(PyList_GetItem(result, (Py_ssize_t)i)));
        if (!is_done) Py_CLEAR(result);
    }
    return finish_leaves(&job, &leaves, is_done, result);
}

static PyObject *dots(PyObject *module, PyObject *const *arguments, Py_ssize_t n_arguments) {
    (void)module;
    if (!has_arguments(n_arguments, 2)) return NULL;
    Job job;
    Leaves leaves, others;
    PyObject *result = NULL;
    int is_done = read_pairs(&job, &leaves, &others, DOT, arguments, Py_None);
    if (is_done == 1) {
        run(&job);
        result = parts_of_each(&job);
    }
    free_leaves(&others);
    return finish_leaves(&job, &leaves, is_done, result);
}

static PyObject *combined(PyObject *module, PyObject *const *arguments, Py_ssize_t n_arguments) {
    (void)module;
    if (!has_arguments(n_arguments, 5)) return NULL;
    Job job;
    Leaves leaves, others;
    PyObject *result = NULL;
    int is_done = read_pairs(&job, &leaves, &others, COMBINE, arguments, arguments[2]);
    if (is_done == 1 && !(read_factors(&job, arguments[3]) && has_numbers(arguments[4], (Py_ssize_t)job.n))) is_done = -1;
    for (int64_t i = 0; is_done == 1 && i < job.n; i++)
        job.gradients[i].other_factor = number_at(arguments[4], (Py_ssize_t)i);
    if (PyErr_Occurred()) is_done = -1;
    if (is_done == 1) {
        run(&job);
        result = made_of(&leaves);
    }
    free_leaves(&others);
    return finish_leaves(&job, &leaves, is_done, result);
}

typedef struct {
    uint64_t start, end;
} Bytes;

static int compare_starts(const void *left, const void *right) {
    uint64_t a = ((const Bytes *)left)->start, b = ((const Bytes *)right)->start;
    return (a > b) - (a < b);
}

static PyObject *are_apart(PyObject *module, PyObject *const *arguments, Py_ssize_t n_arguments) {
    (void)module;
    if (!has_arguments(n_arguments, 2)) return NULL;
    Py_ssize_t n = PyList_Size(arguments[0]), kept = 0;
    if (n < 0 || PyList_Size(arguments[1]) != n) {
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

static PyObject *set_portable(PyObject *module, PyObject *flag) {
    (void)module;
    int is_portable = PyObject_IsTrue(flag);
    if (is_portable < 0) return NULL;
    loops_of = is_portable ? plain_loops : fastest_loops();
    return Py_NewRef(Py_None);
}

static PyObject *know(PyObject *module, PyObject *const *arguments, Py_ssize_t n_arguments) {
    (void)module;
    PyObject **const known[] = {
        &torch.tensor, &torch.parameter, &torch.codes, &torch.number, &torch.wide_number,
        &torch.is_recording, &torch.n_threads, &torch.hypot,
    };
    enum { N_KNOWN = sizeof known / sizeof *known };
    if (!has_arguments(n_arguments, N_KNOWN + 1)) return NULL;
    const DLPackExchange *exchange = NULL;
    PyObject *capsule = arguments[N_KNOWN];
    if (capsule != Py_None && !(exchange = PyCapsule_GetPointer(capsule, "dlpack_exchange_api"))) return NULL;
    torch.view = exchange && exchange->major == 1 ? exchange->view : NULL;
    for (int i = 0; i < N_KNOWN; i++) *known[i] = Py_NewRef(arguments[i]);
    return Py_NewRef(Py_None);
}

static PyObject *share(PyObject *module, PyObject *address) {
    (void)module;
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
    {"clamp_", FAST(clamp), NULL},
    {"clamped", FAST(clamped), NULL},
    {"has_at_bounds", FAST(has_at_bounds), NULL},
    {"clipped", FAST(clipped), NULL},
    {"scaled", FAST(scaled), NULL},
    {"clipped_each", FAST(clipped_each), NULL},
    {"measured", FAST(measured), NULL},
    {"measured_each", FAST(measured_each), NULL},
    {"dots", FAST(dots), NULL},
    {"combined", FAST(combined), NULL},
    {"are_apart", FAST(are_apart), NULL},
    {"set_portable", set_portable, METH_O, NULL},
    {"know", FAST(know), NULL},
    {"share", share, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_native", "Loops over CPU gradients.", -1, methods, NULL, NULL, NULL, NULL,
};

/* 0 with an error of Python. */
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
