/* Counts the syncs of a broker's processes, for LD_PRELOAD: adds 1 to the uint64 in the file SYNC_COUNT for each call of
 * fsync, fdatasync, syncfs, sync and msync(MS_SYNC), and each pwritev2 with RWF_SYNC or RWF_DSYNC.  Syncs by O_SYNC and
 * O_DSYNC of open are not counted.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

static uint64_t unused, *count = &unused;

#define REAL(name) \
    static __typeof__(name) *real; \
    if (real == NULL) \
        real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

__attribute__((constructor)) static void start(void)
{
    const char *path = getenv("SYNC_COUNT");
    int fd = path == NULL ? -1 : open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0)
        return;
    if (ftruncate(fd, sizeof *count) == 0) {
        void *shared = mmap(NULL, sizeof *count, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (shared != MAP_FAILED)
            count = shared;
    }
    close(fd);
}

static void counted(void)
{
    __atomic_fetch_add(count, 1, __ATOMIC_RELAXED);
}

int fsync(int fd)
{
    REAL(fsync);
    counted();
    return real(fd);
}

int fdatasync(int fd)
{
    REAL(fdatasync);
    counted();
    return real(fd);
}

int syncfs(int fd)
{
    REAL(syncfs);
    counted();
    return real(fd);
}

void sync(void)
{
    REAL(sync);
    counted();
    real();
}

int msync(void *address, size_t length, int flags)
{
    REAL(msync);
    if (flags & MS_SYNC)
        counted();
    return real(address, length, flags);
}

ssize_t pwritev64v2(int fd, const struct iovec *parts, int number, off64_t offset, int flags)
{
    REAL(pwritev64v2);
    if (flags & (RWF_SYNC | RWF_DSYNC))
        counted();
    return real(fd, parts, number, offset, flags);
}

ssize_t pwritev2(int fd, const struct iovec *parts, int number, off_t offset, int flags)
{
    return pwritev64v2(fd, parts, number, offset, flags);
}
