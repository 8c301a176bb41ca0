/* The loops over contiguous elements of one dtype, for one instruction set.
 *
 * Included once for each, with DTYPE and ISA, which end the names of functions, and TARGET, the
 * attribute of the instruction set; `elements.h` has the types.
 */

#define PASTE_(a, b) a##_##b
#define PASTE(a, b) PASTE_(a, b)
#define OF(name) PASTE(name, DTYPE)
#define NAME(function) PASTE(OF(function), ISA)

/* Squares of half types that each lane adds up in float32. */
#define RUN 8
/* Bytes that are compared with the bounds before any of them is written: a core's nearest cache
 * holds them meanwhile. */
#define COMPARED 8192

/* The sum of squares in float64; those of float32 fit it, whatever they are. */
TARGET static double NAME(sum_in_float64)(const void *elements, int64_t n) {
    const OF(AT) *x = elements;
    double lanes[LANES] = {0};
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        for (int at = 0; at < LANES; at += LINE / (int)sizeof *x) fetch_ahead(x + i + at);
        for (int j = 0; j < LANES; j++) {
            double number = (double)OF(widen)(x[i + j]);
            lanes[j] += number * number;
        }
    }
    for (int j = 0; i < n; i++, j++) {
        double number = (double)OF(widen)(x[i]);
        lanes[j] += number * number;
    }
    return sum_of_lanes(lanes);
}

/* Whether any element is not 0; NaN is not. */
TARGET static int NAME(has_any)(const void *elements, int64_t n) {
    const OF(BITS_AT) *x = elements;
    OF(BITS_AT) any = 0;
    for (int64_t i = 0; i < n; i++) any |= x[i];
    /* Without the sign. */
    return (OF(BITS_AT))(any << 1) != 0;
}

/* The sum of squares.
 *
 * Squares of half types are exact in float32, where RUN of them are added up before they go on in
 * float64: such a sum is off by 7 * 2^-24 at most, its root by 2.1e-7. Squares that float32 does not
 * hold are added up again in float64 alone. Squares of float64 that all underflow have a sum that is
 * not 0, so that only the norm of zeros is.
 */
TARGET static double NAME(sum_squares)(const void *elements, int64_t n) {
#if OF(INFINITE)
    const OF(AT) *x = elements;
    double lanes[LANES] = {0};
    int64_t i = 0;
    for (; i + RUN * LANES <= n; i += RUN * LANES) {
        Floats sums[LANES / WIDE] = {0}, wide;
        for (int64_t k = i; k < i + RUN * LANES; k += LANES) {
            fetch_ahead(x + k);
            for (int side = 0; side < LANES / WIDE; side++) {
                NAME(load)(x + k + side * WIDE, &wide);
                sums[side] += wide * wide;
            }
        }
        float flat[LANES];
        memcpy(flat, sums, sizeof flat);
        for (int j = 0; j < LANES; j++) lanes[j] += (double)flat[j];
    }
    double sum = sum_of_lanes(lanes);
    int is_known = sum >= 0x1p-60 && sum < INFINITY;
    if (i && !is_known && (sum || NAME(has_any)(x, i))) i = 0, sum = 0;
    return sum + NAME(sum_in_float64)(x + i, n - i);
#else
    double sum = NAME(sum_in_float64)(elements, n);
    int may_underflow = sizeof(OF(ELEMENT)) == sizeof(double);
    return !sum && may_underflow && NAME(has_any)(elements, n) ? 0x1p-1022 : sum;
#endif
}

/* Multiplies by a number, rounded to the dtype of the arithmetic. The last elements go through a
 * buffer. */
TARGET static void NAME(multiply)(void *elements, int64_t n, double number) {
    OF(AT) *x = elements, last[WIDE] = {0};
    OF(WIDENED) factor = (__typeof__(factor[0]))number - (OF(WIDENED)){0}, wide;
    int64_t i = 0;
    for (; i + WIDE <= n; i += WIDE) {
        fetch_ahead(x + i);
        NAME(load)(x + i, &wide);
        wide *= factor;
        NAME(store)(&wide, x + i);
    }
    if (i == n) return;
    size_t rest = sizeof *x * (size_t)(n - i);
    memcpy(last, x + i, rest);
    NAME(load)(last, &wide);
    wide *= factor;
    NAME(store)(&wide, last);
    memcpy(x + i, last, rest);
}

