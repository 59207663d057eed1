/* What is searched, as ../../plan/search/rows.py passes it: one entry per action number, all of them of 8 bytes.
 *
 * An action's number is 4 * pair + op. Arrays of readiness have one entry more: entry 0 is the start of time, and what
 * action n makes is ready at entry n + 1. So a need of -1 needs no question.
 */
#ifndef DRUMLINE_ROWS_H
#define DRUMLINE_ROWS_H

#include "kernel.h"

enum { F, I, W, B };
enum { MAKESPAN, SPAN, STEADY };

/* I and B of a pair make the same thing: it has the entry of I. */
#define MADE(number) (((number) & 3) == B ? (number) - 2 : (number))

typedef struct {
    int64_t num_ranks, num_actions, num_resources;
    int64_t stage_size; /* action numbers of a stage */
    int64_t in_order;   /* microbatches of a stage may as well stay in order */
    int64_t objective;
    const int64_t *rank; /* of every pair */
    const int64_t *need;
    const int64_t *link; /* that the output travels on, or -1; NULL if none is ever occupied */
    const double *seconds;
    const double *moving; /* how long the output occupies its link */
    const double *late;   /* how long after that it can be used */
    const double *latency; /* both together */
    const double *during, *after; /* what every action adds to each resource, resource by resource */
    const double *always;         /* what every rank holds of each, resource by resource */
    const double *most;
    const double *at_end;   /* seconds that follow every rank's last action */
    const int64_t *offsets; /* where each rank's row begins in `rows`; one entry more than ranks */
} Searched;

/* Rows, and where and when each of them goes on. */
typedef struct {
    const int64_t *rows, *lengths;
    int64_t *at, *also_waiting, *halted;
    int64_t *waits; /* per action: the rank that waits for its output, counted from 1; 0: none */
    double *time, *free;
} Sweep;

/* Runs the rows from where they are; 0 if ranks wait for each other. `ends` (or NULL) receives every action's end. */
int drumline_run_rows(const Searched *what, const Sweep *sweep, double *ready, double *ends);

#endif
