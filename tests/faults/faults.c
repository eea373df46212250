/* A faulty disk: loaded before libc (LD_PRELOAD), it fails, shortens or delays calls on the files that are named.
 *
 *   FAULT_CALLS  names of calls, between commas: write fsync rename truncate allocate mmap flock open mkdir unlink bind
 *   FAULT_PATH   part of the path of the file, as it is called at that moment; for a rename part of either path
 *   FAULT_NTH    the first of these calls that suffers, from 1
 *   FAULT_TIMES  how many do, 0: all from then on
 *   FAULT_ERRNO  its number; 0: nothing fails
 *   FAULT_SLOW_MS, FAULT_SHORT  the call takes so long; a write takes so many bytes at most
 *   FAULT_COUNT  file of two numbers of 8 bytes, shared by all processes: calls that matched, and those that suffered
 *
 * Calls are counted over all processes of a run. "write" stands for every call that brings bytes into a file.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

static const char *calls, *part;
static uint64_t nth = 1, times = 1, slow_ms;
static size_t shorter;
static int number;
static _Atomic uint64_t *count;

static uint64_t natural(const char *name, uint64_t otherwise) {
    const char *text = getenv(name);
    return text ? strtoull(text, NULL, 10) : otherwise;
}

__attribute__((constructor)) static void begin(void) {
    const char *file = getenv("FAULT_COUNT");
    calls = getenv("FAULT_CALLS");
    part = getenv("FAULT_PATH");
    if (!calls || !part || !file) {
        calls = NULL;
        return;
    }
    nth = natural("FAULT_NTH", 1);
    times = natural("FAULT_TIMES", 1);
    number = (int)natural("FAULT_ERRNO", 0);
    slow_ms = natural("FAULT_SLOW_MS", 0);
    shorter = natural("FAULT_SHORT", 0);
    int handle = (int)syscall(SYS_openat, AT_FDCWD, file, O_RDWR | O_CLOEXEC, 0);
    if (handle < 0) {
        calls = NULL;
        return;
    }
    count = (void *)syscall(SYS_mmap, NULL, 16, PROT_READ | PROT_WRITE, MAP_SHARED, handle, 0);
    syscall(SYS_close, handle);
    if (count == MAP_FAILED)
        calls = NULL;
}

static int listed(const char *call) {
    size_t length = strlen(call);
    for (const char *at = calls; at && (at = strstr(at, call)); at += length)
        if ((at == calls || at[-1] == ',') && (at[length] == ',' || !at[length]))
            return 1;
    return 0;
}

/* Whether this call suffers; one that is slow has then been. */
static int suffers(const char *call, const char *one, const char *other) {
    if (!count || !listed(call) || !((one && strstr(one, part)) || (other && strstr(other, part))))
        return 0;
    uint64_t place = atomic_fetch_add(&count[0], 1) + 1;
    if (place < nth || (times && place >= nth + times))
        return 0;
    atomic_fetch_add(&count[1], 1);
    if (slow_ms) {
        struct timespec left = {(time_t)(slow_ms / 1000), (long)(slow_ms % 1000) * 1000000};
        while (nanosleep(&left, &left) && errno == EINTR) {
        }
    }
    return 1;
}

static int open_file_suffers(const char *call, int handle) {
    char link[48], path[PATH_MAX];
    if (!count || !listed(call))
        return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", handle);
    ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, link, path, sizeof path - 1);
    if (length <= 0)
        return 0;
    path[length] = 0;
    return suffers(call, path, NULL);
}

#define REAL(name) static __typeof__(&name) real; if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)
#define FAIL do { errno = number; return -1; } while (0)

ssize_t write(int handle, const void *bytes, size_t length) {
    REAL(write);
    if (open_file_suffers("write", handle)) {
        if (number) FAIL;
        if (shorter && length > shorter) length = shorter;
    }
    return real(handle, bytes, length);
}

static ssize_t some(int handle, const struct iovec *parts, int n) {
    for (int i = 0; i < n; i++)
        if (parts[i].iov_len)
            return syscall(SYS_write, handle, parts[i].iov_base, parts[i].iov_len < shorter ? parts[i].iov_len : shorter);
    return 0;
}

ssize_t writev(int handle, const struct iovec *parts, int n) {
    REAL(writev);
    if (open_file_suffers("write", handle)) {
        if (number) FAIL;
        if (shorter) return some(handle, parts, n);
    }
    return real(handle, parts, n);
}

ssize_t pwrite64(int handle, const void *bytes, size_t length, off64_t at) {
    REAL(pwrite64);
    if (open_file_suffers("write", handle)) {
        if (number) FAIL;
        if (shorter && length > shorter) length = shorter;
    }
    return real(handle, bytes, length, at);
}

