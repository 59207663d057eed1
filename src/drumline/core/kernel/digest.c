/* Which sources this library was compiled from: build.py passes their digest to the compiler. */
#include "kernel.h"

const char *drumline_digest(void)
{
    return DRUMLINE_DIGEST;
}
