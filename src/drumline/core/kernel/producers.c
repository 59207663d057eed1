/* What makes each action's input; see ../clock/producers.py. */
#include "kernel.h"

/* Finds the action that makes the input of each plain action from a neighbouring stage, or -1.
 *
 * `place` is the row of each op in the tables of compute ops, or -1. `complete[bits]` says whether a stage that runs
 * these ops on a microbatch has all of its work. `needs` lists for every compute op how many inputs it needs, then for
 * each the offset of their stage, how many ops may make it, and the rows of these. `where` is scratch for an index per
 * compute op, stage and microbatch.
 *
 * If `home` is not NULL, it is scratch for a rank per stage, and rows have no overlapped pairs. Then `maker` receives
 * only what another rank makes, and `flags` whether the actions only compute, each stage on one rank.
 *
 * Returns 0, or 1 where it sees what the Python form has to look at: what is missing, repeated, frozen or out of order.
 */
int64_t drumline_need(int64_t count, const int32_t *code, const int32_t *stage, const int32_t *microbatch,
                      const int32_t *rank, const int32_t *cell, int64_t num_stages, int64_t num_microbatches,
                      const int64_t *place, int64_t num_places, const uint8_t *complete, const int64_t *needs,
                      int32_t *where, int32_t *maker, int32_t *home, uint8_t *flags)
{
    const int64_t size = num_stages * num_microbatches;
    const int64_t *needs_of[16];
    if (num_places > 16)
        return 1;
    for (int64_t row = 0; row < num_places; row++) {
        needs_of[row] = needs;
        for (int64_t left = *needs++; left; left--)
            needs += 2 + needs[1];
    }
    for (int64_t slot = 0; slot < num_places * size; slot++)
        where[slot] = -1;
    if (home) {
        flags[0] = 1;
        for (int64_t number = 0; number < num_stages; number++)
            home[number] = -1;
    }
    for (int64_t at = 0; at < count; at++) {
        const int64_t row = place[code[at]];
        maker[at] = -1;
        if (stage[at] < 0)
            return 1;
        if (home) {
            if (home[stage[at]] < 0)
                home[stage[at]] = rank[at];
            if (home[stage[at]] != rank[at] || row < 0)
                flags[0] = 0;
        }
        if (row < 0)
            continue;
        if (microbatch[at] < 0)
            return 1;
        int32_t *slot = &where[row * size + stage[at] * num_microbatches + microbatch[at]];
        if (*slot >= 0)
            return 1;
        *slot = (int32_t)at;
    }
    for (int64_t pair = 0; pair < size; pair++) {
        int64_t bits = 0;
        for (int64_t row = 0; row < num_places; row++)
            bits |= (int64_t)(where[row * size + pair] >= 0) << row;
        if (!complete[bits])
            return 1;
    }
    for (int64_t at = 0; at < count; at++) {
        const int64_t row = place[code[at]];
        if (row < 0)
            continue;
        const int64_t *need = needs_of[row];
        for (int64_t left = *need++; left; left--) {
            const int64_t offset = need[0], ways = need[1], from = stage[at] + offset;
            int32_t found = -1;
            if (from < 0 || from >= num_stages) {
                need += 2 + ways;
                continue;
            }
            for (int64_t way = 0; way < ways; way++) {
                const int32_t one = where[need[2 + way] * size + from * num_microbatches + microbatch[at]];
                found = one > found ? one : found;
            }
            need += 2 + ways;
            if (found < 0)
                return 1;
            const int elsewhere = rank[found] != rank[at];
            if (offset && (elsewhere || !home))
                maker[at] = found;
            else if (elsewhere || cell[found] >= cell[at])
                return 1;
        }
    }
    return 0;
}
