/* Whether a program is legal, from its arrays; see ../prove/arrays.py.
 *
 * It looks for no reason: whatever is not legal, or not sure, is left to the checks that name what is wrong.
 */
#include <string.h>

#include "kernel.h"

#define NOT_SURE 1
#define NO_ROLE (-1)

/* What an action of each op is to the checks; ../prove/arrays.py numbers them alike. */
enum { COMPUTE, SEND, RECV, WAIT_SEND, EXCHANGE, WAIT_EXCHANGE, UPDATE, GATHER, RELEASE };

/* What each op is: its role, its column in the table of places, and the rows below for what it makes. */
typedef struct {
    int32_t role, column, sent, received, releases;
} OpRow;

/* The program, and what has been learned of it. */
typedef struct {
    int64_t count, num_ranks, num_stages, num_microbatches, num_columns, has_copies;
    const int32_t *stage, *code, *microbatch, *rank, *cell;
    int32_t *home;
    uint8_t *mirrored;
    const OpRow *ops;
    int64_t counts[RELEASE + 1];
    int32_t *where;   /* the entry of every (stage, microbatch, column), or -1 */
    int32_t *need;    /* what must have happened on another rank before each entry, or -1 */
    int32_t *partner; /* the other end of each message, or -1 */
    int64_t *first;   /* the first entry of every rank, and one more */
} Rows;

static int32_t place_of(const Rows *rows, int64_t stage, int64_t microbatch, int64_t column)
{
    return rows->where[(stage * rows->num_microbatches + microbatch) * rows->num_columns + column];
}

static int64_t home_of(const Rows *rows, int64_t stage, int64_t microbatch)
{
    return rows->mirrored[microbatch] ? rows->num_ranks - 1 - rows->home[stage] : rows->home[stage];
}

/* The last entry of an entry's cell: a pair has happened when both of its halves have. */
static int32_t end_of_cell(const Rows *rows, int32_t at)
{
    return at + 1 < rows->count && rows->cell[at + 1] == rows->cell[at] ? at + 1 : at;
}

static int is_work(const Rows *rows, int64_t at)
{
    return rows->ops[rows->code[at]].role == COMPUTE && rows->stage[at] >= 0 && rows->stage[at] < rows->num_stages &&
           rows->microbatch[at] >= 0 && rows->microbatch[at] < rows->num_microbatches;
}

/* Finds the rank of every stage and the mirrored microbatches, if all work agrees with a placement; see
 * ../placement.py. Of two directions, the one that more microbatches take is down, else the one from the lower rank.
 * `entered` has a number per microbatch, `count` one per rank.
 */
static void place_stages(Rows *rows, int32_t *entered, int64_t *count)
{
    int64_t enters = 0;
    memset(entered, 0xff, (size_t)rows->num_microbatches * sizeof *entered); /* -1 everywhere */
    memset(count, 0, (size_t)rows->num_ranks * sizeof *count);
    for (int64_t at = 0; at < rows->count; at++)
        if (is_work(rows, at) && rows->stage[at] == 0)
            entered[rows->microbatch[at]] = rows->rank[at];
    for (int64_t number = 0; number < rows->num_microbatches; number++)
        if (entered[number] >= 0)
            count[entered[number]]++;
    for (int64_t rank = 1; rank < rows->num_ranks; rank++)
        enters = count[rank] > count[enters] ? rank : enters;
    for (int64_t number = 0; number < rows->num_microbatches; number++)
        rows->mirrored[number] = entered[number] != enters && entered[number] == rows->num_ranks - 1 - enters;
    for (int64_t stage = 0; stage < rows->num_stages; stage++)
        rows->home[stage] = -1;
    for (int64_t at = 0; at < rows->count; at++)
        if (is_work(rows, at) && rows->home[rows->stage[at]] < 0)
            rows->home[rows->stage[at]] =
                rows->mirrored[rows->microbatch[at]] ? (int32_t)rows->num_ranks - 1 - rows->rank[at] : rows->rank[at];
}

