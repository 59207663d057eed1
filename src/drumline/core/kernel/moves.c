/* Local search on rows: one action moves along the critical path; see ../../plan/search/local.py. */
#include <string.h>

#include "rows.h"

#define REACH 8
#define MAX(one, other) ((one) > (other) ? (one) : (other))
#define MIN(one, other) ((one) < (other) ? (one) : (other))

/* Where an annealing is: local.py makes it, all of it of 8 bytes, and passes it again for the next steps. */
typedef struct {
    int64_t step, num_steps, num_blocks, has_begun, may_join;
    uint64_t drawn; /* the state of the random numbers */
    double heat, now, best, enough;
    int64_t *rows, *lengths, *best_rows, *best_lengths;
    int64_t *blocks; /* rank, first and last position of each */
    int64_t *numbers; /* scratch: 5 per rank, 4 per action number, 3 rows */
    double *reals;    /* scratch: 5 per rank, one per link, 5 per action number and 2, one per resource */
} Anneal;

/* The scratch by its parts. */
typedef struct {
    int64_t *position, *low, *changed, *repaired, *owed, *paid, *old;
    double *ready, *ends, *saved_ready, *saved_ends, *begin, *first, *stash, *again;
    Sweep sweep;
} Scratch;

static Scratch parts(const Searched *what, const Anneal *anneal)
{
    const int64_t ranks = what->num_ranks, actions = what->num_actions, longest = actions / 4 * 3;
    Scratch made;
    int64_t *next = anneal->numbers;
    made.position = next, next += actions;
    made.paid = next, next += actions;
    made.sweep.waits = next, next += actions;
    made.owed = next, next += actions;
    made.changed = next, next += longest;
    made.repaired = next, next += longest;
    made.old = next, next += longest;
    made.low = next, next += ranks;
    made.sweep.at = next, next += ranks;
    made.sweep.also_waiting = next, next += ranks;
    made.sweep.halted = next;
    made.sweep.rows = anneal->rows;
    made.sweep.lengths = anneal->lengths;
    double *real = anneal->reals;
    made.ready = real, real += actions + 1;
    made.again = real, real += actions + 1;
    made.ends = real, real += actions;
    made.saved_ready = real, real += actions;
    made.saved_ends = real, real += actions;
    made.sweep.time = real, real += ranks;
    made.begin = real, real += ranks;
    made.first = real, real += ranks;
    made.stash = real, real += what->num_resources;
    made.sweep.free = real;
    return made;
}

