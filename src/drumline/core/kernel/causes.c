/* The causes of idle time; see ../timeline/causes.py. */
#include "kernel.h"

/* What is written for every interval: its action and interval are the caller's arrays. */
typedef struct {
    int32_t *rank, *cause, *before, *waits_for;
    double *start, *end;
    int64_t count;
} Found;

static void add(Found *found, int64_t rank, double start, double end, int32_t cause, int64_t before, int64_t waits_for)
{
    if (!(end > start))
        return;
    found->rank[found->count] = (int32_t)rank;
    found->start[found->count] = start;
    found->end[found->count] = end;
    found->cause[found->count] = cause;
    found->before[found->count] = (int32_t)before;
    found->waits_for[found->count++] = (int32_t)waits_for;
}

/* Divides every idle interval of plain rows among its causes; returns how many intervals that makes.
 *
 * `bounds` are each row's first action and the one after its last; no row is empty. `maker` is the action of another
 * rank that made an action's input, or -1. `span` is when the whole starts and ends. The twin's times, and its span,
 * may be NULL. `codes` are those of fill, wait, drain, imbalance and transfer. The results need room for three intervals
 * per action and row.
 */
int64_t drumline_causes(int64_t num_rows, const int64_t *bounds, const int32_t *maker, const double *starts,
                        const double *ends, const double *span, const double *twin_starts, const double *twin_ends,
                        const double *twin_span, int64_t last, const int32_t *codes, int32_t *rank, double *start,
                        double *end, int32_t *cause, int32_t *before, int32_t *waits_for)
{
    Found found = {rank, cause, before, waits_for, start, end, 0};
    for (int64_t row = 0; row < num_rows; row++) {
        const int64_t first = bounds[2 * row], high_node = bounds[2 * row + 1];
        double low = span[0], twin_low = twin_starts ? twin_span[0] : 0.0;
        int worked = 0;
        for (int64_t node = first; node < high_node; node++) {
            const double high = starts[node];
            if (high > low) {
                double excess = 0.0;
                if (twin_starts)
                    excess = high - low - (twin_starts[node] - twin_low);
                double arrived = maker[node] < 0 ? low : ends[maker[node]];
                arrived = arrived > low ? arrived : low;
                arrived = arrived < high ? arrived : high;
                excess = excess > 0.0 ? excess : 0.0;
                const double balanced = arrived - (excess < arrived - low ? excess : arrived - low);
                add(&found, row, low, balanced, codes[worked], node, maker[node]);
                add(&found, row, balanced, arrived, codes[3], node, maker[node]);
                add(&found, row, arrived, high, codes[4], node, maker[node]);
            }
            worked |= ends[node] > starts[node];
            low = ends[node];
            twin_low = twin_starts ? twin_ends[node] : 0.0;
        }
        if (span[1] > low) {
            double excess = 0.0;
            if (twin_starts)
                excess = span[1] - low - (twin_span[1] - twin_low);
            excess = excess > 0.0 ? excess : 0.0;
            const double balanced = span[1] - (excess < span[1] - low ? excess : span[1] - low);
            add(&found, row, low, balanced, codes[2], -1, last);
            add(&found, row, balanced, span[1], codes[3], -1, last);
        }
    }
    return found.count;
}
