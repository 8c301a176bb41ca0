/* The loops of all dtypes, in the fastest form that the processor supports. */
#ifndef TRITONCLIP_DISPATCH_H
#define TRITONCLIP_DISPATCH_H

#include "elements.h"
#if HAS_AVX2
#include <cpuid.h>
#endif

/* Verbs that measure the parts of norms of order 2, 1 and inf, and verbs that write. */
typedef enum {
    SUM_SQUARES,
    SUM_MAGNITUDES,
    LARGEST,
    MULTIPLY,
    CLAMP
} Verb;

#define ISA plain
#define TARGET
#define REGISTER 16
#define DTYPE float32
#include "loops.h"
#define DTYPE float64
#include "loops.h"
#define DTYPE float16
#include "loops.h"
#define DTYPE bfloat16
#include "loops.h"
#undef ISA
#undef TARGET
#undef REGISTER

#if HAS_AVX2
#define ISA avx2
#define TARGET AVX2
#define REGISTER 32
#define DTYPE float32
#include "loops.h"
#define DTYPE float64
#include "loops.h"
#define DTYPE float16
#include "loops.h"
#define DTYPE bfloat16
#include "loops.h"
#undef ISA
#undef TARGET
#undef REGISTER
#endif

enum { FLOAT16, BFLOAT16, FLOAT32, FLOAT64, N_DTYPES };
/* This is added to the code of a dtype for complex numbers, which are pairs of that dtype. */
enum { PAIRS = N_DTYPES };

typedef struct {
    int64_t itemsize;
    /* The largest number of the dtype. */
    double largest;
    double (*measure)(const void *, int64_t, Verb);
    void (*multiply)(const void *, void *, int64_t, double);
    void (*clamp)(void *, int64_t, double, double);
    void (*clamp_to)(const void *, void *, int64_t, double, double);
} Loops;

#define LOOPS(D, ISA)                                                                                         \
    {sizeof(ELEMENT_##D),  LARGEST_##D,         measure_##D##_##ISA,         multiply_##D##_##ISA, clamp_##D##_##ISA, \
     clamp_to_##D##_##ISA}
#define TABLE(ISA) {LOOPS(float16, ISA), LOOPS(bfloat16, ISA), LOOPS(float32, ISA), LOOPS(float64, ISA)}

static const Loops plain_loops[N_DTYPES] = TABLE(plain);
#if HAS_AVX2
static const Loops avx2_loops[N_DTYPES] = TABLE(avx2);
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

/* The loops in use, by dtype; these are `fastest_loops` once the module is made. */
static const Loops *loops_of = plain_loops;

#endif
