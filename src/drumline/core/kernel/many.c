/* Times many programs under one set of costs in one call; see ../simulate/many.py. */
#include "kernel.h"

int64_t drumline_need(int64_t count, const int32_t *code, const int32_t *stage, const int32_t *microbatch,
                      const int32_t *rank, const int32_t *cell, int64_t num_stages, int64_t num_microbatches,
                      const int64_t *place, int64_t num_places, const uint8_t *complete, const int64_t *needs,
                      int32_t *where, int32_t *maker, int32_t *home, uint8_t *flags);
void drumline_seconds(int64_t count, const int32_t *code, const int32_t *stage, const int32_t *microbatch,
                      int64_t num_stages, const double *table, const double *factors, const uint8_t *computes,
                      double *seconds);
int64_t drumline_clock(int64_t num_nodes, int64_t num_chains, const int64_t *bounds, const int32_t *need,
                       const double *seconds, const double *lag, void *ends, int32_t *runs);

/* A program whose actions are its nodes, as many.py passes it: all of 8 bytes. */
typedef struct {
    int64_t count, num_ranks, num_stages, num_microbatches;
    const int32_t *code, *stage, *microbatch, *rank, *cell;
    const int64_t *bounds; /* of each rank's row: its first action, and the one after its last */
    const double *table;   /* the seconds of every (op, stage) */
    const double *factors; /* of the microbatches, or NULL */
} Timed;

/* The rules of compute ops, as `drumline_need` and `drumline_seconds` take them. */
typedef struct {
    const int64_t *place;
    int64_t num_places;
    const uint8_t *complete;
    const int64_t *needs;
    const uint8_t *computes;
} Rules;

/* Returns a program's last end, or a number below 0 if this has to be looked at in another way. */
static double last_end(const Timed *program, const Rules *rules, double comm, int32_t *numbers, double *times)
{
    const int64_t count = program->count;
    int32_t *maker = numbers, *home = maker + count, *where = home + program->num_stages;
    double *seconds = times, *lag = seconds + count, *ends = lag + count, last = 0.0;
    uint8_t only_computes = 0;
    if (drumline_need(count, program->code, program->stage, program->microbatch, program->rank, program->cell,
                      program->num_stages, program->num_microbatches, rules->place, rules->num_places, rules->complete,
                      rules->needs, where, maker, home, &only_computes) ||
        !only_computes)
        return -1.0;
    drumline_seconds(count, program->code, program->stage, program->microbatch, program->num_stages, program->table,
                     program->factors, rules->computes, seconds);
    for (int64_t at = 0; comm != 0.0 && at < count; at++)
        lag[at] = maker[at] < 0 ? 0.0 : comm;
    if (drumline_clock(count, program->num_ranks, program->bounds, maker, seconds, comm == 0.0 ? NULL : lag, ends,
                       NULL) < 0)
        return -1.0;
    for (int64_t at = 1; at <= count; at++)
        last = ends[at] > last ? ends[at] : last;
    return last;
}

/* Computes when each program ends; below 0 for those that the kernel leaves to others. `comm` is the latency of a
 * message. Returns 0, or OUT_OF_MEMORY.
 */
int64_t drumline_many(int64_t num_programs, const Timed *programs, const Rules *rules, double comm, double *last)
{
    int64_t numbers = 1, times = 1;
    for (int64_t number = 0; number < num_programs; number++) {
        const Timed *program = &programs[number];
        const int64_t pairs = program->num_stages * program->num_microbatches;
        const int64_t few = program->count + program->num_stages + rules->num_places * pairs;
        numbers = few > numbers ? few : numbers;
        times = 3 * program->count + 1 > times ? 3 * program->count + 1 : times;
    }
    int32_t *own_numbers = malloc((size_t)numbers * sizeof *own_numbers);
    double *own_times = malloc((size_t)times * sizeof *own_times);
    const int64_t result = own_numbers && own_times ? 0 : OUT_OF_MEMORY;
    for (int64_t number = 0; !result && number < num_programs; number++)
        last[number] = last_end(&programs[number], rules, comm, own_numbers, own_times);
    free(own_numbers);
    free(own_times);
    return result;
}
