/* Elements of gradients, and vectors of them.
 *
 * Half types are widened to float32, and then multiplied and added up in vectors of float32. `plain`
 * functions serve every processor, and become NEON on ARM; `avx2` functions need AVX2, FMA and F16C.
 */
#ifndef TRITONCLIP_ELEMENTS_H
#define TRITONCLIP_ELEMENTS_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#if !defined(__clang__) && (!defined(__GNUC__) || __GNUC__ < 9)
#error "needs vectors and their conversions, as GCC 9 and Clang have"
#endif
#ifdef __x86_64__
#include <immintrin.h>
#define HAS_AVX2 1
#define AVX2 __attribute__((target("avx2,fma,f16c")))
#else
#define HAS_AVX2 0
#endif
#ifdef __aarch64__
#include <arm_neon.h>
#endif
#define INLINE static inline __attribute__((always_inline))

/* The elements of a vector of floats, and the sums that a loop adds up side by side. */
#define WIDE 8
#define LANES 32

typedef float Floats __attribute__((vector_size(4 * WIDE)));
typedef int32_t FloatsBits __attribute__((vector_size(4 * WIDE)));
typedef double Doubles __attribute__((vector_size(4 * WIDE)));
typedef uint16_t Halves __attribute__((vector_size(2 * WIDE)));

/* Elements in memory, which may begin at any byte. */
typedef uint16_t HalfAt __attribute__((aligned(1), may_alias));
typedef float FloatAt __attribute__((aligned(1), may_alias));
typedef double DoubleAt __attribute__((aligned(1), may_alias));
typedef uint32_t Bits32At __attribute__((aligned(1), may_alias));
typedef uint64_t Bits64At __attribute__((aligned(1), may_alias));

/* Types and numbers for `loops.h`, by dtype: elements in memory; elements as they are compared with bounds, and
 * integers of the same width, for masks; vectors in which elements are multiplied; elements as bits, in which we
 * look for zeros; the largest number; and the bits of infinity for a half type, else 0. */
#define AT_float16 HalfAt
#define AT_bfloat16 HalfAt
#define AT_float32 FloatAt
#define AT_float64 DoubleAt
#define ELEMENT_float16 int16_t
#define ELEMENT_bfloat16 int16_t
#define ELEMENT_float32 float
#define ELEMENT_float64 double
#define INTEGER_float16 int16_t
#define INTEGER_bfloat16 int16_t
#define INTEGER_float32 int32_t
#define INTEGER_float64 int64_t
#define WIDENED_float16 Floats
#define WIDENED_bfloat16 Floats
#define WIDENED_float32 Floats
#define WIDENED_float64 Doubles
#define BITS_AT_float16 HalfAt
#define BITS_AT_bfloat16 HalfAt
#define BITS_AT_float32 Bits32At
#define BITS_AT_float64 Bits64At
#define LARGEST_float16 65504.0
#define LARGEST_bfloat16 0x1.fep127
#define LARGEST_float32 0x1.fffffep127
#define LARGEST_float64 0x1.fffffffffffffp1023
#define INFINITE_float16 0x7c00
#define INFINITE_bfloat16 0x7f80
#define INFINITE_float32 0
#define INFINITE_float64 0

