/* Out-of-place clipping of plain tensors that need no derivative. `tritonclip/functional/c_loops.py` calls these
 * functions, and `_native.pyi` describes them.
 */
#pragma once

#include <limits.h>

#include "tensors.h"

/* Ends a function of leaves. It returns `made`, and takes its reference; or None if operators have to serve the
 * leaves; or NULL with an error of Python. */
static PyObject *finish_leaves(Job *job, Leaves *leaves, int is_done, PyObject *made) {
    free_job(job);
    free_leaves(leaves);
    return is_done ? made : Py_NewRef(Py_None);
}

/* A bound as a number, or `none` if there is no bound, or NaN for a bound that only operators accept. */
static double as_bound(PyObject *bound, double none) {
    if (bound == Py_None) return none;
    if (PyFloat_CheckExact(bound)) return PyFloat_AsDouble(bound);
    long long whole = PyLong_CheckExact(bound) ? PyLong_AsLongLong(bound) : LLONG_MAX;
    if (PyErr_Occurred()) PyErr_Clear();
    /* Larger integers might be rounded. */
    return whole >= -(1LL << 53) && whole <= 1LL << 53 ? (double)whole : NAN;
}

static PyObject *clamped(PyObject *module, PyObject *const *arguments, Py_ssize_t n_arguments) {
    if (!has_arguments(n_arguments, 4)) return NULL;
    double low = as_bound(arguments[2], -INFINITY), high = as_bound(arguments[3], INFINITY);
    /* Bounds that are both None, cross or are NaN are left to the operators, which raise the errors. */
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

/* A pair of two objects, whose references it takes; NULL if one of them is NULL. */
static PyObject *pair_of(PyObject *first, PyObject *second) {
    PyObject *pair = first && second ? PyTuple_Pack(2, first, second) : NULL;
    Py_XDECREF(first);
    Py_XDECREF(second);
    return pair;
}

/* Whether a measured norm is right; squares of float64 may have overflowed or lost digits. */
static int is_known(const Job *job, const Leaves *leaves, double norm) {
    return job->verb != SUM_SQUARES || !leaves->are_wide || !is_extreme(norm);
}

/* The limit of a tensor's norm, from the limit of this norm divided by a power of the number of elements. */
static double limit_of(double limit, int64_t n, double power) {
    if (!n || !power) return limit;
    return limit * (power == 1 ? (double)n : sqrt((double)n));
}

/* A limit of 0 or more as a number; NaN for anything else. */
static double as_limit(PyObject *limit) {
    double number = as_bound(limit, NAN);
    /* -0.0 would flip signs. */
    return number >= 0 ? number + 0.0 : NAN;
}

/* The value of a float, whose reference is dropped; errors are those of PyFloat_AsDouble. */
static double as_double(PyObject *number) {
    double result = number ? PyFloat_AsDouble(number) : -1;
    Py_XDECREF(number);
    return result;
}

/* The norm of all tensors of a job that ran, joined from one norm for each dtype, as lists are measured in groups.
 * Returns 0 if the norm is not known, or with an error of Python. */
static int norm_of_all(const Job *job, const Leaves *leaves, double *norm) {
    if (!leaves->are_mixed) {
        *norm = norm_of(job, 0, job->n_parts);
        return is_known(job, leaves, *norm);
    }
    double sums[2 * N_DTYPES] = {0}, total = 0;
    int order[2 * N_DTYPES], n = 0;
    for (int64_t i = 0; i < job->n; i++) {
        const Gradient *gradient = job->gradients + i;
        int at = 0;
        while (at < n && order[at] != gradient->code) at++;
        if (at == n) order[n++] = (int)gradient->code;
        for (int64_t j = 0; j < blocks_of(gradient->size); j++) sums[at] += job->parts[gradient->first_part + j];
    }
    PyObject *norms = PyTuple_New(n);
    int is_right = norms != NULL;
    for (int i = 0; is_right && i < n; i++) {
        total += sums[i] = sqrt(sums[i]);
        is_right = is_known(job, leaves, sums[i]) && !PyTuple_SetItem(norms, i, PyFloat_FromDouble(sums[i]));
    }
    /* NaN has to win over inf, but hypot prefers inf. */
    *norm = !is_right || isnan(total) ? total : as_double(PyObject_CallObject(torch.hypot, norms));
    Py_XDECREF(norms);
    return is_right && !PyErr_Occurred();
}

static PyObject *clipped(PyObject *module, PyObject *const *arguments, Py_ssize_t n_arguments) {
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
        /* A given norm of 0 may come with elements that are not 0, so 0/0 counts as 0. */
        if (is_given && factor == 1 && !norm && !limit) factor = 0;
        for (int64_t i = 0; i < job.n; i++) job.gradients[i].factor = factor;
    }
    if (is_done == 1) {
        job.verb = MULTIPLY;
        run(&job);
        result = pair_of(made_of(&leaves), tensor_of(norm, leaves.are_wide, arguments[1]));
        if (!result) is_done = is_refused() ? 0 : -1;
    }
    return finish_leaves(&job, &leaves, is_done, result);
}

static PyObject *clipped_each(PyObject *module, PyObject *const *arguments, Py_ssize_t n_arguments) {
    Verb verb;
    if (!has_arguments(n_arguments, 5) || !read_order(arguments[3], &verb)) return NULL;
    double limit = as_limit(arguments[2]), power = PyFloat_AsDouble(arguments[4]);
    if (PyErr_Occurred()) return NULL;
    if (isnan(limit)) return Py_NewRef(Py_None);
    Job job;
    Leaves leaves;
    PyObject *norms = NULL, *result = NULL;
    int is_done = read_leaves(&job, &leaves, verb, arguments[0], arguments[1]);
    if (is_done == 1) {
        run(&job);
        norms = parts_of_each(&job);
    }
    for (int64_t i = 0; norms && is_done == 1 && i < job.n; i++) {
        Gradient *gradient = job.gradients + i;
        double norm = PyFloat_AsDouble(PyList_GetItem(norms, (Py_ssize_t)i));
        gradient->factor = coefficient_of(norm, limit_of(limit, gradient->size, power), 0, leaves.are_wide);
        is_done = is_known(&job, &leaves, norm) && !(power && leaves.have_pairs);
    }
    if (PyErr_Occurred()) is_done = -1;
    if (is_done == 1) {
        job.verb = MULTIPLY;
        run(&job);
        result = pair_of(made_of(&leaves), Py_NewRef(norms));
    }
    Py_XDECREF(norms);
    return finish_leaves(&job, &leaves, is_done, result);
}

static PyObject *measured(PyObject *module, PyObject *const *arguments, Py_ssize_t n_arguments) {
    if (!has_arguments(n_arguments, 2)) return NULL;
    Job job;
    Leaves leaves;
    PyObject *result = NULL;
    int is_done = read_leaves(&job, &leaves, SUM_SQUARES, arguments[0], NULL);
    if (is_done == 1) {
        double norm;
        run(&job);
        is_done = norm_of_all(&job, &leaves, &norm);
        if (PyErr_Occurred()) is_done = -1;
        if (is_done == 1) result = tensor_of(norm, leaves.are_wide, arguments[1]);
        if (is_done == 1 && !result) is_done = is_refused() ? 0 : -1;
    }
    return finish_leaves(&job, &leaves, is_done, result);
}
