/* Builds a program in one pass: whenever a rank is free, it takes the cheapest offer; see
 * ../../plan/search/construct.py.
 */
#include "rows.h"

/* The lanes of all ranks, and the policies: as construct.py passes them, all of them of 8 bytes. */
typedef struct {
    const int64_t *first_lane;    /* of each rank; one entry more than ranks */
    const int64_t *first_action;  /* of each lane in `actions`; one entry more than lanes */
    const int64_t *actions;       /* F of the lane's microbatches, in order */
    const int64_t *lane_of;       /* per pair */
    const int64_t *taken_on;      /* per action: the rank that waits for its output, or -1 */
    const double *room;           /* per resource and lane */
    const double *forward, *backward, *weight, *ahead; /* per lane */
    const int64_t *joined;                             /* per lane */
    const double *idle, *late_idle;                    /* per rank */
    const int64_t *order, *num_ordered; /* NULL, or the order of F, I and B: per rank, where `rows` have theirs */
} Plan;

typedef struct {
    double time;
    int64_t rank;
} Moment;

typedef struct {
    double price, start;
    int64_t number;
} Offer;

typedef struct {
    const Searched *what;
    const Plan *plan;
    int64_t *rows, *lengths;
    double *begun, *free; /* `free` is each rank's end so far */
    int64_t *forwards, *backwards, *weights, *owed, *num_owed, *forwards_left, *ordered;
    double *wakes, *idle, *ready, *stash;
    Moment *queue;
    int64_t queued;
} Build;

static int comes_first(Moment one, Moment other)
{
    return one.time < other.time || (one.time == other.time && one.rank < other.rank);
}

static void push(Build *build, double time, int64_t rank)
{
    const Moment moment = {time, rank};
    int64_t at = build->queued++;
    for (; at > 0 && comes_first(moment, build->queue[(at - 1) / 2]); at = (at - 1) / 2)
        build->queue[at] = build->queue[(at - 1) / 2];
    build->queue[at] = moment;
}

static Moment pop(Build *build)
{
    const Moment first = build->queue[0], moment = build->queue[--build->queued];
    int64_t at = 0;
    for (;;) {
        int64_t next = 2 * at + 1;
        if (next >= build->queued)
            break;
        if (next + 1 < build->queued && comes_first(build->queue[next + 1], build->queue[next]))
            next++;
        if (!comes_first(build->queue[next], moment))
            break;
        build->queue[at] = build->queue[next];
        at = next;
    }
    build->queue[at] = moment;
    return first;
}

/* Whether a rank can hold `more` of each resource, which are `step` apart. */
static int has_room(const Build *build, int64_t rank, const double *more, int64_t step)
{
    const Searched *what = build->what;
    for (int64_t resource = 0; resource < what->num_resources; resource++) {
        const double always = what->always[resource * what->num_ranks + rank];
        const double stash = build->stash[resource * what->num_ranks + rank];
        if (always + (stash + more[resource * step]) > what->most[resource])
            return 0;
    }
    return 1;
}

/* The offers of a rank so far: the best of all, and the best of those that could start now. */
typedef struct {
    Offer best, at_once;
    int any, any_at_once;
} Offers;

static int is_better(Offer one, Offer other)
{
    if (one.price != other.price)
        return one.price < other.price;
    return one.start < other.start || (one.start == other.start && one.number < other.number);
}

static void offer(Offers *offers, double now, double arrived, double penalty, int64_t number)
{
    const double start = arrived > now ? arrived : now;
    const Offer made = {start + penalty, start, number};
    if (!offers->any || is_better(made, offers->best))
        offers->best = made;
    if (start == now && (!offers->any_at_once || is_better(made, offers->at_once)))
        offers->at_once = made, offers->any_at_once = 1;
    offers->any = 1;
}

/* Finds the rank's next action; `any` is 0 if none is available yet. */
static Offers choose(const Build *build, int64_t rank, double now)
{
    const Plan *plan = build->plan;
    const Searched *what = build->what;
    const int64_t lanes = plan->first_lane[what->num_ranks];
    Offers offers = {{0, 0, 0}, {0, 0, 0}, 0, 0};
    for (int64_t lane = plan->first_lane[rank]; lane < plan->first_lane[rank + 1]; lane++) {
        const int64_t *actions = plan->actions + plan->first_action[lane];
        const int64_t count = plan->first_action[lane + 1] - plan->first_action[lane];
        const int64_t forwards = build->forwards[lane], backwards = build->backwards[lane];
        if (!plan->order && backwards < forwards) {
            const int64_t number = actions[backwards] + (plan->joined[lane] ? B : I);
            const double arrived = build->ready[what->need[number] + 1];
            if (arrived != INFINITY && has_room(build, rank, what->during + number, what->num_actions))
                offer(&offers, now, arrived, plan->backward[lane], number);
        }
        if (build->num_owed[lane] > build->weights[lane])
            offer(&offers, now, now, plan->weight[lane],
                  build->owed[plan->first_action[lane] + build->weights[lane]]);
        if (!plan->order && forwards < count && (double)(forwards - backwards) < plan->ahead[lane]) {
            const int64_t number = actions[forwards];
            const double arrived = build->ready[what->need[number] + 1];
            if (arrived != INFINITY && has_room(build, rank, plan->room + lane, lanes))
                offer(&offers, now, arrived, plan->forward[lane], number);
        }
    }
    if (plan->order && build->ordered[rank] < plan->num_ordered[rank]) {
        const int64_t number = plan->order[what->offsets[rank] + build->ordered[rank]];
        const double arrived = build->ready[what->need[number] + 1];
        if (arrived != INFINITY && has_room(build, rank, what->during + number, what->num_actions))
            offer(&offers, now, arrived, 0.0, number);
    }
    /* If the wait would be too long: take what is ready, if anything. */
    if (offers.any && offers.best.start > now && offers.best.start - build->free[rank] > build->idle[rank] &&
        offers.any_at_once)
        offers.best = offers.at_once;
    return offers;
}

