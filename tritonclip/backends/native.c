/* Loops over CPU gradients: sums of squares, products and clamps, each of a whole list in one call.
 *
 * A gradient is an address and a number of contiguous elements. Sums of squares are added up in
 * float64, a block at a time, in the order of the blocks: neither the number of threads nor their
 * pace changes a bit. Large lists are shared by the threads of PyTorch's own pool, in one parallel
 * region a call.
 *
 * Of Python only the stable ABI is used, and nothing of PyTorch: one binary serves all versions.
 */
#include <Python.h>

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifndef __GNUC__
#error "needs vector types, as GCC and Clang have"
#endif
#ifdef __x86_64__
#include <cpuid.h>
#include <immintrin.h>
#define HAS_AVX2 1
#define AVX2 __attribute__((target("avx2,fma,f16c")))
#else
#define HAS_AVX2 0
#endif
#define INLINE static inline __attribute__((always_inline))

/* Of the functions and their arguments, for `native_loops`. */
#define INTERFACE 1
/* Elements whose squares have a sum of their own, and of a task, at least: a thread that has to wait
 * for its turn delays the others by one task. Tasks of 131,072 and of 32,768 elements: two threads
 * add up 2^21 squares of float32 in 230 and 203 us, and multiply 2^19 bfloat16 in 67 and 59. (AMD
 * EPYC.) */
#define BLOCK 32768
/* Elements of a list from which threads share it. In one thread and in two 2^17, 2^19 and 2^21
 * float32 are measured in 16, 61 and 357 us, and in 15, 42 and 203; multiplied in 13, 42 and 289, and
 * in 14, 37 and 179. (AMD EPYC, caches warm.) */
#define SHARED 262144
/* Elements from which a call lets other threads of Python run. */
#define UNLOCKED 16384
/* Elements that are compared with the bounds before any of them is written: a core's nearest cache
 * holds them meanwhile. */
#define COMPARED 2048
/* Elements of a vector, and sums that a loop adds up side by side. */
#define WIDE 8
#define LANES 32
/* Squares of half types that each lane adds up in float32. */
#define RUN 8
/* Gradients of a list that needs no memory from the allocator. */
#define FEW 64

enum { FLOAT16, BFLOAT16, FLOAT32, FLOAT64 };

typedef float Floats __attribute__((vector_size(4 * WIDE)));
typedef double Doubles __attribute__((vector_size(8 * WIDE)));
typedef int32_t FloatsMask __attribute__((vector_size(4 * WIDE)));
typedef int64_t DoublesMask __attribute__((vector_size(8 * WIDE)));

static float as_float(uint32_t bits) {
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

static uint32_t as_bits(float number) {
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    return bits;
}

static float widen_bfloat16(uint16_t bits) { return as_float((uint32_t)bits << 16); }

/* To the nearest, ties to even. */
static uint16_t narrow_bfloat16(float number) {
    uint32_t bits = as_bits(number);
    if (number != number) return (uint16_t)((bits | 0x7fc00000u) >> 16);
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

static float widen_float16(uint16_t bits) {
    uint32_t sign = (uint32_t)(bits & 0x8000u) << 16, rest = (uint32_t)(bits & 0x7fffu) << 13;
    if (rest >= 31u << 23) return as_float(sign | 0x7f800000u | rest);
    if (rest >= 1u << 23) return as_float(sign | (rest + (112u << 23)));
    /* A subnormal one, as the difference of two normal floats. */
    return as_float(sign | as_bits(as_float(rest + (113u << 23)) - as_float(113u << 23)));
}

/* To the nearest, ties to even. */
static uint16_t narrow_float16(float number) {
    uint32_t bits = as_bits(number), sign = bits >> 16 & 0x8000u, rest = bits & 0x7fffffffu;
    if (rest > 0x7f800000u) return (uint16_t)(sign | 0x7e00u | (rest >> 13 & 0x3ffu));
    if (rest >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u);
    if (rest >= 113u << 23)
        return (uint16_t)(sign | (rest - (112u << 23) + 0xfffu + (rest >> 13 & 1u)) >> 13);
    /* A sum with 0.5 rounds to the digits of subnormal ones. */
    return (uint16_t)(sign | (as_bits(as_float(rest) + 0.5f) - as_bits(0.5f)));
}

#define SAME(number) (number)

/* Conversions of WIDE elements: T is a dtype's storage, W a vector of the dtype of its arithmetic. */
#define CONVERSIONS(D, T, W, widen, narrow) \
    INLINE void widen_##D##_plain(const T *x, W *wide) { \
        W numbers = {0}; \
        for (int j = 0; j < WIDE; j++) numbers[j] = widen(x[j]); \
        *wide = numbers; \
    } \
    INLINE void narrow_##D##_plain(const W *wide, T *x) { \
        for (int j = 0; j < WIDE; j++) x[j] = narrow((*wide)[j]); \
    }