/* Enters every action's place; what is done twice, or by a rank that it does not belong to, is not sure. */
static int enter(Rows *rows)
{
    int64_t open_rank = 0;
    for (int64_t at = 0; at < rows->count; at++) {
        const OpRow *op = &rows->ops[rows->code[at]];
        const int64_t stage = rows->stage[at], microbatch = rows->microbatch[at];
        while (open_rank <= rows->rank[at])
            rows->first[open_rank++] = at;
        rows->need[at] = -1;
        if (op->role == NO_ROLE || stage < 0 || stage >= rows->num_stages)
            return NOT_SURE;
        const int named = op->role <= WAIT_SEND || op->role == UPDATE;
        if (named != (microbatch >= 0) || microbatch >= rows->num_microbatches)
            return NOT_SURE;
        rows->counts[op->role]++;
        if (op->role == COMPUTE && rows->rank[at] != home_of(rows, stage, microbatch))
            return NOT_SURE;
        if (op->column >= 0) {
            int32_t *place =
                &rows->where[(stage * rows->num_microbatches + microbatch) * rows->num_columns + op->column];
            if (*place >= 0)
                return NOT_SURE;
            *place = (int32_t)at;
        }
    }
    while (open_rank <= rows->num_ranks)
        rows->first[open_rank++] = rows->count;
    return 0;
}

/* Pairs are a forward and a whole backward: `halves` are the columns of the two. */
static int pairs(const Rows *rows, const uint8_t *paired, const int32_t *halves)
{
    for (int64_t at = 0; at < rows->count; at++) {
        if (!paired[at])
            continue;
        if (at + 1 == rows->count || !paired[at + 1] || rows->cell[at] != rows->cell[at + 1])
            return NOT_SURE;
        const int32_t a = rows->ops[rows->code[at]].column, b = rows->ops[rows->code[at + 1]].column;
        if (!((a == halves[0] && b == halves[1]) || (a == halves[1] && b == halves[0])))
            return NOT_SURE;
        at++;
        if (at + 1 < rows->count && rows->cell[at + 1] == rows->cell[at])
            return NOT_SURE;
    }
    return 0;
}

/* Every stage does all of its kind's work on every microbatch. */
static int complete(const Rows *rows, int64_t num_computes, const uint8_t *kind, const uint8_t *ways)
{
    const int32_t *place = rows->where;
    for (int64_t stage = 0; stage < rows->num_stages; stage++) {
        const uint8_t *admits = ways + ((int64_t)kind[stage] << num_computes);
        for (int64_t microbatch = 0; microbatch < rows->num_microbatches; microbatch++, place += rows->num_columns) {
            int64_t bits = 0;
            for (int64_t column = 0; column < num_computes; column++)
                bits |= (int64_t)(place[column] >= 0) << column;
            if (!admits[bits])
                return NOT_SURE;
        }
    }
    return 0;
}

/* Enters one message: its send behind what makes it, its receive before what takes it. */
static int message(Rows *rows, int32_t maker, int64_t taker)
{
    const OpRow *op = &rows->ops[rows->code[maker]];
    if (op->sent < 0)
        return NOT_SURE;
    const int32_t sent = place_of(rows, rows->stage[maker], rows->microbatch[maker], op->sent);
    const int32_t received = place_of(rows, rows->stage[taker], rows->microbatch[taker], op->received);
    if (sent < 0 || received < 0 || rows->rank[sent] != rows->rank[maker] || rows->rank[received] != rows->rank[taker])
        return NOT_SURE;
    if (sent < maker || received > taker)
        return NOT_SURE;
    rows->partner[sent] = received;
    rows->partner[received] = sent;
    rows->need[taker] = sent;
    return 0;
}

/* Finds every input: those of the own rank come before, those of others are what an action waits for. */
static int inputs(Rows *rows, const int32_t *needs, int spelled)
{
    int64_t num_messages = 0;
    for (int64_t at = 0; at < rows->count; at++) {
        const OpRow *op = &rows->ops[rows->code[at]];
        if (op->role != COMPUTE)
            continue;
        const int32_t *need = needs;
        for (int32_t other = 0; other < op->column; other++) /* skip what the ops before it need */
            for (int32_t left = *need++; left; left--)
                need += 2 + need[1];
        for (int32_t left = *need++; left; need += 2 + need[1], left--) {
            const int64_t from = rows->stage[at] + need[0];
            int32_t maker = -1;
            if (from < 0 || from >= rows->num_stages)
                continue;
            for (int32_t way = 0; way < need[1] && maker < 0; way++)
                maker = place_of(rows, from, rows->microbatch[at], need[2 + way]);
            if (maker < 0)
                return NOT_SURE;
            if (rows->rank[maker] == rows->rank[at]) {
                if (rows->cell[maker] >= rows->cell[at])
                    return NOT_SURE;
                continue;
            }
            num_messages++;
            rows->need[at] = end_of_cell(rows, maker);
            if (spelled && message(rows, maker, at))
                return NOT_SURE;
        }
    }
    return spelled && (rows->counts[SEND] != num_messages || rows->counts[RECV] != num_messages) ? NOT_SURE : 0;
}

