/* A compiled kernel for a GPU, and its launch by one call of the driver, whose address Python has found. */
#ifndef TRITONCLIP_KERNEL_H
#define TRITONCLIP_KERNEL_H

#include <Python.h>

#include "tensors.h"

/* The most arguments of a kernel, and the null pointers that Triton adds for memory that our kernels do not need. */
enum { ARGUMENTS = 30, SCRATCH = 2 };
/* The kinds of arguments; an absent argument is None, and is no parameter of the kernel. */
enum { ABSENT = '-', POINTER = 'p', INT32 = 'i', INT64 = 'l' };

/* cuLaunchKernel takes a grid and blocks of three dimensions each, shared bytes, a stream, and parameter addresses. */
typedef int (*LaunchKernel)(
    void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);

typedef struct {
    LaunchKernel launch;
    void *function;
    unsigned programs, threads, shared;
    int n;
    char kinds[ARGUMENTS + 1];
} Kernel;

static const char KERNEL[] = "kernel of tritonclip";

static void free_kernel(PyObject *capsule) {
    Py_XDECREF(PyCapsule_GetContext(capsule));
    free(PyCapsule_GetPointer(capsule, KERNEL));
}

static PyObject *kernel(PyObject *module, PyObject *const *arguments, Py_ssize_t n_arguments) {
    if (!has_arguments(n_arguments, 7)) return NULL;
    void *launch = read_address(arguments[0], 0), *function = launch ? read_address(arguments[1], 0) : NULL;
    unsigned sizes[3];
    for (int i = 0; function && i < 3; i++) {
        unsigned long size = PyLong_AsUnsignedLong(arguments[2 + i]);
        sizes[i] = (unsigned)size;
        if (size > INT32_MAX) function = NULL;
    }
    const char *kinds = function ? PyBytes_AsString(arguments[5]) : NULL;
    if (!kinds || strlen(kinds) > ARGUMENTS || kinds[strspn(kinds, "-pil")]) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_ValueError, "expected sizes of a launch, and kinds of arguments");
        return NULL;
    }
    Kernel *own = calloc(1, sizeof *own);
    PyObject *capsule = own ? PyCapsule_New(own, KERNEL, free_kernel) : PyErr_NoMemory();
    if (!capsule) {
        free(own);
        return NULL;
    }
    memcpy(&own->launch, &launch, sizeof launch);
    own->function = function, own->programs = sizes[0], own->threads = sizes[1], own->shared = sizes[2];
    own->n = (int)strlen(strcpy(own->kinds, kinds));
    /* Keep the owner of the function alive, because the driver unloads the function with it. */
    PyCapsule_SetContext(capsule, Py_NewRef(arguments[6]));
    return capsule;
}

/* Reads an argument as the bits of a parameter; returns 0, maybe with an error of Python, if its kind is wrong. */
static int read_parameter(PyObject *argument, char kind, uint64_t *bits) {
    if (kind == POINTER) {
        PyObject *address = PyLong_Check(argument) ? Py_NewRef(argument) : call(argument, DATA_PTR);
        *bits = address ? PyLong_AsUnsignedLongLong(address) : 0;
        Py_XDECREF(address);
        return !PyErr_Occurred();
    }
    if (kind == INT64 && PyFloat_Check(argument)) {
        double number = PyFloat_AsDouble(argument);
        memcpy(bits, &number, sizeof number);
        return 1;
    }
    int64_t number = PyLong_AsLongLong(argument);
    /* For 32 bits, the driver reads the first four bytes, which are the lower half on every platform of the driver. */
    *bits = (uint64_t)number;
    return !PyErr_Occurred() && (kind == INT64 || number == (int32_t)number);
}

static PyObject *launch(PyObject *module, PyObject *const *arguments, Py_ssize_t n_arguments) {
    Kernel *own = n_arguments ? PyCapsule_GetPointer(arguments[0], KERNEL) : NULL;
    if (!own || !has_arguments(n_arguments, 2 + own->n)) return NULL;
    void *stream = PyLong_AsVoidPtr(arguments[1]);
    uint64_t values[ARGUMENTS + SCRATCH] = {0};
    void *parameters[ARGUMENTS + SCRATCH];
    int n = 0, fits = !PyErr_Occurred();
    for (int i = 0; fits && i < own->n; i++) {
        fits = (own->kinds[i] == ABSENT) == (arguments[2 + i] == Py_None);
        if (fits && own->kinds[i] != ABSENT) fits = read_parameter(arguments[2 + i], own->kinds[i], values + n++);
    }
    if (!fits) return PyErr_Occurred() ? NULL : Py_NewRef(Py_False);
    for (int i = 0; i < n + SCRATCH; i++) parameters[i] = values + i;
    /* If the queue is full, the driver waits, maybe for another thread of Python. */
    PyThreadState *state = PyEval_SaveThread();
    int error = own->launch(
        own->function, own->programs, 1, 1, own->threads, 1, 1, own->shared, stream, parameters, NULL);
    PyEval_RestoreThread(state);
    return PyBool_FromLong(!error);
}

#endif
