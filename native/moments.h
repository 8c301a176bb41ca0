/* Moving averages, quantiles and moments of norms, for adaptive limits: `tritonclip/rules/host_loops.py` calls them,
 * and has the same in Python.
 */
#pragma once

#include <Python.h>

typedef struct {
    /* Of the warm-up, max_norm over the norm of all. */
    double share, ratio, decay, warmup, max_norm;
} Averaging;

/* The limit of a norm; advances the average and the number of norms behind `row`. */
static double advance_average(double *row, double norm, const Averaging *by) {
    int warm = row[1] >= by->warmup;
    /* For a norm of inf, any finite limit gives the coefficient 0. */
    double limit = norm == INFINITY ? by->max_norm : norm * by->share;
    if (warm) limit = by->max_norm < by->ratio * row[0] ? by->max_norm : by->ratio * row[0];
    if (norm > 0 && norm < INFINITY && limit > 0) {
        double clipped = limit < norm ? limit : norm;
        double least = clipped < row[0] ? clipped : row[0];
        row[0] = warm ? by->decay * row[0] + (1 - by->decay) * clipped : least;
        row[1] += 1;
    }
    return limit;
}

static PyObject *advance_averages(PyObject *module, PyObject *const *arguments, Py_ssize_t n_arguments) {
    (void)module;
    if (!has_arguments(n_arguments, 7)) return NULL;
    double numbers[5];
    Py_ssize_t n = read_doubles(arguments + 2, 5, numbers) ? length_of(arguments[1]) : -1;
    double *rows = n < 0 ? NULL : read_address(arguments[0], !n);
    if (PyErr_Occurred()) return NULL;
    Averaging by = {numbers[0], numbers[1], numbers[2], numbers[3], numbers[4]};
    PyObject *limits = PyList_New(n);
    for (Py_ssize_t i = 0; limits && i < n; i++) {
        double norm;
        int is_read = read_number(arguments[1], i, &norm);
        PyObject *limit = is_read ? PyFloat_FromDouble(advance_average(rows + 2 * i, norm, &by)) : NULL;
        if (!limit || PyList_SetItem(limits, i, limit)) Py_CLEAR(limits);
    }
    return limits;
}

/* Moves the k-th smallest of n numbers to x[k], smaller ones before it and larger ones behind. */
static void select_nth(double *x, Py_ssize_t n, Py_ssize_t k) {
    for (Py_ssize_t first = 0, last = n - 1; first < last;) {
        double pivot = x[k];
        Py_ssize_t i = first, j = last;
        while (i <= j) {
            while (x[i] < pivot) i++;
            while (pivot < x[j]) j--;
            if (i > j) break;
            double swapped = x[i];
            x[i++] = x[j];
            x[j--] = swapped;
        }
        if (j < k) first = i;
        if (k < i) last = j;
    }
}

/* The quantile of n numbers, interpolated as torch.quantile does it, in any order; inf of none. */
static double quantile_of(double *x, Py_ssize_t n, double q) {
    if (n == 0) return INFINITY;
    double rank = q * (double)(n - 1);
    Py_ssize_t k = (Py_ssize_t)rank;
    double weight = rank - (double)k;
    select_nth(x, n, k);
    double low = x[k], high = k + 1 < n ? x[k + 1] : low;
    for (Py_ssize_t i = k + 2; i < n; i++)
        if (x[i] < high) high = x[i];
    return weight < 0.5 ? low + weight * (high - low) : high - (high - low) * (1 - weight);
}

static PyObject *advance_quantiles(PyObject *module, PyObject *const *arguments, Py_ssize_t n_arguments) {
    (void)module;
    if (!has_arguments(n_arguments, 5)) return NULL;
    double q, max_norm;
    if (!read_doubles(arguments + 2, 1, &q) || !read_doubles(arguments + 4, 1, &max_norm)) return NULL;
    Py_ssize_t window = PyLong_AsSsize_t(arguments[3]), n = PyErr_Occurred() ? -1 : length_of(arguments[1]);
    double *row = n < 0 ? NULL : read_address(arguments[0], !n);
    if (!PyErr_Occurred() && !(q >= 0 && q <= 1 && window >= 1 && window <= MOST))
        PyErr_SetString(PyExc_ValueError, "expected a quantile from 0 to 1 of a window of 1 norm or more");
    if (PyErr_Occurred()) return NULL;
    double *known = PyMem_Malloc((size_t)window * sizeof *known);
    if (!known) return PyErr_NoMemory();
    PyObject *limits = PyList_New(n);
    for (Py_ssize_t i = 0; limits && i < n; i++, row += window + 1) {
        double norm;
        int is_read = read_number(arguments[1], i, &norm);
        /* A number of norms that none can be, as in a damaged checkpoint, would point beyond the row. */
        if (!(row[window] >= 0 && row[window] < 0x1p53)) row[window] = 0;
        if (is_read && norm > 0 && norm < INFINITY) {
            row[(Py_ssize_t)row[window] % window] = norm;
            row[window] += 1;
        }
        Py_ssize_t n_known = row[window] < (double)window ? (Py_ssize_t)row[window] : window;
        memcpy(known, row, (size_t)n_known * sizeof *known);
        double quantile = quantile_of(known, n_known, q);
        PyObject *limit = is_read ? PyFloat_FromDouble(max_norm < quantile ? max_norm : quantile) : NULL;
        if (!limit || PyList_SetItem(limits, i, limit)) Py_CLEAR(limits);
    }
    PyMem_Free(known);
    return limits;
}

static PyObject *mean_and_deviation(PyObject *module, PyObject *const *arguments, Py_ssize_t n_arguments) {
    (void)module;
    if (!has_arguments(n_arguments, 2)) return NULL;
    Py_ssize_t n = PyLong_AsSsize_t(arguments[1]);
    if (n < 2 && !PyErr_Occurred()) PyErr_Format(PyExc_ValueError, "expected 2 numbers or more, got %zd", n);
    const double *numbers = PyErr_Occurred() ? NULL : read_address(arguments[0], 0);
    if (!numbers) return NULL;
    double sum = 0, squares = 0;
    for (Py_ssize_t i = 0; i < n; i++) sum += numbers[i];
    double mean = sum / (double)n;
    for (Py_ssize_t i = 0; i < n; i++) squares += (numbers[i] - mean) * (numbers[i] - mean);
    return Py_BuildValue("(dd)", mean, sqrt(squares / (double)(n - 1)));
}
