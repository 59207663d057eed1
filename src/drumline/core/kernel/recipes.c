/* The rows of recipes, written as arrays; see ../../schedules/cells.py and building_block.py. */
#include "kernel.h"

/* Writes rows of patterns that repeat.
 *
 * A part is its number of turns, the number of actions in a turn, the first microbatch that is left out, and then the
 * stage, op and first microbatch of each of the actions: their microbatches go up by one per turn.
 */
void drumline_turns(int64_t num_parts, const int32_t *part, int32_t *stage, int32_t *code, int32_t *microbatch)
{
    int64_t at = 0;
    for (; num_parts; num_parts--) {
        const int32_t turns = part[0], width = part[1], below = part[2];
        const int32_t *pattern = part + 3;
        for (int32_t turn = 0; turn < turns; turn++)
            for (int32_t number = 0; number < width; number++) {
                const int32_t now = pattern[3 * number + 2] + turn;
                if (now >= below)
                    continue;
                stage[at] = pattern[3 * number];
                code[at] = pattern[3 * number + 1];
                microbatch[at] = now;
                at++;
            }
        part = pattern + 3 * width;
    }
}

/* Writes rows that take the entries of the same lanes in turn; the lanes lie one after the other.
 *
 * A row is three numbers. It begins with `ahead` entries of the first lane. Then every lane gives an entry per turn, the
 * third and later ones from turn `delay` on. All stages are `down` further.
 */
void drumline_lanes(int64_t num_lanes, const int64_t *lengths, int64_t num_rows, const int64_t *rows,
                    const int32_t *of_stage, const int32_t *of_code, const int32_t *of_microbatch, int32_t *stage,
                    int32_t *code, int32_t *microbatch)
{
    int64_t at = 0;
    for (; num_rows; num_rows--, rows += 3) {
        const int64_t ahead = rows[0], delay = rows[1];
        const int32_t down = (int32_t)rows[2];
        int64_t turns = 0;
        for (int64_t lane = 0; lane < num_lanes; lane++) {
            const int64_t left = lengths[lane] + (lane ? (lane > 1 ? delay : 0) : -ahead);
            turns = left > turns ? left : turns;
        }
        for (int64_t entry = 0; entry < ahead; entry++, at++) {
            stage[at] = of_stage[entry] + down;
            code[at] = of_code[entry];
            microbatch[at] = of_microbatch[entry];
        }
        for (int64_t turn = 0; turn < turns; turn++) {
            int64_t first = 0;
            for (int64_t lane = 0; lane < num_lanes; lane++) {
                const int64_t number = lane ? turn - (lane > 1 ? delay : 0) : turn + ahead;
                if (number >= 0 && number < lengths[lane]) {
                    const int64_t entry = first + number;
                    stage[at] = of_stage[entry] + down;
                    code[at] = of_code[entry];
                    microbatch[at] = of_microbatch[entry];
                    at++;
                }
                first += lengths[lane];
            }
        }
    }
}

/* A rank's place in its repeated block: the next microbatch of F down, F up, I up and I down, and of both W. */
typedef struct {
    const int64_t *slots; /* of these four in the first block */
    int64_t next[4], owed[4], held;
} Block;

/* Returns which of the actions first to 3 has the next slot, -1 if none is left. */
static int next_slot(const Block *block, const int64_t *next, const int64_t *limit, int first, int64_t step)
{
    int which = -1;
    for (int one = first; one < 4; one++)
        if (next[one] < limit[one] && (which < 0 || block->slots[one] + step * next[one] <
                                                        block->slots[which] + step * next[which]))
            which = one;
    return which;
}