/* On every edge, messages are received in the order in which they are sent. */
static int orders(const Rows *rows, int64_t *last)
{
    for (int64_t source = 0; source < rows->num_ranks; source++)
        last[source] = -1;
    for (int64_t rank = 0; rank < rows->num_ranks; rank++) {
        for (int64_t at = rows->first[rank]; at < rows->first[rank + 1]; at++) {
            if (rows->ops[rows->code[at]].role != RECV)
                continue;
            const int64_t sent = rows->partner[at], source = rows->rank[sent];
            if (sent < last[source])
                return NOT_SURE;
            last[source] = sent;
        }
        for (int64_t at = rows->first[rank]; at < rows->first[rank + 1]; at++)
            if (rows->ops[rows->code[at]].role == RECV)
                last[rows->rank[rows->partner[at]]] = -1;
    }
    return 0;
}

/* Every WAIT for a send comes behind it, on its rank, and ends when the receive is posted. */
static int waits_for_sends(Rows *rows)
{
    if (rows->counts[WAIT_SEND] != rows->counts[SEND])
        return NOT_SURE;
    for (int64_t at = 0; at < rows->count; at++) {
        const OpRow *op = &rows->ops[rows->code[at]];
        if (op->role != WAIT_SEND)
            continue;
        const int32_t sent = place_of(rows, rows->stage[at], rows->microbatch[at], op->sent);
        if (sent < 0 || sent > at || rows->rank[sent] != rows->rank[at])
            return NOT_SURE;
        rows->need[at] = rows->partner[sent];
    }
    return 0;
}

/* Work runs only while its stage is gathered, on ranks that gather that stage; `mark` has two numbers per stage. */
static int gathered(const Rows *rows, int64_t *mark)
{
    int64_t *managed = mark, *now = mark + rows->num_stages;
    for (int64_t stage = 0; stage < 2 * rows->num_stages; stage++)
        mark[stage] = -1;
    for (int64_t rank = 0; rank < rows->num_ranks; rank++) {
        for (int64_t at = rows->first[rank]; at < rows->first[rank + 1]; at++)
            if (rows->ops[rows->code[at]].role == GATHER)
                managed[rows->stage[at]] = rank;
        for (int64_t at = rows->first[rank]; at < rows->first[rank + 1]; at++) {
            const int64_t stage = rows->stage[at];
            const int32_t role = rows->ops[rows->code[at]].role;
            if (role == GATHER)
                now[stage] = rank;
            else if (role == RELEASE && now[stage] != rank)
                return NOT_SURE;
            else if (role == RELEASE)
                now[stage] = -1;
            else if (role == COMPUTE && managed[stage] == rank && now[stage] != rank)
                return NOT_SURE;
        }
    }
    return 0;
}

/* What a copy of a stage exchanges, updates and waits for, as entries in the order of its row. */
typedef struct {
    int64_t first[3], count[3];
} Book;

enum { EXCHANGES, UPDATES, WAITS, NO_BOOK = -1 };

static int entry_of(int32_t role)
{
    return role == EXCHANGE ? EXCHANGES : role == UPDATE ? UPDATES : role == WAIT_EXCHANGE ? WAITS : NO_BOOK;
}

/* The book of an entry: copies of a stage are 0 at home and 1 on the mirrored rank; NO_BOOK on any other. */
static int64_t book_of(const Rows *rows, int64_t at)
{
    const int64_t stage = rows->stage[at], home = rows->home[stage];
    if (rows->rank[at] == home)
        return 2 * stage;
    return rows->has_copies && rows->rank[at] == rows->num_ranks - 1 - home ? 2 * stage + 1 : NO_BOOK;
}

