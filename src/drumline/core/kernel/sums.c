/* Sums that are exact until they are rounded once, as Python's math.fsum; see ../simulate/durations.py. */
#include "kernel.h"

/* Doubles whose sum is exact, none of which overlaps another: 2,098 bits have room for no more. */
#define MOST_PARTIALS 64

/* Adds two numbers: returns the rounded sum, and what the rounding lost. */
static double add(double x, double y, double *lost)
{
    if (fabs(x) < fabs(y)) {
        const double other = x;
        x = y;
        y = other;
    }
    const double sum = x + y;
    *lost = y - (sum - x);
    return sum;
}

/* Rounds the sum of partials once, ties to even. */
static double rounded(const double *partials, int count)
{
    double sum = 0.0, lost = 0.0;
    if (count)
        sum = partials[--count];
    while (count && lost == 0.0)
        sum = add(sum, partials[--count], &lost);
    /* Half a last bit is lost: what is smaller decides. */
    if (count && ((lost < 0.0 && partials[count - 1] < 0.0) || (lost > 0.0 && partials[count - 1] > 0.0))) {
        const double twice = lost * 2.0, up = sum + twice;
        if (twice == up - sum)
            sum = up;
    }
    return sum;
}

/* Computes the sum of every group of finite numbers; `bounds` are each group's first and the one after its last. */
void drumline_sums(int64_t num_groups, const int64_t *bounds, const double *values, double *sums)
{
    for (int64_t group = 0; group < num_groups; group++) {
        double partials[MOST_PARTIALS];
        int count = 0;
        for (int64_t at = bounds[2 * group]; at < bounds[2 * group + 1]; at++) {
            double value = values[at], lost;
            int left = 0;
            for (int each = 0; each < count; each++) {
                value = add(value, partials[each], &lost);
                if (lost != 0.0)
                    partials[left++] = lost;
            }
            count = left;
            if (value != 0.0)
                partials[count++] = value;
        }
        sums[group] = rounded(partials, count);
    }
}
