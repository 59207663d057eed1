/* What the files of the kernel share.
 *
 * Every function computes what a Python function computes, with the same bits. So products and sums must round one by
 * one: the compiler may not fuse them (-ffp-contract=off), and doubles may not have hidden bits.
 */
#ifndef DRUMLINE_KERNEL_H
#define DRUMLINE_KERNEL_H

#include <float.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>

#if FLT_EVAL_METHOD != 0
#error "doubles have more than 64 bits here: times would differ from those of the Python form"
#endif

#define OUT_OF_MEMORY (-2)

#endif