CONVERSIONS(FLOAT16, uint16_t, Floats, widen_float16, narrow_float16)
CONVERSIONS(BFLOAT16, uint16_t, Floats, widen_bfloat16, narrow_bfloat16)

#define COPIES(D, T, W, ISA) \
    INLINE void widen_##D##_##ISA(const T *x, W *wide) { memcpy(wide, x, sizeof *wide); } \
    INLINE void narrow_##D##_##ISA(const W *wide, T *x) { memcpy(x, wide, sizeof *wide); }
COPIES(FLOAT32, float, Floats, plain)
COPIES(FLOAT64, double, Doubles, plain)

#if HAS_AVX2
COPIES(FLOAT32, float, Floats, avx2)
COPIES(FLOAT64, double, Doubles, avx2)

AVX2 INLINE void widen_FLOAT16_avx2(const uint16_t *x, Floats *wide) {
    *wide = (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)x));
}

AVX2 INLINE void narrow_FLOAT16_avx2(const Floats *wide, uint16_t *x) {
    __m128i halves = _mm256_cvtps_ph((__m256)*wide, _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128((__m128i *)x, halves);
}

AVX2 INLINE void widen_BFLOAT16_avx2(const uint16_t *x, Floats *wide) {
    __m256i bits = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)x));
    *wide = (Floats)_mm256_slli_epi32(bits, 16);
}

AVX2 INLINE void narrow_BFLOAT16_avx2(const Floats *wide, uint16_t *x) {
    __m256i bits = (__m256i)*wide;
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
    __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x7fc00000));
    __m256i upper = _mm256_blendv_epi8(rounded, quiet, (__m256i)(*wide != *wide));
    upper = _mm256_srli_epi32(upper, 16);
    __m128i low = _mm256_castsi256_si128(upper), high = _mm256_extracti128_si256(upper, 1);
    _mm_storeu_si128((__m128i *)x, _mm_packus_epi32(low, high));
}
#endif

/* The first elements of a vector, 1 to WIDE; zeros follow. */
#define WIDEN_LAST(D, ISA, T, x, n, wide) \
    do { \
        T last[WIDE] = {0}; \
        memcpy(last, x, sizeof(T) * (size_t)(n)); \
        widen_##D##_##ISA(last, wide); \
    } while (0)

INLINE double sum_of_lanes(double *lanes) {
    for (int step = LANES / 2; step; step /= 2)
        for (int j = 0; j < step; j++) lanes[j] += lanes[j + step];
    return lanes[0];
}

/* Sums of squares in float64; those of float32 fit it, whatever they are. */
#define SUM_SQUARES(NAME, D, T, WIDEN, ISA, ATTRIBUTE) \
    ATTRIBUTE static double NAME##_##D##_##ISA(const void *elements, int64_t n) { \
        const T *x = elements; \
        double lanes[LANES] = {0}; \
        int64_t i = 0; \
        for (; i + LANES <= n; i += LANES) \
            for (int j = 0; j < LANES; j++) { \
                double number = (double)WIDEN(x[i + j]); \
                lanes[j] += number * number; \
            } \
        for (int j = 0; i < n; i++, j++) { \
            double number = (double)WIDEN(x[i]); \
            lanes[j] += number * number; \
        } \
        return sum_of_lanes(lanes); \
    }

/* Squares of half types are exact in float32, where RUN of them are added up before they go on in
 * float64: such a sum is off by 7 * 2^-24 at most, its root by 2.1e-7. Squares that float32 does not
 * hold are added up again in float64 alone. */
