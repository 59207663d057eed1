/* What ranks hold, action by action; see ../memory.py. */
#include "kernel.h"

/* Adds up the activation bytes that each rank holds while its actions run, and after them.
 *
 * Plain action i belongs to cell[i] of rank[i]. It adds `more` of its op and stage when it starts and `less` when it
 * ends, both times the factor of its microbatch (1 if that is -1). `bytes` receives two numbers per cell: during, after.
 */
void drumline_stash(int64_t count, const int32_t *rank, const int32_t *cell, const int32_t *code, const int32_t *stage,
                    const int32_t *microbatch, int64_t num_stages, const double *more, const double *less,
                    const double *factors, double *bytes)
{
    double during = 0.0, size = 0.0;
    for (int64_t at = 0; at < count; at++) {
        if (at == 0 || rank[at] != rank[at - 1])
            size = 0.0;
        if (at == 0 || cell[at] != cell[at - 1])
            during = size;
        const int64_t slot = code[at] * num_stages + stage[at];
        const double factor = microbatch[at] < 0 ? 1.0 : factors[microbatch[at]];
        during += more[slot] * factor;
        size += (more[slot] + less[slot]) * factor;
        bytes[2 * (int64_t)cell[at]] = during;
        bytes[2 * (int64_t)cell[at] + 1] = size;
    }
}

/* Counts the pairs that each rank holds while its actions run, and after them: two numbers per cell, as in `stash`.
 *
 * `begins` says which ops begin to hold a pair, `ends` which (op, stage) release it.
 */
void drumline_pairs(int64_t count, const int32_t *rank, const int32_t *cell, const int32_t *code, const int32_t *stage,
                    int64_t num_stages, const uint8_t *begins, const uint8_t *ends, int32_t *pairs)
{
    int32_t during = 0, held = 0;
    for (int64_t at = 0; at < count; at++) {
        if (at == 0 || rank[at] != rank[at - 1])
            held = 0;
        if (at == 0 || cell[at] != cell[at - 1])
            during = held;
        during += begins[code[at]];
        held += begins[code[at]] - ends[code[at] * num_stages + stage[at]];
        pairs[2 * (int64_t)cell[at]] = during;
        pairs[2 * (int64_t)cell[at] + 1] = held;
    }
}

/* Looks up the seconds of every plain action: those of its op and stage, times the factor of its microbatch.
 *
 * `factors` may be NULL. They affect only the ops that `computes` says.
 */
void drumline_seconds(int64_t count, const int32_t *code, const int32_t *stage, const int32_t *microbatch,
                      int64_t num_stages, const double *table, const double *factors, const uint8_t *computes,
                      double *seconds)
{
    for (int64_t at = 0; at < count; at++) {
        const double each = table[code[at] * num_stages + stage[at]];
        seconds[at] = factors && computes[code[at]] ? each * factors[microbatch[at]] : each;
    }
}
