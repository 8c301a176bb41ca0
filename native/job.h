/* One verb on a list of gradients, in one thread or in several.
 *
 * Norms are measured a row at a time, or a block at a time for long rows, and added up in the order of the
 * blocks, so neither the number of threads nor their pace changes a bit of the result. Each job is one parallel
 * region in PyTorch's threads.
 */
#ifndef TRITONCLIP_JOB_H
#define TRITONCLIP_JOB_H

#include <stdlib.h>

#include "dispatch.h"

/* The elements of a block, which has one part of the norm, and the least elements of a task. A thread that has
 * to wait for its turn delays the others by one task. With tasks of 131,072 and of 32,768 elements, two threads
 * add up 2^21 squares of float32 in 230 and 203 us, and multiply 2^19 bfloat16 in 67 and 59 us. (AMD EPYC.) */
#define BLOCK 32768
/* The most tasks of a thread; long tasks read memory in order. With tasks of one block, 48 million float32 are
 * measured in 4.2 ms and bfloat16 in 2.2 ms; with 32, 16 and 8 tasks per thread, in 3.95, 3.86 and 3.89 ms, and
 * in 1.83, 1.85 and 1.81 ms. (AMD EPYC with AVX-512, 2 threads.) */
#define TASKS 16
/* The least elements of a list that threads may share. One thread measures 2^16, 2^17 and 2^18 float32 in 3.5,
 * 6.8 and 14.1 us, and two in 2.9, 4.3 and 8.1 us; one multiplies them in 4.1, 8.1 and 16.1 us, and two in 2.9,
 * 4.9 and 9.1 us. (AMD EPYC with AVX-512, caches warm.) On an older processor, one and two threads measure 2^17
 * in 16 and 15 us, and multiply them in 13 and 14 us. */
#define SHARED 131072
/* The elements of a gradient from which PyTorch's operators take threads (at::internal::GRAIN_SIZE). If other
 * processes keep the cores busy, a thread may have to wait for milliseconds. So lists of smaller gradients, for
 * which PyTorch never waits, are left to one thread if they have less than twice SHARED elements. */
#define GRAIN 32768
/* The most gradients, and blocks, of a list that needs no memory from the allocator. */
#define FEW 64

/* Runs a function with one argument in several threads at once, and waits for all of them. It is GOMP_parallel
 * of the OpenMP library that PyTorch uses. */
typedef void (*Parallel)(void (*function)(void *), void *argument, unsigned threads, unsigned flags);
static Parallel parallel = NULL;

typedef struct {
    /* The code of the dtype, plus PAIRS for complex numbers. */
    long code;
    const char *elements;
    /* The memory to write to: the elements themselves, or as many others. */
    char *target;
    /* Rows that lie end to end, each with its norm and its factor: one row of all elements, or the units. */
    int64_t rows, length, size;
    /* The index of the first part of this gradient among the parts of the list. */
    int64_t first_part;
    /* The memory for the 2-norms of rows, if each fits a block; NULL if parts are measured. */
    double *norms;
    /* For MULTIPLY, the factor of each row; rows whose factor is 1 are copied, unless they are the target. */
    const double *factors;
    /* The factor of the only row. */
    double factor;
} Gradient;

/* The place of an element: its gradient, and its index there. */
typedef struct {
    int64_t gradient, start;
} Place;

typedef struct {
    Verb verb;
    long threads;
    int64_t n, n_rows, n_parts, n_elements;
    Gradient *gradients;
    /* For verbs that measure: the part of every block, for rows without memory for their norms. */
    double *parts;
    /* The bounds of CLAMP. */
    double low, high;
    /* The start of each task; the last place is the end. */
    Place *places;
    int64_t n_tasks, next_task;
    /* The mode of the calling thread, because the threads that share the job have other modes. */
    uint64_t float_mode;
    /* The memory of short lists. */
    Gradient few_gradients[FEW];
    double few_parts[FEW];
} Job;

static int64_t blocks_of(int64_t size) { return (size + BLOCK - 1) / BLOCK; }

/* Makes a job with room for n gradients; returns 0 if there is no memory. */
static int make_job(Job *job, Verb verb, long threads, int64_t n) {
    job->verb = verb, job->threads = threads;
    job->n = job->n_rows = job->n_parts = job->n_elements = job->n_tasks = job->next_task = 0;
    job->gradients = job->few_gradients, job->parts = job->few_parts, job->places = NULL;
    return n <= FEW || (job->gradients = malloc(sizeof(Gradient) * (size_t)n));
}

/* Adds a gradient to a job that has room for it; verbs write to it in place. If it has several rows, and each
 * fits a block, it has no parts. */
static Gradient *add_gradient(Job *job, long code, char *elements, int64_t rows, int64_t length) {
    Gradient *gradient = job->gradients + job->n++;
    gradient->code = code;
    gradient->elements = gradient->target = elements;
    gradient->rows = rows, gradient->length = length, gradient->size = rows * length;
    gradient->first_part = job->n_parts;
    gradient->norms = NULL, gradient->factors = &gradient->factor;
    if (rows == 1 || length > BLOCK) job->n_parts += rows * blocks_of(length);
    job->n_rows += rows, job->n_elements += gradient->size;
    return gradient;
}

