/* What makes each action's input; see ../clock/producers.py. */
#include "kernel.h"

/* Finds the action that makes the input of each plain action from a neighbouring stage, or -1.
 *
 * `place` is the row of each op in the tables of compute ops, or -1. `complete[bits]` says whether a stage that runs
 * these ops on a microbatch has all of its work. `needs` lists for every compute op how many inputs it needs, then for
 * each the offset of their stage, how many ops may make it, and the rows of these. `where` is scratch for an index per
 * compute op, stage and microbatch.
 *
 * Returns 0, or 1 where it sees what the Python form has to look at: what is missing, repeated, frozen or out of order.
 */
int64_t drumline_producers(int64_t count, const int64_t *code, const int64_t *stage, const int64_t *microbatch,
                           const int64_t *rank, const int64_t *cell, int64_t num_stages, int64_t num_microbatches,
                           const int64_t *place, int64_t num_places, const uint8_t *complete, const int64_t *needs,
                           int32_t *where, int64_t *producer)
{
    const int64_t size = num_stages * num_microbatches;
    for (int64_t slot = 0; slot < num_places * size; slot++)
        where[slot] = -1;
    for (int64_t at = 0; at < count; at++) {
        const int64_t row = place[code[at]];
        producer[at] = -1;
        if (row < 0)
            continue;
        if (stage[at] < 0 || microbatch[at] < 0)
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
        const int64_t *need = needs;
        for (int64_t other = 0; other < row; other++) /* skip what the ops before it need */
            for (int64_t left = *need++; left; left--)
                need += 2 + need[1];
        for (int64_t left = *need++; left; left--) {
            const int64_t offset = need[0], ways = need[1], from = stage[at] + offset;
            int32_t maker = -1;
            if (from < 0 || from >= num_stages) {
                need += 2 + ways;
                continue;
            }
            for (int64_t way = 0; way < ways; way++) {
                const int32_t found = where[need[2 + way] * size + from * num_microbatches + microbatch[at]];
                maker = found > maker ? found : maker;
            }
            need += 2 + ways;
            if (maker < 0)
                return 1;
            if (offset)
                producer[at] = maker;
            else if (rank[maker] != rank[at] || cell[maker] >= cell[at])
                return 1;
        }
    }
    return 0;
}

/* Fills the graph of rows whose actions are its only nodes: the node before each, the one that it needs from another
 * rank, and the number of that message, or -1. For every message it notes who makes and who takes it, and their ranks.
 *
 * `home` is scratch for a rank per stage. `flags` receives whether the actions only compute, each stage on one rank.
 * Returns the number of messages, or -1 if an action needs a later one of its own row.
 */
int64_t drumline_plain_graph(int64_t count, const int64_t *code, const int64_t *stage, const int64_t *rank,
                             const int64_t *place, int64_t num_stages, const int64_t *producer, int64_t *home,
                             int64_t *before, int64_t *need, int64_t *crossing, int64_t *makers, int64_t *takers,
                             int64_t *source, int64_t *target, uint8_t *flags)
{
    int64_t messages = 0;
    flags[0] = 1;
    for (int64_t number = 0; number < num_stages; number++)
        home[number] = -1;
    for (int64_t at = 0; at < count; at++) {
        const int64_t maker = producer[at], here = rank[at];
        before[at] = at > 0 && rank[at - 1] == here ? at - 1 : -1;
        need[at] = crossing[at] = -1;
        if (maker >= 0 && rank[maker] != here) {
            need[at] = maker;
            crossing[at] = messages;
            makers[messages] = maker;
            takers[messages] = at;
            source[messages] = rank[maker];
            target[messages] = here;
            messages++;
        } else if (maker >= at) {
            return -1;
        }
        if (home[stage[at]] < 0)
            home[stage[at]] = here;
        if (home[stage[at]] != here || place[code[at]] < 0)
            flags[0] = 0;
    }
    return messages;
}
