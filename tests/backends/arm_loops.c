/* Runs the loops of `native/` without Python: reads elements, writes what the loops make of them.
 *
 * Arguments: the index of a dtype, a factor, and two bounds. Writes, as float64, parts of a norm of order
 * 2, 1 and inf; then the elements multiplied, clamped into other memory, and clamped in place.
 */
#include <stdio.h>
#include <stdlib.h>

#include "dispatch.h"

enum { MOST = 1 << 20 };

int main(int n_arguments, char **arguments) {
    static char read[MOST], written[MOST];
    int64_t n_bytes = (int64_t)fread(read, 1, MOST, stdin);
    if (n_arguments != 5) return 1;
    const Loops *loops = loops_of + atoi(arguments[1]);
    int64_t n = n_bytes / loops->itemsize;
    for (Verb verb = SUM_SQUARES; verb <= LARGEST; verb++) {
        double part = loops->measure(read, n, verb);
        fwrite(&part, sizeof part, 1, stdout);
    }
    double factor = atof(arguments[2]), low = atof(arguments[3]), high = atof(arguments[4]);
    loops->multiply(read, written, n, factor);
    fwrite(written, 1, (size_t)n_bytes, stdout);
    loops->clamp_to(read, written, n, low, high);
    fwrite(written, 1, (size_t)n_bytes, stdout);
    loops->clamp(read, n, low, high);
    fwrite(read, 1, (size_t)n_bytes, stdout);
    return fastest_loops() != loops_of;
}