static int two_copies(const Rows *rows, int64_t stage)
{
    return rows->has_copies && 2 * rows->home[stage] != rows->num_ranks - 1;
}

/* The entry at which a copy of a stage makes a microbatch's gradients, or -1. */
static int32_t made_at(const Rows *rows, int64_t stage, int64_t copy, int64_t microbatch, int64_t num_ops)
{
    if (two_copies(rows, stage) && rows->mirrored[microbatch] != copy)
        return -1;
    for (int64_t code = 0; code < num_ops; code++)
        if (rows->ops[code].releases) {
            const int32_t at = place_of(rows, stage, microbatch, rows->ops[code].column);
            if (at >= 0)
                return at;
        }
    return -1;
}

/* Every step's gradients are exchanged behind its last backward and before its UPDATE, if they are exchanged. */
static int check_book(const Rows *rows, int64_t stage, int64_t copy, const Book *book, const int64_t *entries,
                      int64_t num_ops)
{
    const int64_t *exchanged = entries + book->first[EXCHANGES], *updated = entries + book->first[UPDATES];
    const int64_t num_exchanges = book->count[EXCHANGES], num_updates = book->count[UPDATES];
    const int exchanges = num_exchanges > 0 || two_copies(rows, stage);
    int64_t microbatch = 0, steps = 0, made = 0;
    for (int64_t turn = 0; turn <= num_updates; turn++) {
        const int is_left = turn == num_updates; /* behind the last UPDATE */
        const int64_t until = is_left ? rows->num_microbatches : rows->microbatch[updated[turn]] + 1;
        int32_t last = -1;
        if (!is_left && until <= microbatch)
            return NOT_SURE;
        for (; microbatch < until; microbatch++) {
            const int32_t at = made_at(rows, stage, copy, microbatch, num_ops);
            if (!is_left && at > updated[turn])
                return NOT_SURE;
            last = at > last ? at : last;
        }
        if (last < 0)
            continue;
        made++;
        if (is_left && rows->counts[UPDATE])
            return NOT_SURE;
        if (exchanges && (steps >= num_exchanges || exchanged[steps] < last))
            return NOT_SURE;
        if (exchanges && steps < num_updates && updated[steps] < exchanged[steps])
            return NOT_SURE;
        steps++;
    }
    if (!made)
        return num_exchanges || num_updates ? NOT_SURE : 0;
    return exchanges && steps != num_exchanges ? NOT_SURE : 0;
}

/* Exchanges that a row waits for begin again only then; all of them are waited for. */
static int waits_for_exchanges(const Book *book, const int64_t *entries)
{
    const int64_t *exchanged = entries + book->first[EXCHANGES], *waited = entries + book->first[WAITS];
    if (book->count[EXCHANGES] != book->count[WAITS])
        return NOT_SURE;
    for (int64_t turn = 0; turn < book->count[WAITS]; turn++)
        if (waited[turn] < exchanged[turn] || (turn && exchanged[turn] < waited[turn - 1]))
            return NOT_SURE;
    return 0;
}

/* Two copies take the same steps, and each waits for the other's exchange. */
static int check_copies(Rows *rows, const Book *books, const int64_t *entries)
{
    for (int copy = 0; copy < 2; copy++) {
        const Book *own = &books[copy], *other = &books[1 - copy];
        if (own->count[UPDATES] != other->count[UPDATES])
            return NOT_SURE;
        for (int64_t turn = 0; turn < own->count[UPDATES]; turn++) {
            const int64_t at = entries[own->first[UPDATES] + turn];
            if (rows->microbatch[at] != rows->microbatch[entries[other->first[UPDATES] + turn]])
                return NOT_SURE;
            if (turn < own->count[EXCHANGES] && turn < other->count[EXCHANGES] &&
                entries[own->first[EXCHANGES] + turn] < at)
                rows->need[at] = (int32_t)entries[other->first[EXCHANGES] + turn];
        }
        for (int64_t turn = 0; turn < own->count[WAITS] && turn < other->count[EXCHANGES]; turn++)
            rows->need[entries[own->first[WAITS] + turn]] = (int32_t)entries[other->first[EXCHANGES] + turn];
    }
    return 0;
}