INLINE float as_float(uint32_t bits) {
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

INLINE uint32_t as_bits(float number) {
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    return bits;
}

INLINE float widen_bfloat16(uint16_t bits) { return as_float((uint32_t)bits << 16); }

/* Rounds to the nearest number, ties to even. */
INLINE uint16_t narrow_bfloat16(float number) {
    uint32_t bits = as_bits(number);
    if (number != number) return (uint16_t)((bits | 0x7fc00000u) >> 16);
    return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

INLINE float widen_float16(uint16_t bits) {
    uint32_t sign = (uint32_t)(bits & 0x8000u) << 16, rest = (uint32_t)(bits & 0x7fffu) << 13;
    if (rest >= 31u << 23) return as_float(sign | 0x7f800000u | rest);
    if (rest >= 1u << 23) return as_float(sign | (rest + (112u << 23)));
    /* A subnormal number is the difference of two normal floats. */
    return as_float(sign | as_bits(as_float(rest + (113u << 23)) - as_float(113u << 23)));
}

/* Rounds to the nearest number, ties to even. */
INLINE uint16_t narrow_float16(float number) {
    uint32_t bits = as_bits(number), sign = bits >> 16 & 0x8000u, rest = bits & 0x7fffffffu;
    if (rest > 0x7f800000u) return (uint16_t)(sign | 0x7e00u | (rest >> 13 & 0x3ffu));
    if (rest >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u);
    if (rest >= 113u << 23)
        return (uint16_t)(sign | (rest - (112u << 23) + 0xfffu + (rest >> 13 & 1u)) >> 13);
    /* Adding 0.5 rounds to the digits of subnormal numbers. */
    return (uint16_t)(sign | (as_bits(as_float(rest) + 0.5f) - as_bits(0.5f)));
}

INLINE float widen_float32(float number) { return number; }
INLINE float narrow_float32(double number) { return (float)number; }
INLINE double widen_float64(double number) { return number; }
INLINE double narrow_float64(double number) { return number; }

/* How the calling thread treats subnormal floats, as `torch.set_flush_denormal` sets it. */
INLINE uint64_t float_mode(void) {
#if defined(__x86_64__)
    return _mm_getcsr();
#elif defined(__aarch64__)
    uint64_t mode;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
#else
    return 0;
#endif
}

INLINE void set_float_mode(uint64_t mode) {
#if defined(__x86_64__)
    _mm_setcsr((unsigned)mode);
#elif defined(__aarch64__)
    __asm__ volatile("msr fpcr, %0" : : "r"(mode));
#else
    (void)mode;
#endif
}

/* Asks for the line of memory that a loop reaches AHEAD bytes later. It lies beyond the page of 4 KiB, where
 * processors may stop looking ahead by themselves. With 1,024, 2,048 and 4,096 bytes, 48 million float32 are
 * measured in 3.86, 3.75 and 3.70 ms, as many bfloat16 in 1.85, 1.75 and 1.64 ms, and 200 gradients of 150,000
 * float32 in 2.05, 1.88 and 1.69 ms. In another run, 4,096, 8,192 and 16,384 bytes took 2.85, 2.60 and 2.57 ms,
 * 1.43, 1.24 and 1.20 ms, and 1.75, 1.58 and 1.63 ms. Multiplying and clamping take as long, or less time. If
 * other programs use the memory as well, no distance helps. (AMD EPYC with AVX-512, 2 threads.) */
#define AHEAD 8192
#define LINE 64

INLINE void fetch_ahead(const void *x) { __builtin_prefetch((const void *)((uintptr_t)x + AHEAD)); }

/* The bits of a half type as an integer, ordered like the numbers. */
#define KEY(x) ((x) ^ (((x) >> 15) & 0x7fff))

/* Loads and stores of WIDE elements. */

INLINE void load_bfloat16_plain(const HalfAt *x, Floats *wide) {
    Halves bits;
    memcpy(&bits, x, sizeof bits);
    *wide = (Floats)(__builtin_convertvector(bits, FloatsBits) << 16);
}

INLINE void store_bfloat16_plain(const Floats *wide, HalfAt *x) {
    FloatsBits bits = (FloatsBits)*wide, rounded = bits + 0x7fff + (bits >> 16 & 1);
    /* The compiler would compare vectors wider than a register element by element. */
    FloatsBits is_nan = (0x7f800000 - (bits & 0x7fffffff)) >> 31, quiet = bits | 0x7fc00000;
    Halves upper = __builtin_convertvector(((is_nan & quiet) | (~is_nan & rounded)) >> 16, Halves);
    memcpy(x, &upper, sizeof upper);
}

#ifdef __aarch64__
INLINE void load_float16_plain(const HalfAt *x, Floats *wide) {
    float16x8_t halves;
    memcpy(&halves, x, sizeof halves);
    float32x4_t both[] = {vcvt_f32_f16(vget_low_f16(halves)), vcvt_high_f32_f16(halves)};
    memcpy(wide, both, sizeof both);
}

INLINE void store_float16_plain(const Floats *wide, HalfAt *x) {
    float32x4_t both[2];
    memcpy(both, wide, sizeof both);
    float16x8_t halves = vcvt_high_f16_f32(vcvt_f16_f32(both[0]), both[1]);
    memcpy(x, &halves, sizeof halves);
}
#else
INLINE void load_float16_plain(const HalfAt *x, Floats *wide) {
    Floats numbers = {0};
    for (int j = 0; j < WIDE; j++) numbers[j] = widen_float16(x[j]);
    *wide = numbers;
}

INLINE void store_float16_plain(const Floats *wide, HalfAt *x) {
    for (int j = 0; j < WIDE; j++) x[j] = narrow_float16((*wide)[j]);
}
#endif

INLINE void load_float32_plain(const FloatAt *x, Floats *wide) { memcpy(wide, x, sizeof *wide); }
INLINE void store_float32_plain(const Floats *wide, FloatAt *x) { memcpy(x, wide, sizeof *wide); }

INLINE void load_float64_plain(const DoubleAt *x, Doubles *wide) { memcpy(wide, x, sizeof *wide); }
INLINE void store_float64_plain(const Doubles *wide, DoubleAt *x) { memcpy(x, wide, sizeof *wide); }

/* As many sums in float64 as a register holds, and loads of as many numbers. */

typedef double Lanes_plain __attribute__((vector_size(16)));
typedef int64_t LanesBits_plain __attribute__((vector_size(16)));

INLINE void lanes_float32_plain(const FloatAt *x, Lanes_plain *lanes) {
#ifdef __aarch64__
    float32x2_t both;
    memcpy(&both, x, sizeof both);
    *lanes = (Lanes_plain)vcvt_f64_f32(both);
#else
    *lanes = (Lanes_plain){(double)x[0], (double)x[1]};
#endif
}

INLINE void lanes_float64_plain(const DoubleAt *x, Lanes_plain *lanes) { memcpy(lanes, x, sizeof *lanes); }

#if HAS_AVX2
typedef double Lanes_avx2 __attribute__((vector_size(32)));
typedef int64_t LanesBits_avx2 __attribute__((vector_size(32)));

AVX2 INLINE void lanes_float32_avx2(const FloatAt *x, Lanes_avx2 *lanes) {
    *lanes = _mm256_cvtps_pd(_mm_loadu_ps((const float *)x));
}

AVX2 INLINE void lanes_float64_avx2(const DoubleAt *x, Lanes_avx2 *lanes) {
    *lanes = _mm256_loadu_pd((const double *)x);
}

AVX2 INLINE void load_bfloat16_avx2(const HalfAt *x, Floats *wide) {
    __m256i bits = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)x));
    *wide = (Floats)_mm256_slli_epi32(bits, 16);
}