#define SUM_HALF_SQUARES(D, WIDEN, ISA, ATTRIBUTE) \
    SUM_SQUARES(sum_in_float64, D, uint16_t, WIDEN, ISA, ATTRIBUTE) \
    ATTRIBUTE static double sum_squares_##D##_##ISA(const void *elements, int64_t n) { \
        const uint16_t *x = elements; \
        double lanes[LANES] = {0}; \
        int64_t i = 0; \
        for (; i + RUN * LANES <= n; i += RUN * LANES) { \
            Floats sums[LANES / WIDE] = {0}, wide; \
            for (int64_t k = i; k < i + RUN * LANES; k += LANES) \
                for (int side = 0; side < LANES / WIDE; side++) { \
                    widen_##D##_##ISA(x + k + side * WIDE, &wide); \
                    sums[side] += wide * wide; \
                } \
            float flat[LANES]; \
            memcpy(flat, sums, sizeof flat); \
            for (int j = 0; j < LANES; j++) lanes[j] += (double)flat[j]; \
        } \
        double sum = sum_of_lanes(lanes); \
        if (i && !(sum >= 0x1p-60 && sum < INFINITY)) i = 0, sum = 0; \
        return sum + sum_in_float64_##D##_##ISA(x + i, n - i); \
    }

/* Writes. The last elements go through a buffer. */
#define WRITES(D, T, W, MASK, ISA, ATTRIBUTE) \
    ATTRIBUTE static void multiply_##D##_##ISA(void *elements, int64_t n, double number) { \
        T *x = elements, last[WIDE]; \
        W factor = (__typeof__(factor[0]))number - (W){0}, wide; \
        int64_t i = 0; \
        for (; i + WIDE <= n; i += WIDE) { \
            widen_##D##_##ISA(x + i, &wide); \
            wide *= factor; \
            narrow_##D##_##ISA(&wide, x + i); \
        } \
        if (i == n) return; \
        WIDEN_LAST(D, ISA, T, x + i, n - i, &wide); \
        wide *= factor; \
        narrow_##D##_##ISA(&wide, last); \
        memcpy(x + i, last, sizeof(T) * (size_t)(n - i)); \
    } \
    ATTRIBUTE INLINE void bring_within_##D##_##ISA(W *wide, const W *low, const W *high) { \
        MASK below = *wide < *low, above = *wide > *high; \
        MASK kept = ~(below | above) & (MASK)*wide; \
        *wide = (W)(kept | (below & (MASK)*low) | (above & (MASK)*high)); \
    } \
    ATTRIBUTE INLINE int is_any_##D##_##ISA(const MASK *mask) { \
        int64_t any = 0; \
        for (int j = 0; j < WIDE; j++) any |= (*mask)[j]; \
        return any != 0; \
    } \
    ATTRIBUTE static void clamp_##D##_##ISA(void *elements, int64_t n, double from, double to) { \
        /* Less 0, a bound of -0 keeps its sign. */ \
        W low = (__typeof__(low[0]))from - (W){0}, high = (__typeof__(high[0]))to - (W){0}, wide; \
        T *x = elements, last[WIDE]; \
        int64_t i = 0; \
        int is_written = 0; \
        while (i + WIDE <= n) { \
            int64_t start = i, stop = n - i < COMPARED ? n - WIDE : i + COMPARED - WIDE; \
            MASK outside = {0}; \
            for (; i <= stop && !is_written; i += WIDE) { \
                widen_##D##_##ISA(x + i, &wide); \
                outside |= (wide < low) | (wide > high); \
            } \
            if (is_written || is_any_##D##_##ISA(&outside)) \
                for (i = start; i <= stop; i += WIDE) { \
                    widen_##D##_##ISA(x + i, &wide); \
                    outside |= (wide < low) | (wide > high); \
                    bring_within_##D##_##ISA(&wide, &low, &high); \
                    narrow_##D##_##ISA(&wide, x + i); \
                } \
            /* Where one stretch had some outside, the next is written without a look before. */ \
            is_written = is_any_##D##_##ISA(&outside); \
        } \
        if (i == n) return; \
        /* Where bounds exclude 0, zeros would be outside. */ \
        for (int j = 0; j < WIDE; j++) last[j] = x[i + j < n ? i + j : i]; \
        widen_##D##_##ISA(last, &wide); \
        MASK outside = (wide < low) | (wide > high); \
        if (!is_any_##D##_##ISA(&outside)) return; \
        bring_within_##D##_##ISA(&wide, &low, &high); \
        narrow_##D##_##ISA(&wide, last); \
        memcpy(x + i, last, sizeof(T) * (size_t)(n - i)); \
    }

#define LOOPS(ISA, ATTRIBUTE) \
    SUM_HALF_SQUARES(FLOAT16, widen_float16, ISA, ATTRIBUTE) \
    SUM_HALF_SQUARES(BFLOAT16, widen_bfloat16, ISA, ATTRIBUTE) \
    SUM_SQUARES(sum_squares, FLOAT32, float, SAME, ISA, ATTRIBUTE) \
    SUM_SQUARES(sum_squares, FLOAT64, double, SAME, ISA, ATTRIBUTE) \
    WRITES(FLOAT16, uint16_t, Floats, FloatsMask, ISA, ATTRIBUTE) \
    WRITES(BFLOAT16, uint16_t, Floats, FloatsMask, ISA, ATTRIBUTE) \
    WRITES(FLOAT32, float, Floats, FloatsMask, ISA, ATTRIBUTE) \
    WRITES(FLOAT64, double, Doubles, DoublesMask, ISA, ATTRIBUTE)

typedef struct {
    int64_t itemsize;
    double (*sum_squares)(const void *, int64_t);
    void (*multiply)(void *, int64_t, double);
    void (*clamp)(void *, int64_t, double, double);
} Loops;

#define LOOPS_OF(D, T, ISA) {sizeof(T), sum_squares_##D##_##ISA, multiply_##D##_##ISA, clamp_##D##_##ISA}
#define TABLE(ISA) \
    {LOOPS_OF(FLOAT16, uint16_t, ISA), LOOPS_OF(BFLOAT16, uint16_t, ISA), \
     LOOPS_OF(FLOAT32, float, ISA), LOOPS_OF(FLOAT64, double, ISA)}

LOOPS(plain, )
static const Loops plain_loops[] = TABLE(plain);
#if HAS_AVX2
LOOPS(avx2, AVX2)
static const Loops avx2_loops[] = TABLE(avx2);
#endif

static const Loops *fastest_loops(void) {
#if HAS_AVX2
    unsigned a, b, c, d;
    /* GCC before 11 does not know "f16c" here. */
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
        __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C))
        return avx2_loops;