/* The same random numbers everywhere (splitmix64). */
static uint64_t draw(Anneal *anneal)
{
    uint64_t mixed = anneal->drawn += UINT64_C(0x9e3779b97f4a7c15);
    mixed = (mixed ^ (mixed >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
    mixed = (mixed ^ (mixed >> 27)) * UINT64_C(0x94d049bb133111eb);
    return mixed ^ (mixed >> 31);
}

static int64_t below(Anneal *anneal, int64_t count)
{
    return (int64_t)((draw(anneal) >> 32) * (uint64_t)count >> 32);
}

static double share(Anneal *anneal)
{
    return (double)(draw(anneal) >> 11) * 0x1p-53;
}

/* exp(-x), nearly: made of products alone, so that every machine has the same bits. */
static double falling(double x)
{
    double power = 1.0 / (1.0 + x / 1024.0);
    for (int turn = 0; turn < 10; turn++)
        power *= power;
    return power;
}

/* The value of rows whose ends are in `time` and whose `ready` is known. */
static double valued(const Searched *what, const Scratch *scratch)
{
    const int64_t ranks = what->num_ranks;
    const double *time = scratch->sweep.time;
    double value = -INFINITY;
    for (int64_t rank = 0; rank < ranks; rank++) {
        const int64_t *row = scratch->sweep.rows + what->offsets[rank];
        const double arrived = scratch->sweep.lengths[rank] ? scratch->ready[what->need[row[0]] + 1] : 0.0;
        const double each =
            what->objective == MAKESPAN ? time[rank] + what->at_end[rank] : time[rank] - MAX(arrived, 0.0);
        value = MAX(value, each);
    }
    return value;
}

/* The seconds from one step to the next: steps are repeated until they settle, or come and go around their mean. */
static double steady(const Searched *what, const Scratch *scratch)
{
    enum { STEPS = 12 };
    const int64_t ranks = what->num_ranks;
    Sweep sweep = scratch->sweep;
    double *middle = scratch->begin; /* the ends after half of the steps */
    for (int turn = 1; turn <= STEPS; turn++) {
        double longest = -INFINITY, shortest = INFINITY;
        if (turn == STEPS / 2 + 1)
            memcpy(middle, sweep.time, (size_t)ranks * sizeof *middle);
        memcpy(scratch->first, sweep.time, (size_t)ranks * sizeof *scratch->first);
        scratch->again[0] = 0.0;
        for (int64_t number = 0; number < what->num_actions; number++)
            scratch->again[number + 1] = INFINITY;
        for (int64_t rank = 0; rank < ranks; rank++)
            sweep.at[rank] = 0;
        memset(sweep.free, 0, (size_t)(ranks * ranks) * sizeof *sweep.free);
        drumline_run_rows(what, &sweep, scratch->again, NULL);
        for (int64_t rank = 0; rank < ranks; rank++) {
            const double step = sweep.time[rank] - scratch->first[rank];
            longest = MAX(longest, step);
            shortest = MIN(shortest, step);
        }
        if (longest - shortest <= 1e-9 * longest)
            return longest;
    }
    double value = -INFINITY;
    for (int64_t rank = 0; rank < ranks; rank++)
        value = MAX(value, sweep.time[rank] - middle[rank]);
    return value / (STEPS - STEPS / 2);
}

static double measured(const Searched *what, const Scratch *scratch)
{
    return what->objective == STEADY ? steady(what, scratch) : valued(what, scratch);
}

/* Puts a changed row in its place and times what that may change: whatever ends later than the row's first change
 * begins. Returns 0, with everything as before, if ranks would wait for each other.
 */
static void take_back(const Searched *what, Anneal *anneal, Scratch *scratch, int64_t changed_rank, int64_t length)
{
    int64_t *row = anneal->rows + what->offsets[changed_rank];
    memcpy(row, scratch->old, (size_t)length * sizeof *row);
    anneal->lengths[changed_rank] = length;
    for (int64_t rank = 0; rank < what->num_ranks; rank++)
        for (int64_t at = scratch->low[rank]; at < anneal->lengths[rank]; at++) {
            const int64_t number = anneal->rows[what->offsets[rank] + at];
            scratch->ready[MADE(number) + 1] = scratch->saved_ready[number];
            scratch->ends[number] = scratch->saved_ends[number];
        }
}

static int put(const Searched *what, Anneal *anneal, Scratch *scratch, int64_t changed_rank, int64_t length)
{
    int64_t *row = anneal->rows + what->offsets[changed_rank];
    const int64_t old_length = anneal->lengths[changed_rank];
    int64_t first = 0;
    while (row[first] == scratch->changed[first])
        first++;
    const int whole = first == 0 || what->link != NULL; /* links are free again only from the beginning */
    const double since = whole ? 0.0 : scratch->ends[row[first - 1]];
    for (int64_t rank = 0; rank < what->num_ranks; rank++) {
        const int64_t *each = anneal->rows + what->offsets[rank];
        int64_t low = 0, high = whole ? 0 : rank == changed_rank ? first : anneal->lengths[rank];
        if (rank == changed_rank)
            low = high;
        while (low < high) {
            const int64_t middle = (low + high) / 2;
            if (scratch->ends[each[middle]] < since)
                low = middle + 1;
            else
                high = middle;
        }
        scratch->low[rank] = scratch->sweep.at[rank] = low;
        scratch->sweep.time[rank] = low ? scratch->ends[each[low - 1]] : 0.0;
        for (int64_t at = low; at < anneal->lengths[rank]; at++) {
            const int64_t number = each[at];
            scratch->saved_ready[number] = scratch->ready[MADE(number) + 1];
            scratch->saved_ends[number] = scratch->ends[number];
            scratch->ready[MADE(number) + 1] = INFINITY;
        }
    }
    if (what->link)
        memset(scratch->sweep.free, 0, (size_t)(what->num_ranks * what->num_ranks) * sizeof(double));
    memcpy(scratch->old, row, (size_t)old_length * sizeof *row);
    memcpy(row, scratch->changed, (size_t)length * sizeof *row);
    anneal->lengths[changed_rank] = length;
    if (drumline_run_rows(what, &scratch->sweep, scratch->ready, scratch->ends))
        return 1;
    take_back(what, anneal, scratch, changed_rank, old_length);
    return 0;
}

static double ended(const Searched *what, const Scratch *scratch, int64_t number)
{
    return scratch->ready[MADE(number) + 1] - what->latency[number];
}

/* Finds the critical path to the end of the rank that determines the value, as blocks of several actions. */
static void find_blocks(const Searched *what, Anneal *anneal, Scratch *scratch)
{
    int64_t rank = 0, count = 0;
    double most = -INFINITY;
    for (int64_t each = 0; each < what->num_ranks; each++) {
        const int64_t length = anneal->lengths[each];
        const int64_t *row = anneal->rows + what->offsets[each];
        const double end = length ? scratch->ends[row[length - 1]] : 0.0;
        const double begun = length ? MAX(scratch->ready[what->need[row[0]] + 1], 0.0) : 0.0;
        const double lasts = what->objective == MAKESPAN ? end + what->at_end[each] : end - begun;
        if (lasts > most)
            most = lasts, rank = each;
    }
    const int64_t *row = anneal->rows + what->offsets[rank];
    int64_t at = anneal->lengths[rank] - 1, last = at;
    const double length = ended(what, scratch, row[at]), slack = 1e-9 * MAX(length, 1.0);
    for (;;) {
        const int64_t number = row[at], needed = what->need[number];
        const double start = ended(what, scratch, number) - what->seconds[number];
        const int by_need = needed >= 0 && what->rank[needed / 4] != rank && scratch->ready[needed + 1] >= start - slack;
        if (at > 0 && ended(what, scratch, row[at - 1]) >= start - slack && !(by_need && share(anneal) < 0.5)) {
            at--;
            continue;
        }
        if (last > at) {
            anneal->blocks[3 * count] = rank;
            anneal->blocks[3 * count + 1] = at;
            anneal->blocks[3 * count + 2] = last;
            count++;
        }
        if (!by_need)
            break;
        rank = what->rank[needed / 4];
        row = anneal->rows + what->offsets[rank];
        at = scratch->position[needed];
        if (at < 0 || at >= anneal->lengths[rank] || row[at] != needed)
            at = scratch->position[needed + B - I];
        last = at;
    }
    anneal->num_blocks = count;
}

static void note_positions(const Searched *what, const Anneal *anneal, Scratch *scratch, int64_t rank)
{
    for (int64_t at = 0; at < anneal->lengths[rank]; at++)
        scratch->position[anneal->rows[what->offsets[rank] + at]] = at;
}

/* Whether `first` must stay before `second` on one rank. */
static int conflict(const Searched *what, int64_t first, int64_t second)
{
    if (first / 4 == second / 4 || what->need[second] == MADE(first))
        return 1;
    if (!what->in_order || first / what->stage_size != second / what->stage_size)
        return 0;
    const int64_t one = first & 3, other = second & 3;
    return one == other || (one != F && other != F && (one == B || other == B));
}

static int conflicts(const Searched *what, const int64_t *row, int64_t first, int64_t first_end, int64_t second,
                     int64_t second_end)
{
    for (int64_t one = first; one < first_end; one++)
        for (int64_t other = second; other < second_end; other++)
            if (conflict(what, row[one], row[other]))
                return 1;
    return 0;
}

static int fits(const Searched *what, int64_t rank, const int64_t *row, int64_t length)
{
    for (int64_t resource = 0; resource < what->num_resources; resource++) {
        const double *during = what->during + resource * what->num_actions;
        const double *after = what->after + resource * what->num_actions;
        const double always = what->always[resource * what->num_ranks + rank], most = what->most[resource];
        double stash = 0.0;
        for (int64_t at = 0; at < length; at++) {
            if (always + (stash + during[row[at]]) > most)
                return 0;
            stash += after[row[at]];
        }
    }
    return 1;
}

static int is_full(const Searched *what, const Scratch *scratch, int64_t rank, int64_t number)
{
    for (int64_t resource = 0; resource < what->num_resources; resource++) {
        const double more = what->during[resource * what->num_actions + number];
        const double always = what->always[resource * what->num_ranks + rank];
        if (always + (scratch->stash[resource] + more) > what->most[resource])
            return 1;
    }
    return 0;
}

static void hold(const Searched *what, Scratch *scratch, int64_t number)
{
    for (int64_t resource = 0; resource < what->num_resources; resource++)
        scratch->stash[resource] += what->after[resource * what->num_actions + number];
}

/* Moves W of the changed row ahead of whatever would hold too much; returns 0 if that is not enough. */
static int repair(const Searched *what, Scratch *scratch, int64_t rank, int64_t length)
{
    const int64_t *row = scratch->changed;
    int64_t made = 0, begin = 0, end = 0; /* of what is owed */
    int could = 1;
    for (int64_t resource = 0; resource < what->num_resources; resource++)
        scratch->stash[resource] = 0.0;
    for (int64_t at = 0; could && at < length; at++) {
        const int64_t number = row[at];
        if (scratch->paid[number])
            continue;
        while (is_full(what, scratch, rank, number)) {
            while (begin < end && scratch->paid[scratch->owed[begin]])
                begin++;
            if (begin == end) {
                could = 0;
                break;
            }
            const int64_t weight = scratch->owed[begin++];
            scratch->repaired[made++] = weight;
            scratch->paid[weight] = 1;
            hold(what, scratch, weight);
        }
        if (!could)
            break;
        scratch->repaired[made++] = number;
        hold(what, scratch, number);
        if ((number & 3) == I)
            scratch->owed[end++] = number + 1;
        else if ((number & 3) == W)
            scratch->paid[number] = 1;
    }
    for (int64_t at = 0; at < length; at++)
        scratch->paid[row[at]] = 0;
    if (could)
        memcpy(scratch->changed, scratch->repaired, (size_t)length * sizeof *row);
    return could;
}

static int allowed(const Searched *what, Scratch *scratch, int64_t rank, int64_t length)
{
    return fits(what, rank, scratch->changed, length) || repair(what, scratch, rank, length);
}

/* Moves `count` actions from `source` to begin at `target`. */
static int moved(const Searched *what, Scratch *scratch, const int64_t *row, int64_t length, int64_t rank,
                 int64_t source, int64_t target, int64_t count)
{
    if (target > source ? conflicts(what, row, source, source + count, source + count, target + count)
                        : conflicts(what, row, target, source, source, source + count))
        return 0;
    int64_t *changed = scratch->changed;
    memcpy(changed, row, (size_t)length * sizeof *row);
    if (target > source)
        memcpy(changed + source, row + source + count, (size_t)(target - source) * sizeof *row);
    else
        memcpy(changed + target + count, row + target, (size_t)(source - target) * sizeof *row);
    memcpy(changed + target, row + source, (size_t)count * sizeof *row);
    return allowed(what, scratch, rank, length);
}

static int swapped(const Searched *what, Scratch *scratch, const int64_t *row, int64_t length, int64_t rank,
                   int64_t one, int64_t other)
{
    const int64_t low = MIN(one, other), high = MAX(one, other);
    if (low == high || conflicts(what, row, low, low + 1, low + 1, high + 1) ||
        conflicts(what, row, low + 1, high, high, high + 1))
        return 0;
    memcpy(scratch->changed, row, (size_t)length * sizeof *row);
    scratch->changed[low] = row[high];
    scratch->changed[high] = row[low];
    return allowed(what, scratch, rank, length);
}

/* Joins the backward at `at` if it is split, and splits it if it is whole; returns the new length, or 0. */
static int64_t rejoined(const Searched *what, Scratch *scratch, const int64_t *row, int64_t length, int64_t rank,
                        int64_t at)
{
    int64_t made = 0;
    const int64_t number = row[at];
    if ((number & 3) != B && (number & 3) != I)
        return 0;
    for (int64_t each = 0; each < length; each++)
        if ((number & 3) == I) {
            if (row[each] != number + 1)
                scratch->changed[made++] = each == at ? number + 2 : row[each];
        } else {
            scratch->changed[made++] = each == at ? number - 2 : row[each];
            if (each == at)
                scratch->changed[made++] = number - 1;
        }
    return fits(what, rank, scratch->changed, made) ? made : 0;
}

/* Makes one move in `changed`, of the row of `rank`; returns the length of the changed row, or 0. */
static int64_t move(const Searched *what, Anneal *anneal, Scratch *scratch, int64_t *rank)
{
    const int64_t *block = anneal->blocks + 3 * below(anneal, anneal->num_blocks);
    const int64_t low = block[1], high = block[2], *row = anneal->rows + what->offsets[*rank = block[0]];
    const int64_t length = anneal->lengths[*rank];
    int64_t made = length;
    if (anneal->may_join && share(anneal) < 0.15) {
        made = rejoined(what, scratch, row, length, *rank, low + below(anneal, high + 1 - low));
    } else {
        const double kind = share(anneal);
        int could;
        if (kind < 0.3) {
            const int64_t number = low + below(anneal, high + 1 - low);
            const int64_t other = number - REACH + below(anneal, 2 * REACH + 1);
            could = swapped(what, scratch, row, length, *rank, number, MIN(MAX(other, 0), length - 1));
        } else if (kind < 0.45) {
            const int64_t count = below(anneal, 3) == 2 ? 3 : 2;
            const int64_t source = low + below(anneal, high + 1 - low);
            const int64_t target = source - REACH + below(anneal, 2 * REACH + 1);
            could = source + count <= length && target >= 0 && target + count <= length &&
                    moved(what, scratch, row, length, *rank, source, target, count);
        } else {
            int64_t source, target;
            if (kind < 0.75)
                source = low + below(anneal, high - low), target = high;
            else
                source = low + 1 + below(anneal, high - low), target = low;
            if (share(anneal) < 0.3)
                target = source + (target > source ? 1 : -1);
            could = moved(what, scratch, row, length, *rank, source, target, 1);
        }
        made = could ? length : 0;
    }
    if (made == length && memcmp(scratch->changed, row, (size_t)length * sizeof *row) == 0)
        return 0;
    return made;
}

static void keep_best(const Searched *what, Anneal *anneal)
{
    const size_t ranks = (size_t)what->num_ranks, actions = (size_t)what->offsets[ranks];
    anneal->best = anneal->now;
    memcpy(anneal->best_rows, anneal->rows, actions * sizeof *anneal->rows);
    memcpy(anneal->best_lengths, anneal->lengths, ranks * sizeof *anneal->lengths);
}

/* Does at most `most` steps; returns how many, or -1 if the rows to begin with do not run.
 *
 * It ends early if the best is as good as `enough`, after all steps, or if there is no block to change.
 */
int64_t drumline_anneal(const Searched *what, Anneal *anneal, int64_t most)
{
    Scratch scratch = parts(what, anneal);
    if (!anneal->has_begun) {
        for (int64_t rank = 0; rank < what->num_ranks; rank++)
            note_positions(what, anneal, &scratch, rank);
        for (int64_t number = 0; number <= what->num_actions; number++)
            scratch.ready[number] = number ? INFINITY : 0.0;
        if (!drumline_run_rows(what, &scratch.sweep, scratch.ready, scratch.ends))
            return -1;
        anneal->now = measured(what, &scratch);
        keep_best(what, anneal);
        find_blocks(what, anneal, &scratch);
        anneal->has_begun = 1;
    }
    int64_t done = 0;
    for (; done < most && anneal->step < anneal->num_steps && anneal->num_blocks && anneal->best > anneal->enough;
         done++) {
        const int64_t step = anneal->step++;
        int64_t rank;
        const int64_t made = move(what, anneal, &scratch, &rank), length = made ? anneal->lengths[rank] : 0;
        if (!made || !put(what, anneal, &scratch, rank, made))
            continue;
        const double value = measured(what, &scratch);
        const double cold = anneal->heat * anneal->best * (1.0 - (double)step / (double)anneal->num_steps);
        const double worse = value - anneal->now;
        if (worse <= 0 || (cold > 0 && share(anneal) < falling(worse / cold))) {
            anneal->now = value;
            note_positions(what, anneal, &scratch, rank);
            find_blocks(what, anneal, &scratch);
            if (value < anneal->best)
                keep_best(what, anneal);
        } else {
            take_back(what, anneal, &scratch, rank, length);
        }
    }
    return done;
}