/* Rounds the upper halves of floats to the nearest, ties to even; the floats must not be NaN. */
AVX2 INLINE __m256i round_bfloat16_avx2(Floats wide) {
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32((__m256i)wide, 16), _mm256_set1_epi32(1));
    return _mm256_add_epi32(_mm256_add_epi32((__m256i)wide, _mm256_set1_epi32(0x7fff)), odd);
}

AVX2 INLINE void store_bfloat16_avx2(const Floats *wide, HalfAt *x) {
    __m256i quiet = _mm256_or_si256((__m256i)*wide, _mm256_set1_epi32(0x7fc00000));
    __m256i upper = _mm256_blendv_epi8(round_bfloat16_avx2(*wide), quiet, (__m256i)(*wide != *wide));
    upper = _mm256_srli_epi32(upper, 16);
    __m128i low = _mm256_castsi256_si128(upper), high = _mm256_extracti128_si256(upper, 1);
    _mm_storeu_si128((__m128i *)x, _mm_packus_epi32(low, high));
}

/* Writes products of 2 * WIDE elements to y; returns 0 and writes nothing if one is NaN.
 *
 * Elements at even and at odd places are widened separately and joined again, which takes no shuffle: 48 million
 * are multiplied in 3.1 ms instead of 6.3; float16 takes 2.5 ms. (AMD EPYC with AVX-512, 1 thread.) */
#define PAIRED_bfloat16_avx2 1
AVX2 INLINE int multiply_pairs_bfloat16_avx2(const HalfAt *x, HalfAt *y, Floats factor) {
    __m256i both = _mm256_loadu_si256((const __m256i *)x);
    Floats even = (Floats)_mm256_slli_epi32(both, 16) * factor;
    Floats odd = (Floats)_mm256_and_si256(both, _mm256_set1_epi32(-0x10000)) * factor;
    if (_mm256_movemask_ps(_mm256_cmp_ps((__m256)even, (__m256)odd, _CMP_UNORD_Q))) return 0;
    __m256i low = _mm256_srli_epi32(round_bfloat16_avx2(even), 16), high = round_bfloat16_avx2(odd);
    _mm256_storeu_si256((__m256i *)y, _mm256_blend_epi16(low, high, 0xaa));
    return 1;
}

AVX2 INLINE void load_float16_avx2(const HalfAt *x, Floats *wide) {
    *wide = (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)x));
}

AVX2 INLINE void store_float16_avx2(const Floats *wide, HalfAt *x) {
    __m128i halves = _mm256_cvtps_ph((__m256)*wide, _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128((__m128i *)x, halves);
}

AVX2 INLINE void load_float32_avx2(const FloatAt *x, Floats *wide) { memcpy(wide, x, sizeof *wide); }
AVX2 INLINE void store_float32_avx2(const Floats *wide, FloatAt *x) { memcpy(x, wide, sizeof *wide); }
AVX2 INLINE void load_float64_avx2(const DoubleAt *x, Doubles *wide) { memcpy(wide, x, sizeof *wide); }
AVX2 INLINE void store_float64_avx2(const Doubles *wide, DoubleAt *x) { memcpy(x, wide, sizeof *wide); }
#endif

#endif