#endif
    return plain_loops;
}

/* By dtype; `fastest_loops` once the module is made. */
static const Loops *loops_of = plain_loops;

/* Runs a function in several threads at once, with one argument, and waits for all: GOMP_parallel
 * of the OpenMP library that PyTorch uses. */
typedef void (*Parallel)(void (*function)(void *), void *argument, unsigned threads, unsigned flags);
static Parallel parallel = NULL;

/* An element: which gradient, and where in it. */
typedef struct {
    Py_ssize_t gradient;
    int64_t start;
} Place;

typedef enum { SUM_SQUARES, MULTIPLY, CLAMP } Verb;

/* One verb on one list. */
typedef struct {
    Verb verb;
    const Loops *loops;
    Py_ssize_t n;
    char **addresses;
    int64_t *sizes;
    int64_t n_elements;
    long threads;
    /* Of SUM_SQUARES: the index of each gradient's first block, and the sum of every block. */
    int64_t *first_blocks;
    double *sums;
    /* Of MULTIPLY: one for each gradient, or, if NULL, `number` for all. */
    double *factors;
    double number, low, high;
    /* Where each task starts; the last place is the end. */
    Place *places;
    int64_t n_tasks, next_task;
    char *memory;
    int64_t few[5 * FEW];
} Job;

static int64_t blocks_of(int64_t size) { return (size + BLOCK - 1) / BLOCK; }

static void do_block(Job *job, Py_ssize_t i, int64_t start) {
    int64_t n = job->sizes[i] - start < BLOCK ? job->sizes[i] - start : BLOCK;
    char *x = job->addresses[i] + start * job->loops->itemsize;
    if (job->verb == SUM_SQUARES)
        job->sums[job->first_blocks[i] + start / BLOCK] = job->loops->sum_squares(x, n);
    else if (job->verb == CLAMP)
        job->loops->clamp(x, n, job->low, job->high);
    else {
        double factor = job->factors ? job->factors[i] : job->number;
        if (factor != 1.0) job->loops->multiply(x, n, factor);
    }
}

/* All blocks from a place up to another. */
static void do_blocks(Job *job, Place from, Place to) {
    for (Py_ssize_t i = from.gradient; i <= to.gradient && i < job->n; i++) {
        int64_t stop = i == to.gradient ? to.start : job->sizes[i];
        for (int64_t start = i == from.gradient ? from.start : 0; start < stop; start += BLOCK)
            do_block(job, i, start);
    }
}

/* Tasks, until none is left; in every thread. */
static void do_tasks(void *argument) {
    Job *job = argument;
    int64_t task;
    while ((task = __atomic_fetch_add(&job->next_task, 1, __ATOMIC_RELAXED)) < job->n_tasks)
        do_blocks(job, job->places[task], job->places[task + 1]);
}

