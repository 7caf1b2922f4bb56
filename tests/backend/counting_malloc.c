/* Counts live bytes and their peak, for blocks large enough to matter. Loaded by LD_PRELOAD. */
#include <errno.h>
#include <malloc.h>
#include <stdatomic.h>
#include <stddef.h>

extern void *__libc_malloc(size_t);
extern void *__libc_calloc(size_t, size_t);
extern void *__libc_realloc(void *, size_t);
extern void *__libc_memalign(size_t, size_t);
extern void __libc_free(void *);

static const size_t least = 4096;
static _Atomic long live, peak;

long counted_live(void) { return live; }
long counted_peak(void) { return peak; }
void counted_reset(void) { peak = live; }

static void *count(void *block) {
    size_t size = block ? malloc_usable_size(block) : 0;
    if (size >= least) {
        long now = atomic_fetch_add(&live, (long)size) + (long)size;
        long seen = peak;
        while (now > seen && !atomic_compare_exchange_weak(&peak, &seen, now)) {}
    }
    return block;
}

static void discount(void *block) {
    size_t size = block ? malloc_usable_size(block) : 0;
    if (size >= least) atomic_fetch_sub(&live, (long)size);
}

void *malloc(size_t size) { return count(__libc_malloc(size)); }
void *calloc(size_t number, size_t size) { return count(__libc_calloc(number, size)); }
void *memalign(size_t alignment, size_t size) { return count(__libc_memalign(alignment, size)); }
void *aligned_alloc(size_t alignment, size_t size) { return memalign(alignment, size); }

void free(void *block) {
    discount(block);
    __libc_free(block);
}

void *realloc(void *block, size_t size) {
    discount(block);
    return count(__libc_realloc(block, size));
}

int posix_memalign(void **block, size_t alignment, size_t size) {
    *block = memalign(alignment, size);
    return *block || !size ? 0 : ENOMEM;
}
