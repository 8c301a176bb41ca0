/* The loops over contiguous elements of one dtype, for one instruction set.
 *
 * This file is included once for each pair. DTYPE and ISA end the names of functions, TARGET is the attribute of
 * the instruction set, and REGISTER is the size of its vectors in bytes; `elements.h` has the types.
 */

#define PASTE_(a, b) a##_##b
#define PASTE(a, b) PASTE_(a, b)
#define OF(name) PASTE(name, DTYPE)
#define FORM(name) PASTE(name, ISA)
#define NAME(function) FORM(OF(function))
/* The lanes whose sums of float64 fit a register. */
#define IN_SUM (REGISTER / (int)sizeof(double))

/* The squares of half types that each lane adds up in float32. */
#define RUN 8
/* The bytes of a stretch, which is compared with the bounds before any of it is written; it stays in a core's
 * nearest cache meanwhile. Groups of a stretch with all elements within are not written. With one element in 370
 * outside, 12 gradients of 4 million float32 take 4.3 ms, and 6.3 ms if whole stretches are written; bfloat16
 * takes 2.1 and 2.9 ms; ten gradients of 2,000 float32, in cache, take 1.6 and 3.1 us. Groups of 128 bytes take
 * 13% more time in cache if nothing is outside. Testing after each group, and not after each stretch, whether any
 * element is outside takes 157 us for 4 million float32 instead of 106 us. (AMD EPYC, 2 threads.) */
#define COMPARED 4096
#define GROUP 256

/* As many elements as a register holds. GCC compares wider vectors one element at a time, and then clamps ten
 * gradients of 2,000 float64 in 26 us instead of 2.2 us. */
typedef OF(ELEMENT) NAME(Vector) __attribute__((vector_size(REGISTER)));
typedef OF(INTEGER) NAME(Mask) __attribute__((vector_size(REGISTER)));

/* Adds squares, or magnitudes, of WIDE elements to the sums of their lanes. */
TARGET INLINE void NAME(add)(const OF(AT) *x, FORM(Lanes) *sums, int squares) {
#if OF(INFINITE)
    Floats numbers;
    NAME(load)(x, &numbers);
    FORM(add_float32)((const FloatAt *)&numbers, sums, squares);
#else
#pragma GCC unroll 4
    for (int i = 0; i < WIDE / IN_SUM; i++) {
        FORM(Lanes) own;
        NAME(lanes)(x + i * IN_SUM, &own);
        sums[i] += squares ? own * own : (FORM(Lanes))((FORM(LanesBits))own & INT64_MAX);
    }
#endif
}

/* The sum of all lanes: the two halves are added, then the two halves of the result, and so on. */
TARGET INLINE double NAME(sum_of_lanes)(FORM(Lanes) *sums) {
#define FOLD(half) _Pragma("GCC unroll 8") for (int i = 0; i < half; i++) sums[i] += sums[i + half]
    enum { HALF = LANES / IN_SUM / 2 };
    FOLD(HALF);
    FOLD(HALF / 2);
    FOLD(HALF / 4);
    FOLD(HALF / 8);
#undef FOLD
    FORM(Lanes) last = sums[0];
#if REGISTER == 16
    return last[0] + last[1];
#else
    return (last[0] + last[2]) + (last[1] + last[3]);
#endif
}

/* The sum of squares or of magnitudes in float64, which holds the square of any float32.
 *
 * Loops over the lanes are unrolled. Otherwise GCC keeps the sums in memory, and sets them to 0 by an instruction
 * that takes longer than a row of 8 elements: 19 ns instead of 4 ns.
 */
TARGET INLINE double NAME(sum_in_float64)(const void *elements, int64_t n, int squares) {
    const OF(AT) *x = elements;
    FORM(Lanes) sums[LANES / IN_SUM] = {0};
    for (; n >= LANES; x += LANES, n -= LANES) {
        for (int at = 0; at < LANES; at += LINE / (int)sizeof *x) fetch_ahead(x + at);
#pragma GCC unroll 4
        for (int side = 0; side < LANES / WIDE; side++)
            NAME(add)(x + side * WIDE, sums + side * WIDE / IN_SUM, squares);
    }
#pragma GCC unroll 4
    for (int side = 0; side < LANES / WIDE; side++, x += WIDE, n -= WIDE)
        if (n >= WIDE)
            NAME(add)(x, sums + side * WIDE / IN_SUM, squares);
        else if (n > 0) {
            OF(AT) last[WIDE] = {0};
            memcpy(last, x, sizeof *x * (size_t)n);
            NAME(add)(last, sums + side * WIDE / IN_SUM, squares);
        }
    return NAME(sum_of_lanes)(sums);
}