/* The next exchange of a rank, from an entry on, of a stage that the other rank exchanges too; or the row's end. */
static int64_t next_exchange(const Rows *rows, int64_t at, int64_t rank, const int64_t *other)
{
    for (; at < rows->first[rank + 1]; at++)
        if (rows->ops[rows->code[at]].role == EXCHANGE && other[rows->stage[at]] == rank)
            return at;
    return at;
}

/* Two ranks with copies of the same stages exchange these in one order; `mark` has two numbers per stage. */
static int exchange_orders(const Rows *rows, int64_t *mark)
{
    int64_t *in[2] = {mark, mark + rows->num_stages}; /* in[n][stage]: the rank whose partner exchanges it */
    for (int64_t stage = 0; stage < 2 * rows->num_stages; stage++)
        mark[stage] = -1;
    for (int64_t low = 0; low < rows->num_ranks / 2; low++) {
        const int64_t rank[2] = {low, rows->num_ranks - 1 - low};
        int64_t at[2];
        for (int side = 0; side < 2; side++)
            for (int64_t entry = rows->first[rank[side]]; entry < rows->first[rank[side] + 1]; entry++)
                if (rows->ops[rows->code[entry]].role == EXCHANGE)
                    in[1 - side][rows->stage[entry]] = rank[1 - side];
        for (int side = 0; side < 2; side++)
            at[side] = next_exchange(rows, rows->first[rank[side]], rank[side], in[side]);
        while (at[0] < rows->first[rank[0] + 1] && at[1] < rows->first[rank[1] + 1]) {
            if (rows->stage[at[0]] != rows->stage[at[1]])
                return NOT_SURE;
            for (int side = 0; side < 2; side++)
                at[side] = next_exchange(rows, at[side] + 1, rank[side], in[side]);
        }
    }
    return 0;
}

/* Checks gradient exchanges and updates; `mark` has two numbers per stage. */
static int exchanges(Rows *rows, int64_t num_ops, int has_waits, int64_t *mark)
{
    const int64_t num_books = 2 * rows->num_stages;
    const int64_t total = rows->counts[EXCHANGE] + rows->counts[UPDATE] + rows->counts[WAIT_EXCHANGE];
    Book *books = calloc((size_t)num_books + 1, sizeof *books);
    int64_t *entries = malloc(((size_t)total + 1) * sizeof *entries);
    int result = books && entries ? 0 : OUT_OF_MEMORY;
    for (int pass = 0; pass < 2 && !result; pass++) {
        int64_t taken = 0;
        for (int64_t book = 0; book < num_books && pass; book++)
            for (int which = EXCHANGES; which <= WAITS; which++) {
                books[book].first[which] = taken;
                taken += books[book].count[which];
                books[book].count[which] = 0;
            }
        for (int64_t at = 0; at < rows->count && !result; at++) {
            const int which = entry_of(rows->ops[rows->code[at]].role);
            const int64_t number = which == NO_BOOK ? NO_BOOK : book_of(rows, at);
            if (which == NO_BOOK)
                continue;
            if (number == NO_BOOK) {
                result = NOT_SURE;
                break;
            }
            Book *book = &books[number];
            if (pass)
                entries[book->first[which] + book->count[which]] = at;
            book->count[which]++;
        }
    }
    for (int64_t stage = 0; stage < rows->num_stages && !result; stage++) {
        const Book *book = &books[2 * stage];
        const int copies = two_copies(rows, stage) ? 2 : 1;
        for (int copy = 0; copy < copies && !result; copy++) {
            result = check_book(rows, stage, copy, &book[copy], entries, num_ops);
            if (!result && has_waits)
                result = waits_for_exchanges(&book[copy], entries);
        }
        if (!result && copies == 2)
            result = check_copies(rows, book, entries);
    }
    free(books);
    free(entries);
    return result || !rows->has_copies ? result : exchange_orders(rows, mark);
}

enum { EDGE, PAIR, RANK };

