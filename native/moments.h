/* Moving averages and moments of norms, for adaptive limits: `tritonclip/rules/moments.py` calls them,
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
    double *rows = PyLong_AsVoidPtr(arguments[0]), numbers[5];
    Py_ssize_t n = PyList_Size(arguments[1]);
    for (int i = 0; i < 5; i++) numbers[i] = PyFloat_AsDouble(arguments[2 + i]);
    if (PyErr_Occurred()) return NULL;
    Averaging by = {numbers[0], numbers[1], numbers[2], numbers[3], numbers[4]};
    PyObject *limits = PyList_New(n);
    for (Py_ssize_t i = 0; limits && i < n; i++) {
        double norm = PyFloat_AsDouble(PyList_GetItem(arguments[1], i));
        PyObject *limit = PyErr_Occurred() ? NULL : PyFloat_FromDouble(advance_average(rows + 2 * i, norm, &by));
        if (!limit || PyList_SetItem(limits, i, limit)) Py_CLEAR(limits);
    }
    return limits;
}

static PyObject *mean_and_deviation(PyObject *module, PyObject *const *arguments, Py_ssize_t n_arguments) {
    (void)module;
    if (!has_arguments(n_arguments, 2)) return NULL;
    const double *numbers = PyLong_AsVoidPtr(arguments[0]);
    Py_ssize_t n = PyLong_AsSsize_t(arguments[1]);
    if (PyErr_Occurred()) return NULL;
    double sum = 0, squares = 0;
    for (Py_ssize_t i = 0; i < n; i++) sum += numbers[i];
    double mean = sum / (double)n;
    for (Py_ssize_t i = 0; i < n; i++) squares += (numbers[i] - mean) * (numbers[i] - mean);
    return Py_BuildValue("(dd)", mean, sqrt(squares / (double)(n - 1)));
}