/* Whether any element is not 0; NaN counts as not 0. */
TARGET static int NAME(has_any)(const void *elements, int64_t n) {
    const OF(BITS_AT) *x = elements;
    OF(BITS_AT) any = 0;
    for (int64_t i = 0; i < n; i++) any |= x[i];
    /* The shift drops the sign. */
    return (OF(BITS_AT))(any << 1) != 0;
}

/* The sum of squares, or of magnitudes.
 *
 * Squares of half types are exact in float32. RUN of them are added up in float32, and these sums in float64. Such
 * a sum of squares or magnitudes is off by at most 7 * 2^-24 or 4.2e-7, and the root of squares by 2.1e-7. Sums
 * that do not fit float32 are added up again in float64 alone. If all squares of float64 underflow, the sum is
 * still not 0, so that only zeros have a norm of 0.
 */
TARGET INLINE double NAME(sum)(const void *elements, int64_t n, int squares) {
#if OF(INFINITE)
    const OF(AT) *x = elements;
    FORM(Lanes) lanes[LANES / IN_SUM] = {0}, own;
    int64_t i = 0;
    for (; i + RUN * LANES <= n; i += RUN * LANES) {
        Floats sums[LANES / WIDE] = {0}, wide;
        for (int64_t k = i; k < i + RUN * LANES; k += LANES) {
            fetch_ahead(x + k);
            for (int side = 0; side < LANES / WIDE; side++) {
                NAME(load)(x + k + side * WIDE, &wide);
                sums[side] += squares ? wide * wide : (Floats)((FloatsBits)wide & 0x7fffffff);
            }
        }
#pragma GCC unroll 16
        for (int j = 0; j < LANES / IN_SUM; j++) {
            FORM(lanes_float32)((const FloatAt *)sums + j * IN_SUM, &own);
            lanes[j] += own;
        }
    }
    double sum = i ? NAME(sum_of_lanes)(lanes) : 0;
    int is_known = sum >= 0x1p-60 && sum < INFINITY;
    if (i && !is_known && (sum || NAME(has_any)(x, i))) i = 0, sum = 0;
    return sum + NAME(sum_in_float64)(x + i, n - i, squares);
#else
    double sum = NAME(sum_in_float64)(elements, n, squares);
    int may_underflow = squares && sizeof(OF(ELEMENT)) == sizeof(double);
    return !sum && may_underflow && NAME(has_any)(elements, n) ? 0x1p-1022 : sum;
#endif
}

/* Updates the largest magnitude in each lane. It compares bits without the sign, so that NaN is larger than
 * infinity. */
TARGET INLINE void NAME(join)(NAME(Mask) *found, const char *x) {
    NAME(Mask) bits;
    memcpy(&bits, x, REGISTER);
    bits &= (OF(INTEGER)) ~((uint64_t)1 << (8 * sizeof(OF(INTEGER)) - 1));
    NAME(Mask) is_more = bits > *found;
    *found = (is_more & bits) | (~is_more & *found);
}

/* The largest magnitude. */
TARGET INLINE double NAME(largest)(const void *elements, int64_t n) {
    enum { ITEM = sizeof(OF(INTEGER)), MANY = REGISTER / ITEM };
    NAME(Mask) even = {0}, odd = {0};
    const char *x = elements, *end = x + n * ITEM;
    for (; end - x >= 2 * REGISTER; x += 2 * REGISTER) {
        fetch_ahead(x);
        NAME(join)(&even, x);
        NAME(join)(&odd, x + REGISTER);
    }
    char rest[2 * REGISTER] = {0};
    memcpy(rest, x, (size_t)(end - x));
    NAME(join)(&even, rest);
    NAME(join)(&odd, rest + REGISTER);
    OF(INTEGER) lanes[2 * MANY], most = 0;
    memcpy(lanes, &even, REGISTER);
    memcpy(lanes + MANY, &odd, REGISTER);
    for (int j = 0; j < 2 * MANY; j++)
        if (lanes[j] > most) most = lanes[j];
    OF(AT) largest;
    memcpy(&largest, &most, ITEM);
    return (double)OF(widen)(largest);
}

/* The part of a norm that the elements of one block make. */
TARGET static double NAME(measure)(const void *elements, int64_t n, Verb verb) {
    if (verb == SUM_SQUARES) return NAME(sum)(elements, n, 1);
    if (verb == SUM_MAGNITUDES) return NAME(sum)(elements, n, 0);
    return NAME(largest)(elements, n);
}

