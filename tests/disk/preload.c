/* A layer between a process and its disk, for LD_PRELOAD: records writes and syncs below a directory, makes calls fail
 * on request, and moves the wall clock.  Its arguments are three optional environment variables:
 *
 *   DISK_ROOT     the directory, absolute; calls outside it are not affected
 *   DISK_LOG      the file of records: struct record, its two paths and its data
 *   DISK_CONTROL  a file that is read before every call that may fail, with lines
 *                   fail KIND ERRNO EVERY GLOB   each EVERY-th call of a matching path fails; KIND is write, sync, open,
 *                                                truncate, unlink or rename (by its new path)
 *                   clock SECONDS                the wall clock is ahead by this
 *
 * A write that fails because the disk is full writes half of its bytes first.  A failed sync changes nothing; its
 * meaning is left to the reader of the record.  Calls below DISK_ROOT are serialised, so the record has them in their
 * order.  Memory mappings are not recorded.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { CREATE = 1, TRUNCATE, WRITE, SYNC, RENAME, UNLINK, MKDIR };

struct record {
    uint64_t began, ended; /* CLOCK_MONOTONIC, ns */
    uint64_t inode;
    int64_t offset; /* of a write; of TRUNCATE the size */
    int32_t kind, error;
    uint32_t path_length, other_length, data_length, reserved;
};

#define FILES 65536
#define RULES 32

static char *paths[FILES]; /* of the open descriptors below DISK_ROOT */
static const char *root, *control;
static size_t root_length;
static int log_fd = -1;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static unsigned calls_of_rule[RULES];

#define REAL(name) \
    static __typeof__(name) *real; \
    if (real == NULL) \
        real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

static int real_open(const char *path, int flags, mode_t mode) {
    static int (*real)(const char *, int, ...);
    if (real == NULL)
        real = (int (*)(const char *, int, ...))dlsym(RTLD_NEXT, "open64");
    return real(path, flags, mode);
}

static int real_close(int fd) {
    REAL(close);
    return real(fd);
}

static ssize_t real_pwrite(int fd, const void *data, size_t length, off_t offset) {
    REAL(pwrite64);
    return real(fd, data, length, offset);
}

static ssize_t real_writev(int fd, const struct iovec *parts, int count) {
    REAL(writev);
    return real(fd, parts, count);
}

static int real_clock(clockid_t clock, struct timespec *time) {
    REAL(clock_gettime);
    return real(clock, time);
}

/* A copy of a variable: setproctitle overwrites the memory of the environment. */
static char *copied(const char *name) {
    const char *value = getenv(name);
    return value ? strdup(value) : NULL;
}