/* Runs the rows as far as the channel allows: on EDGE, a message has arrived when its send is posted. */
typedef struct {
    const Rows *rows;
    int64_t *at;      /* per rank, its next entry */
    int32_t *waiting; /* per entry, a rank that waits for it, counted from 1 */
    int32_t *also;    /* per rank, another that waits for the same */
    int32_t *ready, num_ready;
    int32_t *before, *after; /* per end of a message, its neighbours in their queue; NULL on EDGE */
    uint8_t *moved;
    int32_t *tried; /* messages that may move, as their sends */
} Run;

static void wake(Run *run, int32_t at)
{
    for (int32_t rank = run->waiting[at]; rank; rank = run->also[rank - 1])
        run->ready[run->num_ready++] = rank - 1;
    run->waiting[at] = 0;
}

static int first_in_queue(const Run *run, int32_t at)
{
    return at < run->at[run->rows->rank[at]] && (run->before[at] < 0 || run->moved[run->before[at]]);
}

/* Moves a message if possible, and those behind it. */
static void deliver(Run *run, int32_t end)
{
    int64_t num_tried = 0;
    run->tried[num_tried++] = end;
    while (num_tried) {
        const int32_t at = run->tried[--num_tried], other = run->rows->partner[at];
        if (run->moved[at] || !first_in_queue(run, at) || !first_in_queue(run, other))
            continue;
        run->moved[at] = run->moved[other] = 1;
        wake(run, at);
        wake(run, other);
        if (run->after[at] >= 0)
            run->tried[num_tried++] = run->after[at];
        if (run->after[other] >= 0)
            run->tried[num_tried++] = run->after[other];
    }
}

/* Links the messages of every queue; `last` has a number per rank. */
static void queue_up(Run *run, int64_t channel, int64_t *last)
{
    const Rows *rows = run->rows;
    for (int64_t other = 0; other < rows->num_ranks; other++)
        last[other] = -1;
    for (int64_t at = 0; at < rows->count; at++) {
        run->before[at] = run->after[at] = -1;
        run->moved[at] = 0;
        if (rows->partner[at] < 0)
            continue;
        int64_t *queue = &last[channel == PAIR ? rows->rank[rows->partner[at]] : 0];
        if (*queue >= rows->first[rows->rank[at]]) { /* else it is of an earlier rank */
            run->before[at] = (int32_t)*queue;
            run->after[*queue] = (int32_t)at;
        }
        *queue = at;
    }
}

static int reaches_the_end(Run *run)
{
    const Rows *rows = run->rows;
    for (int64_t rank = rows->num_ranks - 1; rank >= 0; rank--) {
        run->at[rank] = rows->first[rank];
        run->ready[run->num_ready++] = (int32_t)rank;
    }
    while (run->num_ready) {
        const int32_t rank = run->ready[--run->num_ready];
        const int64_t end = rows->first[rank + 1];
        while (run->at[rank] < end) {
            const int32_t at = (int32_t)run->at[rank], need = rows->need[at];
            const int moves = run->moved && need >= 0 && rows->partner[need] >= 0;
            if (need >= 0 && !(moves ? run->moved[need] : need < run->at[rows->rank[need]])) {
                run->also[rank] = run->waiting[need];
                run->waiting[need] = rank + 1;
                break;
            }
            run->at[rank]++;
            if (run->moved && rows->partner[at] >= 0)
                deliver(run, at);
            else
                wake(run, at);
        }
    }
    for (int64_t rank = 0; rank < rows->num_ranks; rank++)
        if (run->at[rank] < rows->first[rank + 1])
            return NOT_SURE;
    return 0;
}

/* Whether no rank waits for ever on this channel; `last` has a number per rank. */
static int runs(const Rows *rows, int64_t channel, int64_t *last)
{
    const size_t count = (size_t)rows->count + 1, ranks = (size_t)rows->num_ranks + 1;
    const int queues = channel != EDGE;
    Run run = {rows, malloc(ranks * sizeof *run.at), calloc(count, sizeof *run.waiting),
               malloc(ranks * sizeof *run.also), malloc(ranks * sizeof *run.ready), 0, NULL, NULL, NULL, NULL};
    int result = run.at && run.waiting && run.also && run.ready ? 0 : OUT_OF_MEMORY;
    if (queues) {
        run.before = malloc(count * sizeof *run.before);
        run.after = malloc(count * sizeof *run.after);
        run.moved = malloc(count);
        run.tried = malloc(count * sizeof *run.tried);
        if (!run.before || !run.after || !run.moved || !run.tried)
            result = OUT_OF_MEMORY;
        else
            queue_up(&run, channel, last);
    }
    if (!result)
        result = reaches_the_end(&run);
    free(run.at);
    free(run.waiting);
    free(run.also);
    free(run.ready);
    free(run.before);
    free(run.after);
    free(run.moved);
    free(run.tried);
    return result;
}