/* Writes the products of a vector of elements to y. */
TARGET INLINE void NAME(multiply_vector)(const OF(AT) *x, OF(AT) *y, OF(WIDENED) factor) {
    OF(WIDENED) wide;
    NAME(load)(x, &wide);
    wide *= factor;
    NAME(store)(&wide, y);
}

/* Multiplies by a number, which is rounded to the dtype of the arithmetic. The target is the same memory, or does
 * not overlap it. The last elements go through a buffer. */
TARGET static void NAME(multiply)(const void *elements, void *target, int64_t n, double number) {
    const OF(AT) *x = elements;
    OF(AT) *y = target;
    OF(WIDENED) factor = (__typeof__(factor[0]))number - (OF(WIDENED)){0};
    enum { IN_LINE = LINE / sizeof *x, MANY = sizeof factor / sizeof factor[0] };
    for (; n >= IN_LINE; x += IN_LINE, y += IN_LINE, n -= IN_LINE) {
        fetch_ahead(x);
        for (int i = 0; i < IN_LINE; i += 2 * MANY) {
#if NAME(PAIRED)
            if (__builtin_expect(NAME(multiply_pairs)(x + i, y + i, factor), 1)) continue;
#endif
            NAME(multiply_vector)(x + i, y + i, factor);
            NAME(multiply_vector)(x + i + MANY, y + i + MANY, factor);
        }
    }
    for (; n >= MANY; x += MANY, y += MANY, n -= MANY) NAME(multiply_vector)(x, y, factor);
    if (!n) return;
    OF(AT) last[MANY] = {0};
    memcpy(last, x, sizeof *x * (size_t)n);
    NAME(multiply_vector)(last, last, factor);
    memcpy(y, last, sizeof *x * (size_t)n);
}

/* Bounds, and their keys. Half types are compared by keys, integers that are ordered like the numbers, with NaN
 * beyond infinity. A register holds twice as many keys as floats, and nothing is converted. */
typedef struct {
    NAME(Vector) low, high, low_key, high_key;
} NAME(Bounds);

TARGET INLINE void NAME(fill)(NAME(Vector) *x, OF(ELEMENT) number) {
    for (int i = 0; i < REGISTER / (int)sizeof number; i++) (*x)[i] = number;
}

TARGET INLINE void NAME(make_bounds)(double from, double to, NAME(Bounds) *bounds) {
    OF(ELEMENT) low = (OF(ELEMENT))OF(narrow)(from), high = (OF(ELEMENT))OF(narrow)(to);
    NAME(fill)(&bounds->low, low), NAME(fill)(&bounds->high, high);
#if OF(INFINITE)
    /* -0 and 0 are equal, but have different keys. */
    OF(ELEMENT) least = low & 0x7fff ? low : (OF(ELEMENT))0x8000, greatest = high & 0x7fff ? high : 0;
    NAME(fill)(&bounds->low_key, (OF(ELEMENT))KEY(least));
    NAME(fill)(&bounds->high_key, (OF(ELEMENT))KEY(greatest));
#endif
}

/* Clamps a vector to bounds; NaN is neither below nor above. The mask gets bits where elements changed. */
TARGET INLINE void NAME(clamp_vector)(NAME(Vector) *x, const NAME(Bounds) *bounds, NAME(Mask) *changed) {
#if OF(INFINITE)
    NAME(Vector) key = KEY(*x);
    NAME(Mask) is_number = (*x & 0x7fff) <= OF(INFINITE);
    NAME(Mask) below = (key < bounds->low_key) & is_number, above = (key > bounds->high_key) & is_number;
#else
    NAME(Mask) below = *x < bounds->low, above = *x > bounds->high;
#endif
    NAME(Mask) kept = ~(below | above) & (NAME(Mask))*x;
    *x = (NAME(Vector))(kept | (below & (NAME(Mask))bounds->low) | (above & (NAME(Mask))bounds->high));
    *changed = below | above;
}

/* Sets bits of a mask where elements of the whole vectors from x to `stop` are outside. */
TARGET INLINE void NAME(find_outside)(
    const char *x, const char *stop, const NAME(Bounds) *bounds, NAME(Mask) *outside
) {
    for (; x < stop; x += REGISTER) {
        NAME(Vector) numbers;
        NAME(Mask) changed;
        memcpy(&numbers, x, REGISTER);
        NAME(clamp_vector)(&numbers, bounds, &changed);
        *outside |= changed;
    }
}