__attribute__((constructor)) static void start(void) {
    const char *log = getenv("DISK_LOG");
    control = copied("DISK_CONTROL");
    root = copied("DISK_ROOT");
    root_length = root == NULL ? 0 : strlen(root);
    if (log != NULL)
        log_fd = real_open(log, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
}

static uint64_t now(void) {
    struct timespec time;
    real_clock(CLOCK_MONOTONIC, &time);
    return (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
}

static int below(const char *path) {
    return root_length > 0 && path != NULL && strncmp(path, root, root_length) == 0 &&
           (path[root_length] == '/' || path[root_length] == 0);
}

static const char *path_of(int fd) {
    return fd >= 0 && fd < FILES ? paths[fd] : NULL;
}

/* -- DISK_CONTROL ------------------------------------------------------------------------------------------------- */

static size_t read_control(char *text, size_t room) {
    int fd = control == NULL ? -1 : real_open(control, O_RDONLY | O_CLOEXEC, 0);
    if (fd < 0)
        return 0;
    ssize_t got = read(fd, text, room - 1);
    real_close(fd);
    text[got > 0 ? got : 0] = 0;
    return got > 0 ? (size_t)got : 0;
}

/* The error with which a call is to fail, 0 if none; *half is set if it is to do half of its work first. */
static int fault(const char *kind, const char *path, int *half) {
    char text[4096], wanted[16], glob[PATH_MAX];
    int error, every, rule = 0;
    if (read_control(text, sizeof text) == 0)
        return 0;
    for (char *state = NULL, *line = strtok_r(text, "\n", &state); line != NULL && rule < RULES;
         line = strtok_r(NULL, "\n", &state)) {
        if (sscanf(line, "fail %15s %d %d %4000s", wanted, &error, &every, glob) != 4)
            continue;
        int number = rule++;
        if (strcmp(wanted, kind) != 0 || fnmatch(glob, path, 0) != 0)
            continue;
        if (++calls_of_rule[number] % (unsigned)every == 0) {
            *half = every == 1 && (error == ENOSPC || error == EDQUOT);
            return error;
        }
    }
    return 0;
}

static double clock_ahead(void) {
    char text[4096];
    double seconds = 0;
    if (read_control(text, sizeof text) > 0)
        for (char *line = text; line != NULL; line = strchr(line, '\n')) {
            line += *line == '\n';
            if (sscanf(line, "clock %lf", &seconds) == 1)
                return seconds;
        }
    return 0;
}

/* -- the record ------------------------------------------------------------------------------------------------- */

static void record(int kind, int error, uint64_t began, uint64_t inode, int64_t offset, const char *path,
                   const char *other, const void *data, size_t length) {
    if (log_fd < 0)
        return;
    struct record head = {began, now(), inode, offset, kind, error, (uint32_t)strlen(path),
                          other == NULL ? 0 : (uint32_t)strlen(other), (uint32_t)length, 0};
    struct iovec parts[4] = {{&head, sizeof head},
                             {(void *)path, head.path_length},
                             {(void *)other, head.other_length},
                             {(void *)data, length}};
    size_t all = sizeof head + head.path_length + head.other_length + length;
    if (real_writev(log_fd, parts, 4) != (ssize_t)all)
        abort();
}

static uint64_t inode_of(int fd) {
    struct stat found;
    return fstat(fd, &found) == 0 ? found.st_ino : 0;
}

static uint64_t inode_at(const char *path) {
    struct stat found;
    return stat(path, &found) == 0 ? found.st_ino : 0;
}

/* -- calls on descriptors --------------------------------------------------------------------------------------- */

static ssize_t write_at(int fd, const void *data, size_t length, off_t offset) {
    int half = 0;
    pthread_mutex_lock(&lock);
    uint64_t began = now();
    int error = fault("write", paths[fd], &half);
    ssize_t done = -1;
    if (error == 0 || (half && length >= 1024))
        done = real_pwrite(fd, data, error == 0 ? length : length / 2, offset);
    if (done >= 0)
        record(WRITE, 0, began, inode_of(fd), offset, paths[fd], NULL, data, (size_t)done);
    int result = done >= 0 ? 0 : error != 0 ? error : errno;
    pthread_mutex_unlock(&lock);
    errno = result;
    return done;
}

ssize_t pwrite64(int fd, const void *data, size_t length, off64_t offset) {
    return path_of(fd) != NULL ? write_at(fd, data, length, offset) : real_pwrite(fd, data, length, offset);
}

ssize_t pwrite(int fd, const void *data, size_t length, off_t offset) {
    return pwrite64(fd, data, length, offset);
}

ssize_t write(int fd, const void *data, size_t length) {
    REAL(write);
    if (path_of(fd) == NULL)
        return real(fd, data, length);
    int append = fcntl(fd, F_GETFL) & O_APPEND;
    off_t offset = lseek(fd, 0, append ? SEEK_END : SEEK_CUR);
    ssize_t done = write_at(fd, data, length, offset);
    if (done > 0)
        lseek(fd, offset + done, SEEK_SET);
    return done;
}

static ssize_t gather(int fd, const struct iovec *parts, int count, off_t offset) {
    ssize_t done = 0;
    for (int i = 0; i < count; i++) {
        ssize_t one = offset < 0 ? write(fd, parts[i].iov_base, parts[i].iov_len)
                                 : pwrite64(fd, parts[i].iov_base, parts[i].iov_len, offset + done);
        if (one < 0)
            return done > 0 ? done : -1;
        done += one;
        if ((size_t)one < parts[i].iov_len)
            break;
    }
    return done;
}

ssize_t writev(int fd, const struct iovec *parts, int count) {
    return path_of(fd) != NULL ? gather(fd, parts, count, -1) : real_writev(fd, parts, count);
}

ssize_t pwritev64v2(int fd, const struct iovec *parts, int count, off64_t offset, int flags) {
    REAL(pwritev64v2);
    return path_of(fd) != NULL ? gather(fd, parts, count, offset) : real(fd, parts, count, offset, flags);
}

ssize_t pwritev64(int fd, const struct iovec *parts, int count, off64_t offset) {
    REAL(pwritev64);
    return path_of(fd) != NULL ? gather(fd, parts, count, offset) : real(fd, parts, count, offset);
}

ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t offset) {
    return pwritev64(fd, parts, count, offset);
}

int ftruncate64(int fd, off64_t length) {
    REAL(ftruncate64);
    if (path_of(fd) == NULL)
        return real(fd, length);
    int half, done = -1;
    pthread_mutex_lock(&lock);
    uint64_t began = now();
    int error = fault("truncate", paths[fd], &half);
    if (error == 0) {
        done = real(fd, length);
        error = errno;
    }
    if (done == 0)
        record(TRUNCATE, 0, began, inode_of(fd), length, paths[fd], NULL, NULL, 0);
    pthread_mutex_unlock(&lock);
    errno = error;
    return done;
}

int ftruncate(int fd, off_t length) {
    return ftruncate64(fd, length);
}

static int real_fallocate(int fd, int mode, off_t offset, off_t length) {
    REAL(fallocate64);
    return real(fd, mode, offset, length) == 0 ? 0 : errno;
}

/* A reader sees a longer file, zeros in place of the range, or no change. */
static int allocate(int fd, int mode, off_t offset, off_t length) {
    int half;
    struct stat found;
    pthread_mutex_lock(&lock);
    uint64_t began = now();
    int error = fault("write", paths[fd], &half);
    if (error == 0 && fstat(fd, &found) != 0)
        error = errno;
    off_t end = offset + length;
    int zeroed = mode & (FALLOC_FL_ZERO_RANGE | FALLOC_FL_PUNCH_HOLE);
    if (error == 0 && mode & ~(FALLOC_FL_KEEP_SIZE | FALLOC_FL_ZERO_RANGE | FALLOC_FL_PUNCH_HOLE))
        error = EOPNOTSUPP;
    if (error == 0)
        error = real_fallocate(fd, mode, offset, length);
    if (error == 0 && found.st_size < end && !(mode & FALLOC_FL_KEEP_SIZE))
        record(TRUNCATE, 0, began, inode_of(fd), end, paths[fd], NULL, NULL, 0);
    if (error == 0 && zeroed && offset < found.st_size) {
        size_t inside = (size_t)((end < found.st_size ? end : found.st_size) - offset);
        void *zeros = calloc(1, inside);
        if (zeros == NULL)
            abort();
        record(WRITE, 0, began, inode_of(fd), offset, paths[fd], NULL, zeros, inside);
        free(zeros);
    }
    pthread_mutex_unlock(&lock);
    return error;
}

int posix_fallocate64(int fd, off64_t offset, off64_t length) {
    REAL(posix_fallocate64);
    return path_of(fd) != NULL ? allocate(fd, 0, offset, length) : real(fd, offset, length);
}

int posix_fallocate(int fd, off_t offset, off_t length) {
    return posix_fallocate64(fd, offset, length);
}

int fallocate64(int fd, int mode, off64_t offset, off64_t length) {
    REAL(fallocate64);
    if (path_of(fd) == NULL)
        return real(fd, mode, offset, length);
    errno = allocate(fd, mode, offset, length);
    return errno == 0 ? 0 : -1;
}

int fallocate(int fd, int mode, off_t offset, off_t length) {
    return fallocate64(fd, mode, offset, length);
}

static int synced(int fd, int (*real)(int)) {
    int half, done = -1;
    if (path_of(fd) == NULL)
        return real(fd);
    pthread_mutex_lock(&lock);
    uint64_t began = now();
    int error = fault("sync", paths[fd], &half);
    if (error == 0) {
        done = real(fd);
        error = errno;
    }
    record(SYNC, done == 0 ? 0 : error, began, inode_of(fd), 0, paths[fd], NULL, NULL, 0);
    pthread_mutex_unlock(&lock);
    errno = error;
    return done;
}

int fsync(int fd) {
    REAL(fsync);
    return synced(fd, real);
}

int fdatasync(int fd) {
    REAL(fdatasync);
    return synced(fd, real);
}

/* It syncs neither the disk's cache nor the file size, so it is not recorded as a sync. */
int sync_file_range(int fd, off64_t offset, off64_t length, unsigned flags) {
    REAL(sync_file_range);
    return real(fd, offset, length, flags);
}

int close(int fd) {
    if (path_of(fd) == NULL)
        return real_close(fd);
    pthread_mutex_lock(&lock);
    free(paths[fd]);
    paths[fd] = NULL;
    int done = real_close(fd);
    pthread_mutex_unlock(&lock);
    return done;
}

/* -- calls on paths --------------------------------------------------------------------------------------------- */

static int opened(const char *path, int flags, mode_t mode) {
    int half, error = 0, fd = -1;
    pthread_mutex_lock(&lock);
    uint64_t began = now();
    int is_new = (flags & O_CREAT) && access(path, F_OK) != 0;
    if (flags & (O_CREAT | O_WRONLY | O_RDWR))
        error = fault("open", path, &half);
    if (error == 0) {
        fd = real_open(path, flags, mode);
        error = errno;
    }
    if (fd >= FILES)
        abort();
    if (fd >= 0) {
        paths[fd] = strdup(path);
        if (is_new)
            record(CREATE, 0, began, inode_of(fd), 0, path, NULL, NULL, 0);
        else if (flags & O_TRUNC)
            record(TRUNCATE, 0, began, inode_of(fd), 0, path, NULL, NULL, 0);
    }
    pthread_mutex_unlock(&lock);
    errno = error;
    return fd;
}

int open64(const char *path, int flags, ...) {
    mode_t mode = 0;
    if (flags & (O_CREAT | O_TMPFILE)) {
        va_list rest;
        va_start(rest, flags);
        mode = va_arg(rest, mode_t);
        va_end(rest);
    }
    return below(path) ? opened(path, flags, mode) : real_open(path, flags, mode);
}

int open(const char *path, int flags, ...) __attribute__((alias("open64")));

int rename(const char *from, const char *to) {
    REAL(rename);
    if (!below(to))
        return real(from, to);
    int half, done = -1;
    pthread_mutex_lock(&lock);
    uint64_t began = now();
    int error = fault("rename", to, &half);
    if (error == 0) {
        done = real(from, to);
        error = errno;
    }
    if (done == 0)
        record(RENAME, 0, began, inode_at(to), 0, from, to, NULL, 0);
    pthread_mutex_unlock(&lock);
    errno = error;
    return done;
}

int unlink(const char *path) {
    REAL(unlink);
    if (!below(path))
        return real(path);
    int half, done = -1;
    pthread_mutex_lock(&lock);
    uint64_t began = now(), inode = inode_at(path);
    int error = fault("unlink", path, &half);
    if (error == 0) {
        done = real(path);
        error = errno;
    }
    if (done == 0)
        record(UNLINK, 0, began, inode, 0, path, NULL, NULL, 0);
    pthread_mutex_unlock(&lock);
    errno = error;
    return done;
}

int mkdir(const char *path, mode_t mode) {
    REAL(mkdir);
    if (!below(path))
        return real(path, mode);
    pthread_mutex_lock(&lock);
    uint64_t began = now();
    int done = real(path, mode), error = errno;
    if (done == 0)
        record(MKDIR, 0, began, inode_at(path), 0, path, NULL, NULL, 0);
    pthread_mutex_unlock(&lock);
    errno = error;
    return done;
}

int truncate64(const char *path, off64_t length) {
    REAL(truncate64);
    if (!below(path))
        return real(path, length);
    int fd = open64(path, O_WRONLY | O_CLOEXEC);
    if (fd < 0)
        return -1;
    int done = ftruncate64(fd, length), error = errno;
    close(fd);
    errno = error;
    return done;
}

int truncate(const char *path, off_t length) {
    return truncate64(path, length);
}

/* -- the wall clock --------------------------------------------------------------------------------------------- */

int clock_gettime(clockid_t clock, struct timespec *time) {
    int done = real_clock(clock, time);
    if (done == 0 && control != NULL && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        time->tv_sec += (time_t)clock_ahead();
    return done;
}

int gettimeofday(struct timeval *restrict time, void *restrict zone) {
    struct timespec precise;
    (void)zone;
    int done = clock_gettime(CLOCK_REALTIME, &precise);
    time->tv_sec = precise.tv_sec;
    time->tv_usec = precise.tv_nsec / 1000;
    return done;
}

time_t time(time_t *where) {
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    if (where != NULL)
        *where = precise.tv_sec;
    return precise.tv_sec;
}
