/* The order of waves over a zig-zag, found by running them; see ../../schedules/hanayo.py. */
#include "kernel.h"

/* Numbers of which the smallest comes first. */
typedef struct {
    int64_t *numbers;
    int64_t count, room;
} Heap;

static int push(Heap *heap, int64_t number)
{
    if (heap->count == heap->room) {
        const int64_t room = heap->room ? 2 * heap->room : 8;
        int64_t *numbers = realloc(heap->numbers, (size_t)room * sizeof *numbers);
        if (!numbers)
            return 0;
        heap->numbers = numbers;
        heap->room = room;
    }
    int64_t at = heap->count++;
    for (; at && heap->numbers[(at - 1) / 2] > number; at = (at - 1) / 2)
        heap->numbers[at] = heap->numbers[(at - 1) / 2];
    heap->numbers[at] = number;
    return 1;
}

static int64_t pop(Heap *heap)
{
    const int64_t first = heap->numbers[0], last = heap->numbers[--heap->count];
    int64_t at = 0;
    for (int64_t child; (child = 2 * at + 1) < heap->count; at = child) {
        child += child + 1 < heap->count && heap->numbers[child + 1] < heap->numbers[child];
        if (heap->numbers[child] >= last)
            break;
        heap->numbers[at] = heap->numbers[child];
    }
    heap->numbers[at] = last;
    return first;
}

typedef struct {
    Heap forwards, backwards; /* forwards that are furthest along come first, backwards of the oldest microbatch */
    int64_t free_at, step, microbatch, at;
    int forward_next;
} Rank;

/* Writes the rows of microbatches that run forwards through `homes` and back again, where a backward takes two slots.
 *
 * A rank alternates forwards and backwards if both are ready. As many microbatches as `most` are in progress. `codes`
 * are those of F and B. Returns 0 or OUT_OF_MEMORY.
 */
int64_t drumline_waves(int64_t num_ranks, int64_t num_microbatches, int64_t turn, const int64_t *homes, int64_t most,
                       const int32_t *codes, int32_t *stage, int32_t *code, int32_t *microbatch)
{
    const int64_t steps = 2 * turn, length = steps / num_ranks * num_microbatches, some = num_microbatches;
    Rank *ranks = calloc((size_t)num_ranks, sizeof *ranks);
    int64_t entered = 0, running = 0, time = 0;
    int room = ranks != NULL;
    for (int64_t number = 0; room && number < num_ranks; number++) {
        ranks[number].step = -1;
        ranks[number].at = number * length;
        ranks[number].forward_next = 1;
    }
    for (; room && entered < most && entered < some; entered++)
        room = push(&ranks[homes[0]].forwards, turn * some + entered);
    while (room) {
        int64_t soon = INT64_MAX;
        for (int64_t number = 0; number < num_ranks; number++) {
            Rank *rank = &ranks[number];
            if (rank->step < 0 && (rank->forwards.count || rank->backwards.count)) {
                const int forward = rank->forwards.count && (rank->forward_next || !rank->backwards.count);
                if (forward) { /* the key is (turn - step, microbatch) */
                    const int64_t key = pop(&rank->forwards);
                    rank->step = turn - key / some;
                    rank->microbatch = key % some;
                } else { /* the key is (microbatch, step) */
                    const int64_t key = pop(&rank->backwards);
                    rank->step = key % steps;
                    rank->microbatch = key / steps;
                }
                rank->forward_next = !forward;
                rank->free_at = time + (forward ? 1 : 2);
                stage[rank->at] = (int32_t)(forward ? rank->step : steps - 1 - rank->step);
                code[rank->at] = codes[!forward];
                microbatch[rank->at++] = (int32_t)rank->microbatch;
                running++;
            }
            if (rank->step >= 0 && rank->free_at < soon)
                soon = rank->free_at;
        }
        if (!running)
            break;
        time = soon;
        for (int64_t number = 0; room && number < num_ranks; number++) {
            const int64_t step = ranks[number].step + 1, now = ranks[number].microbatch;
            if (!step || ranks[number].free_at > time)
                continue;
            ranks[number].step = -1;
            running--;
            if (step < turn)
                room = push(&ranks[homes[step]].forwards, (turn - step) * some + now);
            else if (step < steps)
                room = push(&ranks[homes[steps - 1 - step]].backwards, now * steps + step);
            else if (entered < some)
                room = push(&ranks[homes[0]].forwards, turn * some + entered++);
        }
    }
    for (int64_t number = 0; ranks && number < num_ranks; number++) {
        free(ranks[number].forwards.numbers);
        free(ranks[number].backwards.numbers);
    }
    free(ranks);
    return room ? 0 : OUT_OF_MEMORY;
}
