/* When every action of a row ends; see ../../plan/search/row_times.py.
 *
 *     end = max(end of the previous one, ready of its need) + seconds        ready = end + latency
 *
 * A link of finite bandwidth carries one message at a time, in the order of its source's row.
 */
#include "rows.h"

int drumline_run_rows(const Searched *what, const Sweep *sweep, double *ready, double *ends)
{
    int64_t count = 0, left = 0;
    for (int64_t rank = what->num_ranks - 1; rank >= 0; rank--)
        if (sweep->at[rank] < sweep->lengths[rank]) {
            sweep->halted[count++] = rank;
            left++;
        }
    while (count) {
        const int64_t rank = sweep->halted[--count], length = sweep->lengths[rank];
        const int64_t *row = sweep->rows + what->offsets[rank];
        double time = sweep->time[rank];
        int64_t at = sweep->at[rank];
        for (; at < length; at++) {
            const int64_t number = row[at], need = what->need[number];
            const double arrived = ready[need + 1];
            if (arrived == INFINITY) {
                sweep->also_waiting[rank] = sweep->waits[need];
                sweep->waits[need] = rank + 1;
                break;
            }
            if (arrived > time)
                time = arrived;
            time += what->seconds[number];
            if (ends)
                ends[number] = time;
            const int64_t made = MADE(number);
            double sent = time;
            if (what->link && what->link[number] >= 0) {
                double *free = &sweep->free[what->link[number]];
                sent = *free = (time > *free ? time : *free) + what->moving[number];
            }
            ready[made + 1] = sent + what->late[number];
            int64_t waiting = sweep->waits[made];
            for (sweep->waits[made] = 0; waiting; waiting = sweep->also_waiting[waiting - 1])
                sweep->halted[count++] = waiting - 1;
        }
        sweep->at[rank] = at;
        sweep->time[rank] = time;
        left -= at == length;
    }
    if (left)
        for (int64_t rank = 0; rank < what->num_ranks; rank++)
            if (sweep->at[rank] < sweep->lengths[rank])
                sweep->waits[what->need[sweep->rows[what->offsets[rank] + sweep->at[rank]]]] = 0;
    return left == 0;
}

/* Times rows of which each rank begins at `begin`.
 *
 * `ready` receives an entry per action and one more; `first` and `last` each rank's first start and last end. Returns
 * 1, 0 if ranks wait for each other, or OUT_OF_MEMORY.
 */
int64_t drumline_rows(const Searched *what, const int64_t *rows, const int64_t *lengths, const double *begin,
                      double *ready, double *first, double *last)
{
    const size_t ranks = (size_t)what->num_ranks, actions = (size_t)what->num_actions;
    int64_t *whole = calloc(3 * ranks + actions, sizeof *whole);
    double *free_from = calloc(ranks * ranks, sizeof *free_from);
    int64_t result = OUT_OF_MEMORY;
    if (whole && free_from) {
        const Sweep sweep = {rows,          lengths, whole,    whole + ranks, whole + 2 * ranks, whole + 3 * ranks,
                             last, free_from};
        ready[0] = 0.0;
        for (size_t number = 0; number < actions; number++)
            ready[number + 1] = INFINITY;
        for (size_t rank = 0; rank < ranks; rank++)
            last[rank] = begin[rank];
        result = drumline_run_rows(what, &sweep, ready, NULL);
        for (size_t rank = 0; result && rank < ranks; rank++) {
            const double arrived = lengths[rank] ? ready[what->need[rows[what->offsets[rank]]] + 1] : 0.0;
            first[rank] = arrived > begin[rank] ? arrived : begin[rank];
        }
    }
    free(whole);
    free(free_from);
    return result;
}