/* Bounds, and their keys: half types are compared by keys, integers in the order of the numbers with
 * NaN beyond infinity. Twice as many fit a vector as of floats, and none is converted. */
typedef struct {
    OF(VECTOR) low, high;
#if OF(INFINITE)
    OF(VECTOR) low_key, high_key;
#endif
} NAME(Bounds);

TARGET INLINE void NAME(make_bounds)(double from, double to, NAME(Bounds) *bounds) {
    OF(ELEMENT) low = (OF(ELEMENT))OF(narrow)(from), high = (OF(ELEMENT))OF(narrow)(to);
    OF(VECTOR) zero = {0};
    /* Less 0, a bound of -0 keeps its sign. */
    bounds->low = low - zero, bounds->high = high - zero;
#if OF(INFINITE)
    /* -0 and 0 are equal, and have two keys. */
    OF(ELEMENT) least = from ? low : (OF(ELEMENT))0x8000, greatest = to ? high : 0;
    bounds->low_key = (OF(ELEMENT))KEY(least) - zero, bounds->high_key = (OF(ELEMENT))KEY(greatest) - zero;
#endif
}

/* Brings a vector within bounds; NaN is neither below nor above. Sets bits of a mask where it changed. */
TARGET INLINE void NAME(clamp_vector)(OF(VECTOR) *x, const NAME(Bounds) *bounds, OF(MASK) *changed) {
#if OF(INFINITE)
    OF(VECTOR) key = KEY(*x);
    OF(MASK) is_number = (*x & 0x7fff) <= OF(INFINITE);
    OF(MASK) below = (key < bounds->low_key) & is_number, above = (key > bounds->high_key) & is_number;
#else
    OF(MASK) below = *x < bounds->low, above = *x > bounds->high;
#endif
    OF(MASK) kept = ~(below | above) & (OF(MASK))*x;
    *x = (OF(VECTOR))(kept | (below & (OF(MASK))bounds->low) | (above & (OF(MASK))bounds->high));
    *changed |= below | above;
}

/* Brings elements within bounds, which are numbers of the dtype. NaN stays. A stretch with all elements
 * within is not written, unless one before had some outside: `is_written`, which is returned for the
 * elements to come, says so. */
TARGET static int NAME(clamp)(void *elements, int64_t n, double from, double to, int is_written) {
    enum { STEP = sizeof(OF(VECTOR)), ITEM = sizeof(OF(ELEMENT)) };
    NAME(Bounds) bounds;
    NAME(make_bounds)(from, to, &bounds);
    char *x = elements, *end = x + n * ITEM;
    OF(VECTOR) numbers;
    OF(MASK) changed;
    while (end - x >= STEP) {
        char *start = x, *last = (end - x < COMPARED ? end : x + COMPARED) - STEP;
        changed = (OF(MASK)){0};
        if (!is_written)
            for (; x <= last; x += STEP) {
                fetch_ahead(x);
                memcpy(&numbers, x, STEP);
                NAME(clamp_vector)(&numbers, &bounds, &changed);
            }
        if (is_written || is_any(&changed, STEP))
            for (x = start; x <= last; x += STEP) {
                fetch_ahead(x);
                memcpy(&numbers, x, STEP);
                NAME(clamp_vector)(&numbers, &bounds, &changed);
                memcpy(x, &numbers, STEP);
            }
        /* Where a stretch had some outside, the next is written without a look before. */
        is_written = is_any(&changed, STEP);
    }
    if (x == end) return is_written;
    /* The first of the last elements fills up the vector: where bounds exclude 0, zeros would be
     * outside. */
    char rest[STEP];
    for (char *to_fill = rest; to_fill < rest + STEP; to_fill += ITEM) memcpy(to_fill, x, ITEM);
    memcpy(rest, x, (size_t)(end - x));
    memcpy(&numbers, rest, STEP);
    changed = (OF(MASK)){0};
    NAME(clamp_vector)(&numbers, &bounds, &changed);
    if (is_any(&changed, STEP)) memcpy(x, &numbers, (size_t)(end - x));
    return is_written;
}

#undef NAME
#undef OF
#undef PASTE
#undef PASTE_
#undef DTYPE