/* Cuts the list into tasks; 0 without memory for them. */
static int cut(Job *job) {
    job->places = malloc(sizeof(Place) * (size_t)(job->n_elements / BLOCK + 2));
    if (!job->places) return 0;
    int64_t in_task = BLOCK;
    for (Py_ssize_t i = 0; i < job->n; i++)
        for (int64_t start = 0; start < job->sizes[i]; start += BLOCK) {
            if (in_task >= BLOCK) {
                job->places[job->n_tasks++] = (Place){i, start};
                in_task = 0;
            }
            in_task += job->sizes[i] - start < BLOCK ? job->sizes[i] - start : BLOCK;
        }
    job->places[job->n_tasks] = (Place){job->n, 0};
    return 1;
}

static void run_unlocked(Job *job) {
    long threads = job->threads;
    if (threads > 1 && parallel && job->n_elements >= SHARED && cut(job)) {
        if (threads > job->n_tasks) threads = (long)job->n_tasks;
        parallel(do_tasks, job, (unsigned)threads, 0);
    } else
        do_blocks(job, (Place){0, 0}, (Place){job->n, 0});
}

/* Runs a job; while it is long, other threads of Python go on. */
static void run(Job *job) {
    if (job->n_elements < UNLOCKED) {
        run_unlocked(job);
        return;
    }
    PyThreadState *state = PyEval_SaveThread();
    run_unlocked(job);
    PyEval_RestoreThread(state);
}

static void free_job(Job *job) {
    if (job->memory != (char *)job->few) free(job->memory);
    free(job->places);
}

/* Fills in a job from the arguments that all verbs have; 0 with an error of Python.
 *
 * addresses: a list of ints; sizes: bytes of as many int64; dtype: its code; threads: at most.
 */
static int make_job(Job *job, Verb verb, PyObject *const *arguments) {
    PyObject *addresses = arguments[0];
    const char *sizes = PyBytes_AsString(arguments[1]);
    long dtype = PyLong_AsLong(arguments[2]);
    job->threads = PyLong_AsLong(arguments[3]);
    job->places = NULL;
    job->memory = (char *)job->few;
    if (PyErr_Occurred()) return 0;
    job->n = PyList_Size(addresses);
    if (job->n < 0) return 0;
    if (PyBytes_Size(arguments[1]) != job->n * (Py_ssize_t)sizeof(int64_t) || dtype < FLOAT16 ||
        dtype > FLOAT64) {
        PyErr_SetString(PyExc_ValueError, "expected as many sizes as addresses, and a known dtype");
        return 0;
    }
    job->verb = verb;
    job->loops = loops_of + dtype;
    job->n_elements = job->n_tasks = job->next_task = 0;
    int64_t n_blocks = 0;
    for (Py_ssize_t i = 0; i < job->n; i++) {
        int64_t size;
        memcpy(&size, sizes + i * (Py_ssize_t)sizeof size, sizeof size);
        n_blocks += blocks_of(size);
    }
    /* Addresses, sizes, first blocks, factors, and the sum of every block. */
    size_t bytes = sizeof(int64_t) * (size_t)(4 * job->n + n_blocks);
    if (bytes > sizeof job->few && !(job->memory = malloc(bytes))) {
        PyErr_NoMemory();
        return 0;
    }
    job->addresses = (char **)job->memory;
    job->sizes = (int64_t *)job->memory + job->n;
    job->first_blocks = job->sizes + job->n;
    job->factors = (double *)(job->first_blocks + job->n);
    job->sums = job->factors + job->n;
    memcpy(job->sizes, sizes, sizeof(int64_t) * (size_t)job->n);
    n_blocks = 0;
    for (Py_ssize_t i = 0; i < job->n; i++) {
        job->addresses[i] = PyLong_AsVoidPtr(PyList_GetItem(addresses, i));
        job->n_elements += job->sizes[i];
        job->first_blocks[i] = n_blocks;
        n_blocks += blocks_of(job->sizes[i]);
    }
    if (!PyErr_Occurred()) return 1;
    free_job(job);
    return 0;
}

static int has_arguments(Py_ssize_t got, Py_ssize_t expected) {
    if (got == expected) return 1;
    PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", expected, got);
    return 0;
}

/* The sum over one gradient's blocks. */
static double sum_of(const Job *job, Py_ssize_t i) {
    double sum = 0;
    for (int64_t b = 0; b < blocks_of(job->sizes[i]); b++) sum += job->sums[job->first_blocks[i] + b];
    return sum;
}