ssize_t pwrite(int handle, const void *bytes, size_t length, off_t at) { return pwrite64(handle, bytes, length, at); }

ssize_t pwritev(int handle, const struct iovec *parts, int n, off_t at) {
    REAL(pwritev);
    if (open_file_suffers("write", handle) && number) FAIL;
    return real(handle, parts, n, at);
}

ssize_t sendfile64(int out, int in, off64_t *at, size_t length) {
    REAL(sendfile64);
    if (open_file_suffers("write", out) && number) FAIL;
    return real(out, in, at, length);
}

ssize_t sendfile(int out, int in, off_t *at, size_t length) { return sendfile64(out, in, at, length); }

ssize_t copy_file_range(int in, off64_t *from, int out, off64_t *to, size_t length, unsigned flags) {
    REAL(copy_file_range);
    if (open_file_suffers("write", out) && number) FAIL;
    return real(in, from, out, to, length, flags);
}

int fsync(int handle) {
    REAL(fsync);
    if (open_file_suffers("fsync", handle) && number) FAIL;
    return real(handle);
}

int fdatasync(int handle) {
    REAL(fdatasync);
    if (open_file_suffers("fsync", handle) && number) FAIL;
    return real(handle);
}

int ftruncate64(int handle, off64_t length) {
    REAL(ftruncate64);
    if (open_file_suffers("truncate", handle) && number) FAIL;
    return real(handle, length);
}

int ftruncate(int handle, off_t length) { return ftruncate64(handle, length); }

int truncate(const char *path, off_t length) {
    REAL(truncate);
    if (suffers("truncate", path, NULL) && number) FAIL;
    return real(path, length);
}

int fallocate64(int handle, int mode, off64_t at, off64_t length) {
    REAL(fallocate64);
    if (open_file_suffers("allocate", handle) && number) FAIL;
    return real(handle, mode, at, length);
}

int fallocate(int handle, int mode, off_t at, off_t length) { return fallocate64(handle, mode, at, length); }

int posix_fallocate64(int handle, off64_t at, off64_t length) {
    REAL(posix_fallocate64);
    if (open_file_suffers("allocate", handle) && number) return number;
    return real(handle, at, length);
}

int posix_fallocate(int handle, off_t at, off_t length) { return posix_fallocate64(handle, at, length); }

void *mmap64(void *place, size_t length, int access, int flags, int handle, off64_t at) {
    if (handle >= 0 && open_file_suffers("mmap", handle) && number) {
        errno = number;
        return MAP_FAILED;
    }
    return (void *)syscall(SYS_mmap, place, length, access, flags, handle, at);
}

void *mmap(void *place, size_t length, int access, int flags, int handle, off_t at) {
    return mmap64(place, length, access, flags, handle, at);
}

int flock(int handle, int what) {
    REAL(flock);
    if (open_file_suffers("flock", handle) && number) FAIL;
    return real(handle, what);
}

int rename(const char *from, const char *to) {
    REAL(rename);
    if (suffers("rename", from, to) && number) FAIL;
    return real(from, to);
}

int renameat(int from_folder, const char *from, int to_folder, const char *to) {
    REAL(renameat);
    if (suffers("rename", from, to) && number) FAIL;
    return real(from_folder, from, to_folder, to);
}

int mkdir(const char *path, mode_t mode) {
    REAL(mkdir);
    if (suffers("mkdir", path, NULL) && number) FAIL;
    return real(path, mode);
}

int unlink(const char *path) {
    REAL(unlink);
    if (suffers("unlink", path, NULL) && number) FAIL;
    return real(path);
}

int bind(int handle, const struct sockaddr *address, socklen_t length) {
    REAL(bind);
    if (address->sa_family == AF_UNIX && suffers("bind", ((const struct sockaddr_un *)address)->sun_path, NULL) && number)
        FAIL;
    return real(handle, address, length);
}

/* Opening counts only where the file is written. */
static int opened(int folder, const char *path, int flags, mode_t mode) {
    if ((flags & (O_WRONLY | O_RDWR | O_CREAT)) && suffers("open", path, NULL) && number) FAIL;
    return (int)syscall(SYS_openat, folder, path, flags, mode);
}

#define MODE mode_t mode = 0; if (flags & (O_CREAT | __O_TMPFILE)) { va_list more; va_start(more, flags); mode = va_arg(more, mode_t); va_end(more); }

int open64(const char *path, int flags, ...) { MODE return opened(AT_FDCWD, path, flags | O_LARGEFILE, mode); }
int open(const char *path, int flags, ...) { MODE return opened(AT_FDCWD, path, flags, mode); }
int openat64(int folder, const char *path, int flags, ...) { MODE return opened(folder, path, flags | O_LARGEFILE, mode); }
int openat(int folder, const char *path, int flags, ...) { MODE return opened(folder, path, flags, mode); }
