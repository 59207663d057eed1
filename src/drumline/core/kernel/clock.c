/* When every node of a graph starts and ends; see ../graph.py.
 *
 *     end[i] = max(end[i - 1], end[need[i]] + lag[i]) + seconds[i]
 *
 * Arrays of ends have one entry more than there are nodes: entry 0 is the start of time, and node i has entry i + 1.
 * So a need of -1 needs no question. `lag` may be NULL: then nothing takes time to arrive.
 */
#include "kernel.h"

/* A chain of nodes, and how far it has come. */
typedef struct {
    int64_t first, next, high;
    double time;
    uint32_t also_waiting; /* another chain that waits for the same node, counted from 1; 0: none */
} Chain;

/* An end that is not known yet: not a number, whose lower half names a chain that waits for it, counted from 1. */
#define UNKNOWN UINT64_C(0x7ff8d1a600000000)
#define IS_UNKNOWN(bits) (((bits) >> 32) == (UNKNOWN >> 32))

typedef union {
    double time;
    uint64_t bits;
} End;

/* Runs the chains as far as they come; returns how many runs that took, or -1 if chains wait for each other.
 *
 * A chain that needs a node without an end waits in that node's list, and goes on after it. So the clock looks at every
 * node once, whatever the order of the chains.
 */
static inline int64_t run_chains(int64_t num_nodes, Chain *chains, int64_t *ready, int64_t num_ready,
                                 const int32_t *need, const double *seconds, const double *lag, End *ends,
                                 int32_t *runs)
{
    int64_t num_runs = 0, num_ended = 0;
    while (num_ready) {
        const int64_t number = ready[--num_ready];
        Chain *chain = &chains[number];
        const int64_t low = chain->next, high = chain->high;
        double time = chain->time;
        int64_t node = low;
        for (; node < high; node++) {
            const End needed = ends[need[node] + 1];
            if (IS_UNKNOWN(needed.bits)) {
                chain->also_waiting = (uint32_t)needed.bits;
                ends[need[node] + 1].bits = UNKNOWN | (uint64_t)(number + 1);
                break;
            }
            const double arrived = lag ? needed.time + lag[node] : needed.time;
            time = (arrived > time ? arrived : time) + seconds[node];
            uint32_t waiting = (uint32_t)ends[node + 1].bits;
            ends[node + 1].time = time;
            for (; waiting; waiting = chains[waiting - 1].also_waiting)
                ready[num_ready++] = waiting - 1;
        }
        chain->next = node;
        chain->time = time;
        if (node == low)
            continue;
        if (runs) {
            runs[3 * num_runs] = (int32_t)low;
            runs[3 * num_runs + 1] = (int32_t)node;
            runs[3 * num_runs + 2] = (int32_t)(low == chain->first ? -1 : low - 1);
        }
        num_runs++;
        num_ended += node - low;
    }
    return num_ended == num_nodes ? num_runs : -1;
}

/* Computes every node's end; `bounds` are each chain's first node and the one after its last.
 *
 * `runs` (or NULL) receives what ran without a halt, in order: the first node, the one after the last, and the node
 * before the first, or -1. It needs room for as many runs as there are nodes. Returns the number of runs, or what is
 * below 0.
 */
int64_t drumline_clock(int64_t num_nodes, int64_t num_chains, const int64_t *bounds, const int32_t *need,
                       const double *seconds, const double *lag, End *ends, int32_t *runs)
{
    Chain *chains = malloc((size_t)(num_chains + 1) * sizeof *chains);
    int64_t *ready = malloc((size_t)(num_chains + 1) * sizeof *ready);
    int64_t result = OUT_OF_MEMORY;
    if (chains && ready) {
        ends[0].time = 0.0;
        for (int64_t node = 0; node < num_nodes; node++)
            ends[node + 1].bits = UNKNOWN;
        for (int64_t number = 0; number < num_chains; number++) {
            const int64_t low = bounds[2 * number], high = bounds[2 * number + 1];
            chains[number] = (Chain){low, low, high, 0.0, 0};
            ready[num_chains - 1 - number] = number; /* the first chain comes first */
        }
        result = lag ? run_chains(num_nodes, chains, ready, num_chains, need, seconds, lag, ends, runs)
                     : run_chains(num_nodes, chains, ready, num_chains, need, seconds, NULL, ends, runs);
    }
    free(chains);
    free(ready);
    return result;
}