/* norm(addresses, sizes, dtype, threads) -> float */
static PyObject *norm(PyObject *module, PyObject *const *arguments, Py_ssize_t n_arguments) {
    (void)module;
    Job job;
    if (!has_arguments(n_arguments, 4) || !make_job(&job, SUM_SQUARES, arguments)) return NULL;
    run(&job);
    double sum = 0;
    for (Py_ssize_t i = 0; i < job.n; i++) sum += sum_of(&job, i);
    free_job(&job);
    return PyFloat_FromDouble(sqrt(sum));
}

/* norms(addresses, sizes, dtype, threads) -> list[float] */
static PyObject *norms(PyObject *module, PyObject *const *arguments, Py_ssize_t n_arguments) {
    (void)module;
    Job job;
    if (!has_arguments(n_arguments, 4) || !make_job(&job, SUM_SQUARES, arguments)) return NULL;
    run(&job);
    PyObject *result = PyList_New(job.n);
    for (Py_ssize_t i = 0; result && i < job.n; i++) {
        PyObject *own = PyFloat_FromDouble(sqrt(sum_of(&job, i)));
        if (!own || PyList_SetItem(result, i, own)) Py_CLEAR(result);
    }
    free_job(&job);
    return result;
}

/* multiply_(addresses, sizes, dtype, threads, factor) */
static PyObject *multiply(PyObject *module, PyObject *const *arguments, Py_ssize_t n_arguments) {
    (void)module;
    Job job;
    if (!has_arguments(n_arguments, 5) || !make_job(&job, MULTIPLY, arguments)) return NULL;
    job.number = PyFloat_AsDouble(arguments[4]);
    job.factors = NULL;
    if (!PyErr_Occurred()) run(&job);
    free_job(&job);
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

/* multiply_each_(addresses, sizes, dtype, threads, factors: list[float]); none by 1. */
static PyObject *multiply_each(PyObject *module, PyObject *const *arguments, Py_ssize_t n_arguments) {
    (void)module;
    Job job;
    if (!has_arguments(n_arguments, 5) || !make_job(&job, MULTIPLY, arguments)) return NULL;
    if (PyList_Size(arguments[4]) != job.n && !PyErr_Occurred())
        PyErr_SetString(PyExc_ValueError, "expected a factor for each address");
    for (Py_ssize_t i = 0; !PyErr_Occurred() && i < job.n; i++)
        job.factors[i] = PyFloat_AsDouble(PyList_GetItem(arguments[4], i));
    if (!PyErr_Occurred()) run(&job);
    free_job(&job);
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

/* clamp_(addresses, sizes, dtype, threads, low, high) */
static PyObject *clamp(PyObject *module, PyObject *const *arguments, Py_ssize_t n_arguments) {
    (void)module;
    Job job;
    if (!has_arguments(n_arguments, 6) || !make_job(&job, CLAMP, arguments)) return NULL;
    job.low = PyFloat_AsDouble(arguments[4]);
    job.high = PyFloat_AsDouble(arguments[5]);
    if (!PyErr_Occurred()) run(&job);
    free_job(&job);
    return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}

typedef struct {
    uint64_t start, end;
} Bytes;

static int compare_starts(const void *left, const void *right) {
    uint64_t a = ((const Bytes *)left)->start, b = ((const Bytes *)right)->start;
    return (a > b) - (a < b);
}

/* are_apart(addresses, spans: list[int]) -> bool: whether no two share a byte. */
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

/* set_portable(flag): whether to use the loops that every processor has; for tests. */
static PyObject *set_portable(PyObject *module, PyObject *flag) {
    (void)module;
    int is_portable = PyObject_IsTrue(flag);
    if (is_portable < 0) return NULL;
    loops_of = is_portable ? plain_loops : fastest_loops();
    return Py_NewRef(Py_None);
}

/* share(address): the function that runs tasks in threads, as in `Parallel`; 0 for none. */
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
    {"multiply_", FAST(multiply), NULL},
    {"multiply_each_", FAST(multiply_each), NULL},
    {"clamp_", FAST(clamp), NULL},
    {"are_apart", FAST(are_apart), NULL},
    {"set_portable", set_portable, METH_O, NULL},
    {"share", share, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "_native", "Loops over CPU gradients.", -1, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__native(void) {
    loops_of = fastest_loops();
    PyObject *module = PyModule_Create(&definition);
    if (module && (PyModule_AddIntConstant(module, "SHARED", SHARED) ||
                   PyModule_AddIntConstant(module, "INTERFACE", INTERFACE)))
        Py_CLEAR(module);
    return module;
}
