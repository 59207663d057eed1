/* Rows of actions from their text form, and back; see ../program.py and text.py. */
#include <string.h>

#include "kernel.h"

#define IRREGULAR (-1)
#define TOO_MANY (-3)

/* How an op is written, and whether it takes a microbatch, computes, or is an overlapped pair. */
typedef struct {
    const char *name;
    int64_t length;
    int takes_microbatch, computes, is_pair;
} Spelling;

#define MOST_OPS 64

/* Where the text is read, and the arrays that receive its actions; `stage` may be NULL, to count only.
 *
 * Actions with a microbatch name a slice of it, all or none: of `num_slices`, which counting finds.
 */
typedef struct {
    const char *at, *end;
    Spelling ops[MOST_OPS];
    int64_t num_ops, count, num_cells, num_slices, num_whole, num_sliced;
    int32_t *stage, *code, *microbatch, *cell;
    uint8_t *paired;
} Reader;

static int is_digit(char letter)
{
    return letter >= '0' && letter <= '9';
}

static int is_part_of_name(char letter)
{
    return (letter >= 'A' && letter <= 'Z') || letter == '_';
}

/* Reads a number of up to nine digits that has only one spelling; -1 if there is none. */
static int64_t number(Reader *reader)
{
    const char *first = reader->at;
    int64_t value = 0;
    while (reader->at < reader->end && is_digit(*reader->at) && reader->at - first < 10)
        value = 10 * value + (*reader->at++ - '0');
    const int64_t length = reader->at - first;
    return length == 0 || length > 9 || (length > 1 && *first == '0') ? -1 : value;
}

/* Reads the name of an op; returns its code, or -1. */
static int64_t op(Reader *reader)
{
    const char *first = reader->at;
    while (reader->at < reader->end && is_part_of_name(*reader->at))
        reader->at++;
    const int64_t length = reader->at - first;
    for (int64_t code = 0; code < reader->num_ops && length; code++)
        if (reader->ops[code].length == length && !memcmp(reader->ops[code].name, first, (size_t)length))
            return code;
    return -1;
}

/* Reads a plain action, of a pair or by itself. */
static int single(Reader *reader, int in_pair)
{
    const int64_t stage = number(reader), code = stage < 0 ? -1 : op(reader);
    if (code < 0 || reader->ops[code].is_pair || (in_pair && !reader->ops[code].computes))
        return IRREGULAR;
    int64_t microbatch = reader->ops[code].takes_microbatch ? number(reader) : -1;
    if (reader->ops[code].takes_microbatch && microbatch < 0)
        return IRREGULAR;
    if (microbatch >= 0 && reader->at < reader->end && *reader->at == '.') {
        reader->at++;
        const int64_t slice = number(reader);
        if (slice < 0)
            return IRREGULAR;
        if (slice >= reader->num_slices)
            reader->num_slices = slice + 1;
        reader->num_sliced++;
        microbatch = microbatch * reader->num_slices + slice;
        if (microbatch > INT32_MAX)
            return IRREGULAR;
    } else {
        reader->num_whole += microbatch >= 0;
    }
    if (reader->stage) {
        reader->stage[reader->count] = (int32_t)stage;
        reader->code[reader->count] = (int32_t)code;
        reader->microbatch[reader->count] = (int32_t)microbatch;
        reader->cell[reader->count] = (int32_t)reader->num_cells;
        reader->paired[reader->count] = (uint8_t)in_pair;
    }
    reader->count++;
    return 0;
}

static int skip(Reader *reader, char letter)
{
    if (reader->at == reader->end || *reader->at != letter)
        return IRREGULAR;
    reader->at++;
    return 0;
}

/* Reads the action in a cell. */
static int cell(Reader *reader)
{
    int result = 0;
    if (*reader->at == '(') {
        reader->at++;
        result = single(reader, 1) || skip(reader, ';') || single(reader, 1) || skip(reader, ')');
        const int64_t code = result ? -1 : op(reader);
        result = code < 0 || !reader->ops[code].is_pair;
    } else {
        result = single(reader, 0);
    }
    reader->num_cells++;
    return result ? IRREGULAR : 0;
}

static void skip_blanks(Reader *reader)
{
    while (reader->at < reader->end && (*reader->at == ' ' || *reader->at == '\t'))
        reader->at++;
}

/* Goes behind the end of a line, if there is one. */
static int end_of_line(Reader *reader)
{
    const char *at = reader->at;
    if (at < reader->end && *at == '\r')
        at++;
    if (at == reader->end || *at != '\n')
        return 0;
    reader->at = at + 1;
    return 1;
}

/* Whether nothing but white space is left. */
static int is_over(const Reader *reader)
{
    const char *at = reader->at;
    while (at < reader->end && (*at == ' ' || *at == '\t' || *at == '\r' || *at == '\n'))
        at++;
    return at == reader->end;
}