/* Returns the most pairs that a rank holds if every W takes the first free slot after its I. */
static int64_t block_peak(const int64_t *slots, const int64_t *limit, int64_t step)
{
    Block block = {slots, {0, 0, 0, 0}, {0, 0, 0, 0}, 0};
    int64_t held = 0, peak = 0, owed = 0, free_from = 0;
    for (int which; (which = next_slot(&block, block.next, limit, 0, step)) >= 0;) {
        const int64_t slot = slots[which] + step * block.next[which]++;
        const int64_t paid = owed < slot - free_from ? owed : slot - free_from;
        held -= paid;
        owed -= paid;
        free_from = slot + 1;
        if (which < 2)
            peak = ++held > peak ? held : peak;
        else
            owed++;
    }
    return peak;
}

/* Writes the rows of a building block that is repeated every `step` slots, in a V of two stages per rank.
 *
 * `slots` are four per rank: F down, F up, I up, I down. F and I keep the order of their slots, W runs where nothing
 * else can, or where the rank would hold more pairs than the block's own peak. `codes` are those of F, I and W.
 * Returns 0, 1 if the order cannot run, or OUT_OF_MEMORY.
 */
int64_t drumline_block(int64_t num_ranks, int64_t num_microbatches, int64_t step, const int64_t *slots,
                       const int32_t *codes, int32_t *stage, int32_t *code, int32_t *microbatch)
{
    const int64_t limit[4] = {num_microbatches, num_microbatches, num_microbatches, num_microbatches};
    const int64_t last = 2 * num_ranks - 1, length = 6 * num_microbatches;
    Block *blocks = malloc((size_t)num_ranks * sizeof *blocks);
    int64_t *at = malloc((size_t)num_ranks * sizeof *at);
    int *ran = malloc((size_t)num_ranks * sizeof *ran);
    /* How many F, then how many I, every stage has run; with an empty stage around them. */
    int64_t *done = calloc((size_t)(4 * num_ranks + 4), sizeof *done), *forwards = done + 1;
    int64_t *inputs = done ? forwards + 2 * num_ranks + 2 : NULL;
    int64_t left = num_ranks * length, peak = 0, result = blocks && at && ran && done ? 0 : OUT_OF_MEMORY;
    for (int64_t rank = 0; !result && rank < num_ranks; rank++) {
        const int64_t most = block_peak(slots + 4 * rank, limit, step);
        blocks[rank] = (Block){slots + 4 * rank, {0, 0, 0, 0}, {0, 0, 0, 0}, 0};
        at[rank] = rank * length;
        peak = most > peak ? most : peak;
    }
    if (!result)
        forwards[-1] = inputs[2 * num_ranks] = num_microbatches;
    while (!result && left) {
        const int64_t before = left;
        for (int64_t rank = 0; rank < num_ranks; rank++) {
            Block *block = &blocks[rank];
            int which = next_slot(block, block->next, limit, 0, step);
            const int64_t homes[4] = {rank, last - rank, last - rank, rank};
            ran[rank] = -1;
            if (which >= 0) {
                const int64_t home = homes[which], number = block->next[which];
                const int64_t made = which < 2 ? forwards[home - 1] : inputs[home + 1];
                if (made <= number || (which < 2 && block->held >= peak))
                    which = -1;
            }
            if (which >= 0) {
                block->held += which < 2;
                stage[at[rank]] = (int32_t)homes[which];
                code[at[rank]] = codes[which >= 2];
                microbatch[at[rank]++] = (int32_t)block->next[which]++;
                ran[rank] = which;
            } else {
                which = next_slot(block, block->owed, block->next, 2, step);
                if (which < 0)
                    continue;
                block->held--;
                stage[at[rank]] = (int32_t)homes[which];
                code[at[rank]] = codes[2];
                microbatch[at[rank]++] = (int32_t)block->owed[which]++;
            }
            left--;
        }
        for (int64_t rank = 0; rank < num_ranks; rank++)
            if (ran[rank] >= 0)
                (ran[rank] < 2 ? forwards : inputs)[ran[rank] % 3 ? last - rank : rank]++;
        result = left == before;
    }
    free(blocks);
    free(at);
    free(ran);
    free(done);
    return result;
}