/* Computes every node's start from the ends. */
void drumline_starts(int64_t num_chains, const int64_t *bounds, const int32_t *need, const double *lag,
                     const double *ends, double *starts)
{
    for (int64_t number = 0; number < num_chains; number++)
        for (int64_t node = bounds[2 * number]; node < bounds[2 * number + 1]; node++) {
            const double arrived = lag ? ends[need[node] + 1] + lag[node] : ends[need[node] + 1];
            const double free_from = node == bounds[2 * number] ? 0.0 : ends[node];
            starts[node] = arrived > free_from ? arrived : free_from;
        }
}

/* Samples that are computed side by side: a row of ends then fills a cache line. */
#define WIDTH 8

/* Copies a node's values for some samples; a table of one column says the same for all. */
static inline void copy(double *to, const double *table, int64_t row, int64_t columns, int64_t first, int count)
{
    const double *from = table + row * columns;
    for (int sample = 0; sample < count; sample++)
        to[sample] = columns == 1 ? from[0] : from[first + sample];
    for (int sample = count; sample < WIDTH; sample++)
        to[sample] = 0.0;
}

/* Computes the latest end of many samples, in the order of the runs that `drumline_clock` found.
 *
 * `seconds` has a column per sample, or one; node i takes row rows[i] of it, or row i without `rows`. `lag` has a row
 * per node. `ends` needs room for WIDTH times as many numbers as there are nodes, and WIDTH more.
 */
void drumline_latest(int64_t num_runs, const int32_t *runs, int64_t num_chains, const int64_t *bounds,
                     const int32_t *need, const int32_t *rows, const double *seconds, int64_t columns,
                     const double *lag, int64_t lag_columns, int64_t samples, double *ends, double *latest)
{
    for (int64_t first = 0; first < samples; first += WIDTH) {
        const int count = samples - first < WIDTH ? (int)(samples - first) : WIDTH;
        double now[WIDTH], takes[WIDTH], late[WIDTH];
        for (int sample = 0; sample < WIDTH; sample++)
            ends[sample] = late[sample] = 0.0;
        for (int64_t run = 0; run < num_runs; run++) {
            const double *before = ends + (runs[3 * run + 2] + 1) * WIDTH;
            for (int sample = 0; sample < WIDTH; sample++)
                now[sample] = before[sample];
            for (int64_t node = runs[3 * run]; node < runs[3 * run + 1]; node++) {
                const double *needed = ends + (need[node] + 1) * WIDTH;
                double *end = ends + (node + 1) * WIDTH;
                copy(takes, seconds, rows ? rows[node] : node, columns, first, count);
                if (lag)
                    copy(late, lag, node, lag_columns, first, count);
                for (int sample = 0; sample < WIDTH; sample++) {
                    const double arrived = needed[sample] + late[sample];
                    now[sample] = (arrived > now[sample] ? arrived : now[sample]) + takes[sample];
                    end[sample] = now[sample];
                }
            }
        }
        for (int sample = 0; sample < count; sample++) {
            double last = 0.0;
            for (int64_t number = 0; number < num_chains; number++) {
                const double end = ends[bounds[2 * number + 1] * WIDTH + sample];
                if (bounds[2 * number] < bounds[2 * number + 1] && end > last)
                    last = end;
            }
            latest[first + sample] = last;
        }
    }
}

/* Walks back from a node of plain rows over what each started right after; returns how many nodes `path` receives.
 *
 * That is the node before it in its row if that ended no earlier than the node starts, or else the one that it needed.
 */
int64_t drumline_path(int64_t last, const int32_t *rank, const int32_t *need, const double *starts, const double *ends,
                      int32_t *path)
{
    int64_t count = 0;
    for (int64_t node = last; node >= 0; count++) {
        const int follows = node > 0 && rank[node - 1] == rank[node];
        path[count] = (int32_t)node;
        if (follows && (ends[node - 1] >= starts[node] || need[node] < 0))
            node--;
        else
            node = need[node];
    }
    return count;
}