/* Reads all rows of a text that is wholly regular: ASCII, known actions, no empty row before the end.
 *
 * `names` has the names of `num_ops` ops, each ended by a zero; `kinds` three flags for each (see Spelling). `lengths`
 * receives the actions of every row. The arrays receive the plain actions, the halves of a pair side by side. Without
 * them, it only counts. `sizes` receives the numbers of rows, cells and slices, and says the last when it does not
 * only count. Returns the number of plain actions, -1 for a text that the Python form has to look at, or -3 if a row's
 * cells are more than `most`: `sizes` then begins with it.
 */
int64_t drumline_read_rows(const char *text, int64_t size, const char *names, const uint8_t *kinds, int64_t num_ops,
                           int64_t most, int64_t *sizes, int64_t *lengths, int32_t *stage, int32_t *code, int32_t *microbatch,
                           int32_t *cells, uint8_t *paired)
{
    Reader reader = {.at = text, .end = text + size, .num_ops = num_ops, .stage = stage, .code = code,
                     .microbatch = microbatch, .cell = cells, .paired = paired, .num_slices = stage ? sizes[2] : 1};
    int64_t num_rows = 0;
    if (num_ops > MOST_OPS)
        return IRREGULAR;
    for (int64_t each = 0; each < num_ops; each++, names += strlen(names) + 1)
        reader.ops[each] = (Spelling){names, (int64_t)strlen(names), kinds[3 * each], kinds[3 * each + 1],
                                      kinds[3 * each + 2]};
    while (!is_over(&reader)) {
        const int64_t before = reader.num_cells;
        for (;;) {
            skip_blanks(&reader);
            const int is_empty =
                reader.at == reader.end || *reader.at == ',' || *reader.at == '\r' || *reader.at == '\n';
            if (!is_empty && cell(&reader))
                return IRREGULAR;
            if (reader.num_cells > most) {
                sizes[0] = num_rows + 1;
                return TOO_MANY;
            }
            skip_blanks(&reader);
            if (reader.at == reader.end || end_of_line(&reader))
                break;
            if (skip(&reader, ','))
                return IRREGULAR;
        }
        if (reader.num_cells == before)
            return IRREGULAR;
        if (lengths)
            lengths[num_rows] = reader.num_cells - before;
        num_rows++;
    }
    if (reader.num_sliced && (reader.num_whole || reader.num_slices == 1))
        return IRREGULAR;
    sizes[0] = num_rows;
    sizes[1] = reader.num_cells;
    sizes[2] = reader.num_slices;
    return reader.count;
}

/* Writes a number in decimal; returns what comes behind it. */
static char *put(char *to, int64_t value)
{
    char digits[20];
    int count = 0;
    do
        digits[count++] = (char)('0' + value % 10);
    while (value /= 10);
    while (count)
        *to++ = digits[--count];
    return to;
}

/* Writes what tells microbatches apart; with slices, numbers are those of slices of all microbatches. */
static char *put_unit(char *to, int64_t number, int64_t num_slices)
{
    to = put(to, number / num_slices);
    *to++ = '.';
    return put(to, number % num_slices);
}

/* Writes the text of all rows, a line for each; returns its length. `text` needs room for 64 letters per action.
 *
 * `pair` is the code whose name ends an overlapped pair, and `num_slices` is 1 unless microbatches run in slices; the
 * rest is as above.
 */
int64_t drumline_write_rows(int64_t num_rows, const int64_t *lengths, const int32_t *stage, const int32_t *code,
                            const int32_t *microbatch, const uint8_t *paired, const char *names, int64_t num_ops,
                            int64_t pair, int64_t num_slices, char *text)
{
    const char *name[MOST_OPS];
    char *to = text;
    int64_t at = 0;
    for (int64_t each = 0; each < num_ops && each < MOST_OPS; each++, names += strlen(names) + 1)
        name[each] = names;
    for (int64_t row = 0; row < num_rows; row++) {
        for (int64_t left = lengths[row]; left; left--) {
            const int halves = paired[at] ? 2 : 1;
            for (int half = 0; half < halves; half++, at++) {
                if (halves == 2)
                    *to++ = half ? ';' : '(';
                to = put(to, stage[at]);
                for (const char *letter = name[code[at]]; *letter; letter++)
                    *to++ = *letter;
                if (microbatch[at] >= 0)
                    to = num_slices > 1 ? put_unit(to, microbatch[at], num_slices) : put(to, microbatch[at]);
            }
            if (halves == 2) {
                *to++ = ')';
                for (const char *letter = name[pair]; *letter; letter++)
                    *to++ = *letter;
            }
            *to++ = left > 1 ? ',' : '\n';
        }
    }
    return to - text - (num_rows > 0); /* without the last line's end */
}