/* Whether any bit is set. */
TARGET INLINE int NAME(is_any)(const NAME(Mask) *mask) {
    int64_t words[REGISTER / sizeof(int64_t)], any = 0;
    memcpy(words, mask, REGISTER);
    for (int i = 0; i < (int)(REGISTER / sizeof *words); i++) any |= words[i];
    return any != 0;
}

/* Clamps the whole vectors from x to `stop`, and writes them to y. */
TARGET static void NAME(clamp_vectors)(const char *x, const char *stop, char *y, const NAME(Bounds) *bounds) {
    for (; x < stop; x += REGISTER, y += REGISTER) {
        NAME(Vector) numbers;
        NAME(Mask) changed;
        fetch_ahead(x);
        memcpy(&numbers, x, REGISTER);
        NAME(clamp_vector)(&numbers, bounds, &changed);
        memcpy(y, &numbers, REGISTER);
    }
}

/* Reads the last elements, which are fewer than a vector holds. The first of them fills the vector up, because
 * zeros would be outside of bounds that exclude 0. */
TARGET INLINE void NAME(take_last)(const char *last, const char *end, char *rest) {
    enum { ITEM = sizeof(OF(ELEMENT)) };
    for (char *to_fill = rest; to_fill < rest + REGISTER; to_fill += ITEM) memcpy(to_fill, last, ITEM);
    memcpy(rest, last, (size_t)(end - last));
}

/* Clamps elements to bounds, which are numbers of the dtype; NaN stays. Groups with all elements within are not
 * written. But if most groups of a stretch have elements outside, everything that follows is written. */
TARGET static void NAME(clamp)(void *elements, int64_t n, double from, double to) {
    enum { ITEM = sizeof(OF(ELEMENT)) };
    NAME(Bounds) bounds;
    NAME(make_bounds)(from, to, &bounds);
    char *x = elements, *end = x + n * ITEM, *last = x + n * ITEM / REGISTER * REGISTER;
    while (last - x >= GROUP) {
        int n_groups = (int)((last - x < COMPARED ? last - x : COMPARED) / GROUP), n_outside = 0;
        char *start = x;
        NAME(Mask) outside[COMPARED / GROUP], any = {0};
        for (int i = 0; i < n_groups; i++, x += GROUP) {
            NAME(Mask) own = {0};
            for (const char *line = x; line < x + GROUP; line += LINE) {
                fetch_ahead(line);
                NAME(find_outside)(line, line + LINE, &bounds, &own);
            }
            outside[i] = own, any |= own;
        }
        if (!NAME(is_any)(&any)) continue;
        char *to_clamp[COMPARED / GROUP];
        for (int i = 0; i < n_groups; i++) {
            /* A branch here would often be mispredicted. */
            to_clamp[n_outside] = start + i * GROUP;
            n_outside += NAME(is_any)(outside + i);
        }
        for (int i = 0; i < n_outside; i++) NAME(clamp_vectors)(to_clamp[i], to_clamp[i] + GROUP, to_clamp[i], &bounds);
        if (2 * n_outside > n_groups) break;
    }
    NAME(Mask) left = {0};
    if (last - x < GROUP) NAME(find_outside)(x, last, &bounds, &left);
    if (last - x >= GROUP || NAME(is_any)(&left)) NAME(clamp_vectors)(x, last, x, &bounds);
    if (last == end) return;
    char rest[REGISTER];
    NAME(take_last)(last, end, rest);
    left = (NAME(Mask)){0};
    NAME(find_outside)(rest, rest + REGISTER, &bounds, &left);
    if (!NAME(is_any)(&left)) return;
    NAME(clamp_vectors)(rest, rest + REGISTER, rest, &bounds);
    memcpy(last, rest, (size_t)(end - last));
}

/* Clamps as `clamp` does, but writes to other memory. */
TARGET static void NAME(clamp_to)(const void *elements, void *target, int64_t n, double from, double to) {
    enum { ITEM = sizeof(OF(ELEMENT)) };
    NAME(Bounds) bounds;
    NAME(make_bounds)(from, to, &bounds);
    const char *x = elements, *end = x + n * ITEM, *last = x + n * ITEM / REGISTER * REGISTER;
    char *y = target, rest[REGISTER];
    NAME(clamp_vectors)(x, last, y, &bounds);
    if (last == end) return;
    NAME(take_last)(last, end, rest);
    NAME(clamp_vectors)(rest, rest + REGISTER, rest, &bounds);
    memcpy(y + (last - x), rest, (size_t)(end - last));
}


#undef IN_SUM
#undef NAME
#undef FORM
#undef OF
#undef PASTE
#undef PASTE_
#undef DTYPE
