/* What ranks hold, action by action; see ../memory.py. */
#include "kernel.h"

/* Adds up the activation bytes that each rank holds while its actions run, and after them.
 *
 * Plain action i belongs to cell[i] of rank[i]. It adds `more` of its slot when it starts and `less` when it ends, both
 * times the factor of its microbatch (1 if that is -1). `bytes` receives two numbers per cell: during, after.
 */
void drumline_stash(int64_t count, const int64_t *rank, const int64_t *cell, const int64_t *slot,
                    const int64_t *microbatch, const double *more, const double *less, const double *factors,
                    double *bytes)
{
    double during = 0.0, size = 0.0;
    for (int64_t at = 0; at < count; at++) {
        if (at == 0 || rank[at] != rank[at - 1])
            size = 0.0;
        if (at == 0 || cell[at] != cell[at - 1])
            during = size;
        const double factor = microbatch[at] < 0 ? 1.0 : factors[microbatch[at]];
        during += more[slot[at]] * factor;
        size += (more[slot[at]] + less[slot[at]]) * factor;
        bytes[2 * cell[at]] = during;
        bytes[2 * cell[at] + 1] = size;
    }
}
