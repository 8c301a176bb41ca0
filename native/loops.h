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

/* Bounds, and their keys: elements are compared by keys, which are in the order of the numbers. */
typedef struct {
    OF(VECTOR) low, high, low_key, high_key;
} NAME(Bounds);

/* Keys of half types are integers, with NaN beyond infinity: twice as many fit a vector as of
 * floats, and none is converted. */
#if OF(INFINITE)
#define KEY(x) ((x) ^ (((x) >> 15) & 0x7fff))
#else
#define KEY(x) (x)
#endif

TARGET INLINE void NAME(make_bounds)(double from, double to, NAME(Bounds) *bounds) {
    OF(ELEMENT) low = (OF(ELEMENT))OF(narrow)(from), high = (OF(ELEMENT))OF(narrow)(to);
    OF(ELEMENT) low_key = (OF(ELEMENT))KEY(low), high_key = (OF(ELEMENT))KEY(high);
#if OF(INFINITE)
    /* -0 and 0 are equal, and have two keys. */
    if (from == 0) low_key = KEY((OF(ELEMENT))0x8000);
    if (to == 0) high_key = 0;
#endif
    /* Less 0, a bound of -0 keeps its sign. */
    OF(VECTOR) zero = {0};
    *bounds = (NAME(Bounds)){low - zero, high - zero, low_key - zero, high_key - zero};
}

/* Loads a vector; which of its elements are below the bounds, and which above. NaN is neither. */
TARGET INLINE void NAME(compare)(
    const char *at, const NAME(Bounds) *bounds, OF(VECTOR) *x, OF(MASK) *below, OF(MASK) *above) {
    fetch_ahead(at);
    memcpy(x, at, sizeof *x);
    *below = KEY(*x) < bounds->low_key;
    *above = KEY(*x) > bounds->high_key;
#if OF(INFINITE)
    OF(MASK) is_number = (*x & 0x7fff) <= OF(INFINITE);
    *below &= is_number;
    *above &= is_number;
#endif
}

/* Brings a vector within bounds; adds to a mask which elements were outside. */
TARGET INLINE void NAME(clamp_vector)(char *at, const NAME(Bounds) *bounds, OF(MASK) *outside) {
    OF(VECTOR) x;
    OF(MASK) below, above;
    NAME(compare)(at, bounds, &x, &below, &above);
    *outside |= below | above;
    OF(MASK) kept = ~(below | above) & (OF(MASK))x;
    kept |= (below & (OF(MASK))bounds->low) | (above & (OF(MASK))bounds->high);
    memcpy(at, &kept, sizeof kept);
}

/* Brings elements within bounds, which are numbers of the dtype. NaN stays, and where all elements
 * are within, none is written. */
TARGET static void NAME(clamp)(void *elements, int64_t n, double from, double to) {
    enum { STEP = sizeof(OF(VECTOR)), ITEM = sizeof(OF(ELEMENT)) };
    NAME(Bounds) bounds;
    NAME(make_bounds)(from, to, &bounds);
    char *x = elements, *end = x + n * ITEM;
    int is_written = 0;
    OF(VECTOR) numbers;
    OF(MASK) outside, below, above;
    while (end - x >= STEP) {
        char *start = x, *last = (end - x < COMPARED ? end : x + COMPARED) - STEP;
        outside = (OF(MASK)){0};
        for (; x <= last && !is_written; x += STEP) {
            NAME(compare)(x, &bounds, &numbers, &below, &above);
            outside |= below | above;
        }
        if (is_written || is_any(&outside, sizeof outside))
            for (x = start; x <= last; x += STEP) NAME(clamp_vector)(x, &bounds, &outside);
        /* Where a stretch had some outside, the next is written without a look before. */
        is_written = is_any(&outside, sizeof outside);
    }
    if (x == end) return;
    /* The first of the last elements fills up the vector: where bounds exclude 0, zeros would be
     * outside. */
    char rest[STEP];
    for (char *to_fill = rest; to_fill < rest + STEP; to_fill += ITEM) memcpy(to_fill, x, ITEM);
    memcpy(rest, x, (size_t)(end - x));
    outside = (OF(MASK)){0};
    NAME(clamp_vector)(rest, &bounds, &outside);
    if (is_any(&outside, sizeof outside)) memcpy(x, rest, (size_t)(end - x));
}

#undef KEY
#undef NAME
#undef OF
#undef PASTE
#undef PASTE_
#undef DTYPE