/* Returns 0 if the program is legal, 1 if that is not sure, or what is below 0.
 *
 * Entries are plain actions row by row. `home` is a rank per stage, `mirrored` a flag per microbatch; with `finds_homes`
 * they receive what all work agrees with. `ops` has a row
 * per op: see OpRow. The first `num_computes` columns are those of the compute ops. `needs` lists for each how many
 * inputs it needs, then for each input the offset of its stage, how many ops may make it, and their columns. `ways`
 * says for each kind of backward which sets of compute ops are complete, `kind` the kind of each stage. `halves` are
 * the columns of a pair's two. Channel 0 has a queue per directed edge, 1 one per pair of ranks, 2 one per rank.
 */
int64_t drumline_legal(int64_t count, const int32_t *stage, const int32_t *code, const int32_t *microbatch,
                       const int32_t *rank, const int32_t *cell, const uint8_t *paired, int64_t num_ranks,
                       int64_t num_stages, int64_t num_microbatches, int32_t *home, uint8_t *mirrored,
                       int64_t finds_homes, int64_t num_ops, const int32_t *ops, int64_t num_columns, int64_t num_computes,
                       const int32_t *needs, const uint8_t *kind, const uint8_t *ways, const int32_t *halves,
                       int64_t channel)
{
    Rows rows = {count, num_ranks, num_stages, num_microbatches, num_columns, 0, stage, code, microbatch, rank, cell,
                 home,  mirrored,  (const OpRow *)(const void *)ops, {0}, NULL, NULL, NULL, NULL};
    const size_t size = (size_t)(num_stages * num_microbatches * num_columns) + 1;
    const size_t most = (size_t)(num_ranks > 2 * num_stages ? num_ranks : 2 * num_stages) + 1;
    int64_t *marks = malloc(most * sizeof *marks);
    int result = OUT_OF_MEMORY;
    rows.where = malloc(size * sizeof *rows.where);
    rows.need = malloc(((size_t)count + 1) * sizeof *rows.need);
    rows.partner = malloc(((size_t)count + 1) * sizeof *rows.partner);
    rows.first = malloc(((size_t)num_ranks + 1) * sizeof *rows.first);
    if (marks && rows.where && rows.need && rows.partner && rows.first) {
        if (finds_homes)
            place_stages(&rows, rows.where, marks);
        for (int64_t number = 0; number < num_microbatches; number++)
            rows.has_copies |= mirrored[number];
        memset(rows.where, 0xff, size * sizeof *rows.where); /* -1 everywhere */
        memset(rows.partner, 0xff, (size_t)count * sizeof *rows.partner);
        result = enter(&rows);
        const int spelled = rows.counts[SEND] || rows.counts[RECV];
        const int has_waits = rows.counts[WAIT_SEND] || rows.counts[WAIT_EXCHANGE];
        const int exchanged = rows.counts[UPDATE] || rows.counts[EXCHANGE] || has_waits || rows.has_copies;
        result = result ? result : pairs(&rows, paired, halves);
        result = result ? result : complete(&rows, num_computes, kind, ways);
        result = result ? result : inputs(&rows, needs, spelled);
        result = result || !spelled ? result : orders(&rows, marks);
        result = result || !has_waits ? result : waits_for_sends(&rows);
        result = result || !(rows.counts[GATHER] || rows.counts[RELEASE]) ? result : gathered(&rows, marks);
        result = result || !exchanged ? result : exchanges(&rows, num_ops, has_waits, marks);
        result = result ? result : runs(&rows, spelled ? channel : EDGE, marks);
    }
    free(marks);
    free(rows.where);
    free(rows.need);
    free(rows.partner);
    free(rows.first);
    return result;
}