/* Makes room for the parts of a norm, once all gradients were added; returns 0 if there is no memory. */
static int make_parts(Job *job) {
    if (job->verb >= MULTIPLY || job->n_parts <= FEW) return 1;
    return (job->parts = malloc(sizeof(double) * (size_t)job->n_parts)) != NULL;
}

static void free_job(Job *job) {
    if (job->gradients != job->few_gradients) free(job->gradients);
    if (job->parts != job->few_parts) free(job->parts);
    free(job->places);
}

/* The norm of some parts of a job that ran: the largest part, or NaN if there is one; or from the sum of the
 * parts. */
static double norm_of(const Job *job, int64_t from, int64_t to) {
    double norm = 0;
    for (const double *part = job->parts + from; part < job->parts + to; part++)
        if (job->verb != LARGEST)
            norm += *part;
        else if (*part > norm || *part != *part)
            norm = *part;
    return job->verb == SUM_SQUARES ? sqrt(norm) : norm;
}

/* Brings a finite bound into the range of a dtype. */
static double in_range(double bound, const Loops *loops) {
    if (isinf(bound)) return bound;
    return fmin(fmax(bound, -loops->largest), loops->largest);
}

/* The number of elements in the block that starts here in a gradient: whole rows, or a part of a long one. */
static int64_t block_at(const Gradient *gradient, int64_t start) {
    int64_t left = gradient->size - start, length = gradient->length;
    if (left <= BLOCK) return left;
    if (length <= BLOCK) return BLOCK / length * length;
    left = length - start % length;
    return left < BLOCK ? left : BLOCK;
}

static void do_block(Job *job, const Gradient *gradient, int64_t start, int64_t n) {
    const Loops *loops = loops_of + gradient->code % PAIRS;
    int64_t length = gradient->length, row = start ? start / length : 0, in_row = start - row * length;
    int64_t at = start * loops->itemsize;
    double *part = job->parts + gradient->first_part + row * blocks_of(length) + in_row / BLOCK;
    if (n < length) length = n;
    for (; n; n -= length, at += length * loops->itemsize, row++) {
        const char *x = gradient->elements + at;
        char *y = gradient->target + at;
        if (job->verb < MULTIPLY && gradient->norms)
            gradient->norms[row] = sqrt(loops->measure(x, length, job->verb));
        else if (job->verb < MULTIPLY)
            *part = loops->measure(x, length, job->verb);
        else if (job->verb == CLAMP && x == y)
            loops->clamp(y, length, job->low, job->high);
        else if (job->verb == CLAMP)
            loops->clamp_to(x, y, length, in_range(job->low, loops), in_range(job->high, loops));
        else if (gradient->factors[row] != 1.0)
            loops->multiply(x, y, length, gradient->factors[row]);
        else if (x != y)
            memcpy(y, x, (size_t)(length * loops->itemsize));
    }
}

/* Does all blocks between two places; gradients without an address are left out. */
static void do_blocks(Job *job, Place from, Place to) {
    for (int64_t i = from.gradient; i <= to.gradient && i < job->n; i++) {
        const Gradient *gradient = job->gradients + i;
        int64_t stop = i == to.gradient ? to.start : gradient->size, n;
        if (!gradient->elements) continue;
        for (int64_t start = i == from.gradient ? from.start : 0; start < stop; start += n)
            do_block(job, gradient, start, n = block_at(gradient, start));
    }
}

/* Does tasks until none is left; every thread runs this. */
static void do_tasks(void *argument) {
    Job *job = argument;
    uint64_t own_mode = float_mode();
    set_float_mode(job->float_mode);
    int64_t task;
    while ((task = __atomic_fetch_add(&job->next_task, 1, __ATOMIC_RELAXED)) < job->n_tasks)
        do_blocks(job, job->places[task], job->places[task + 1]);
    set_float_mode(own_mode);
}

/* Cuts the list into tasks; returns 0 if there is no memory for them. */
static int cut(Job *job) {
    /* Two divisions, because a product of threads and tasks might overflow. */
    int64_t least = job->n_elements / TASKS / job->threads;
    if (least < BLOCK) least = BLOCK;
    job->places = malloc(sizeof(Place) * (size_t)(job->n_elements / least + 2));
    if (!job->places) return 0;
    int64_t in_task = least;
    for (int64_t i = 0; i < job->n; i++)
        for (int64_t start = 0, n; start < job->gradients[i].size; start += n, in_task += n) {
            n = block_at(job->gradients + i, start);
            if (in_task < least) continue;
            job->places[job->n_tasks++] = (Place){i, start};
            in_task = 0;
        }
    job->places[job->n_tasks] = (Place){job->n, 0};
    return 1;
}

static void run_job(Job *job) {
    long threads = job->threads;
    if (threads > 1 && parallel && job->n_elements >= SHARED && (job->places || cut(job))) {
        if (threads > job->n_tasks) threads = (long)job->n_tasks;
        job->next_task = 0;
        job->float_mode = float_mode();
        parallel(do_tasks, job, (unsigned)threads, 0);
    } else
        do_blocks(job, (Place){0, 0}, (Place){job->n, 0});
}

#endif