static void take(Build *build, int64_t rank, double time, int64_t number)
{
    const Plan *plan = build->plan;
    const Searched *what = build->what;
    const int64_t op = number & 3, lane = plan->lane_of[number / 4];
    if (op == F) {
        build->forwards[lane]++;
        if (--build->forwards_left[rank] == 0)
            build->idle[rank] += plan->late_idle[rank];
    } else if (op == W) {
        build->weights[lane]++;
    } else {
        build->backwards[lane]++;
        if (op == I)
            build->owed[plan->first_action[lane] + build->num_owed[lane]++] = number - I + W;
    }
    build->ordered[rank] += op != W;
    if (build->lengths[rank])
        build->idle[rank] -= time - build->free[rank];
    else
        build->begun[rank] = time;
    build->rows[what->offsets[rank] + build->lengths[rank]++] = number;
    for (int64_t resource = 0; resource < what->num_resources; resource++)
        build->stash[resource * what->num_ranks + rank] += what->after[resource * what->num_actions + number];
    time += what->seconds[number];
    build->free[rank] = build->wakes[rank] = time;
    push(build, time, rank);
    if (op == W)
        return;
    const int64_t made = MADE(number), taker = plan->taken_on[made];
    const double arrives = build->ready[made + 1] = time + what->latency[number];
    if (taker >= 0 && build->wakes[taker] > arrives) {
        build->wakes[taker] = arrives > build->free[taker] ? arrives : build->free[taker];
        push(build, build->wakes[taker], taker);
    }
}

/* Builds a program; `rows` and `lengths` receive it, `begun` and `ended` each rank's first start and last end.
 *
 * Returns 1, 0 at a dead end, or OUT_OF_MEMORY.
 */
int64_t drumline_construct(const Searched *what, const Plan *plan, int64_t *rows, int64_t *lengths, double *begun,
                           double *ended)
{
    const size_t ranks = (size_t)what->num_ranks, actions = (size_t)what->num_actions;
    const size_t lanes = (size_t)plan->first_lane[ranks], pairs = actions / 4;
    int64_t *counts = calloc(4 * lanes + pairs + 2 * ranks, sizeof *counts);
    double *times = calloc(2 * ranks + actions + 1 + (size_t)what->num_resources * ranks, sizeof *times);
    Moment *queue = malloc((ranks + 6 * pairs + 2) * sizeof *queue);
    int64_t result = OUT_OF_MEMORY;
    if (counts && times && queue) {
        Build build = {what,
                       plan,
                       rows,
                       lengths,
                       begun,
                       ended,
                       counts,
                       counts + lanes,
                       counts + 2 * lanes,
                       counts + 4 * lanes,
                       counts + 3 * lanes,
                       counts + 4 * lanes + pairs,
                       counts + 4 * lanes + pairs + ranks,
                       times,
                       times + ranks,
                       times + 2 * ranks,
                       times + 2 * ranks + actions + 1,
                       queue,
                       0};
        for (size_t number = 0; number < actions; number++)
            build.ready[number + 1] = INFINITY;
        for (size_t rank = 0; rank < ranks; rank++) {
            lengths[rank] = 0;
            begun[rank] = ended[rank] = 0.0;
            build.idle[rank] = plan->idle[rank];
            build.forwards_left[rank] =
                plan->first_action[plan->first_lane[rank + 1]] - plan->first_action[plan->first_lane[rank]];
            push(&build, 0.0, (int64_t)rank);
        }
        int64_t done = 0;
        while (build.queued) {
            const Moment moment = pop(&build);
            if (moment.time != build.wakes[moment.rank])
                continue; /* it was woken earlier */
            const Offers offers = choose(&build, moment.rank, moment.time);
            if (!offers.any) {
                build.wakes[moment.rank] = INFINITY;
            } else if (offers.best.start > moment.time) {
                build.wakes[moment.rank] = offers.best.start;
                push(&build, offers.best.start, moment.rank);
            } else {
                const int64_t op = offers.best.number & 3;
                take(&build, moment.rank, moment.time, offers.best.number);
                done += op == W || op == B;
            }
        }
        result = done == (int64_t)pairs;
    }
    free(counts);
    free(times);
    free(queue);
    return result;
}
