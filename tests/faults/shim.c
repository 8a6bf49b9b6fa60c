/* Calls of libc that fail on demand: preload it, and say in the environment which.
 *
 *   FAULT_CALLS  names, separated by commas: read write sync rename mkdir open
 *   FAULT_PATH   only files whose path holds this text
 *   FAULT_AT     the how-manieth of these calls fails, from 0; -1: none (they are only counted)
 *   FAULT_MORE   when set, all after it fail too
 *   FAULT_ERRNO  with this error
 *   FAULT_COUNT  file that takes one byte for each such call
 *
 * The environment is read at the first call of each process, so that a forked child can have its own.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static atomic_long seen;
static pid_t owner;
static long at;
static int more, error_number, count_fd;
static char calls[128], path_part[512];

static void settings(void) {
  if (owner == getpid()) return;
  const char *text = getenv("FAULT_CALLS"), *part = getenv("FAULT_PATH"), *file = getenv("FAULT_COUNT");
  snprintf(calls, sizeof calls, ",%s,", text ? text : "");
  snprintf(path_part, sizeof path_part, "%s", part ? part : "");
  at = getenv("FAULT_AT") ? atol(getenv("FAULT_AT")) : -1;
  more = getenv("FAULT_MORE") != NULL;
  error_number = getenv("FAULT_ERRNO") ? atoi(getenv("FAULT_ERRNO")) : EIO;
  count_fd = text && file ? (int)syscall(SYS_openat, AT_FDCWD, file, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600) : -1;
  atomic_store(&seen, 0);
  owner = getpid();
}

/* Whether this call fails; errno is set then. */
static int fails(const char *call, const char *path) {
  char wanted[32];
  int before = errno;
  settings();
  snprintf(wanted, sizeof wanted, ",%s,", call);
  if (!strstr(calls, wanted) || (path_part[0] && !strstr(path, path_part))) return 0;
  long number = atomic_fetch_add(&seen, 1);
  if (count_fd >= 0) syscall(SYS_write, count_fd, "x", 1);
  errno = before;
  if (at < 0 || number < at || (number > at && !more)) return 0;
  errno = error_number;
  return 1;
}

static int fails_fd(const char *call, int fd) {
  char link[64], path[1024];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t size = readlink(link, path, sizeof path - 1);
  path[size > 0 ? size : 0] = 0;
  return path[0] == '/' && fails(call, path);
}

/* A path below a folder's descriptor. */
static int fails_at(const char *call, int dir, const char *name) {
  char link[64], path[2048] = "";
  if (name[0] != '/' && dir != AT_FDCWD) {
    snprintf(link, sizeof link, "/proc/self/fd/%d", dir);
    ssize_t size = readlink(link, path, 1023);
    path[size > 0 ? size : 0] = 0;
    strncat(path, "/", 2);
  }
  strncat(path, name, 1000);
  return fails(call, path);
}

#define REAL(name) static __typeof__(name) *real; if (!real) real = dlsym(RTLD_NEXT, #name)
#define FD_CALL(type, name, call, arguments, ...) \
  type name arguments { REAL(name); return fails_fd(call, fd) ? -1 : real(__VA_ARGS__); }

FD_CALL(ssize_t, read, "read", (int fd, void *b, size_t n), fd, b, n)
FD_CALL(ssize_t, pread, "read", (int fd, void *b, size_t n, off_t o), fd, b, n, o)
FD_CALL(ssize_t, pread64, "read", (int fd, void *b, size_t n, off64_t o), fd, b, n, o)
FD_CALL(ssize_t, readv, "read", (int fd, const struct iovec *v, int n), fd, v, n)
FD_CALL(ssize_t, write, "write", (int fd, const void *b, size_t n), fd, b, n)
FD_CALL(ssize_t, pwrite, "write", (int fd, const void *b, size_t n, off_t o), fd, b, n, o)
FD_CALL(ssize_t, pwrite64, "write", (int fd, const void *b, size_t n, off64_t o), fd, b, n, o)
FD_CALL(ssize_t, writev, "write", (int fd, const struct iovec *v, int n), fd, v, n)
FD_CALL(int, ftruncate, "write", (int fd, off_t n), fd, n)
FD_CALL(int, ftruncate64, "write", (int fd, off64_t n), fd, n)
FD_CALL(int, fsync, "sync", (int fd), fd)
FD_CALL(int, fdatasync, "sync", (int fd), fd)

ssize_t copy_file_range(int from, off64_t *a, int fd, off64_t *b, size_t n, unsigned flags) {
  REAL(copy_file_range);
  return fails_fd("write", fd) || fails_fd("read", from) ? -1 : real(from, a, fd, b, n, flags);
}
int rename(const char *one, const char *two) {
  REAL(rename);
  return fails("rename", two) ? -1 : real(one, two);
}
int renameat(int a, const char *one, int b, const char *two) {
  REAL(renameat);
  return fails_at("rename", b, two) ? -1 : real(a, one, b, two);
}
int mkdir(const char *name, mode_t mode) {
  REAL(mkdir);
  return fails("mkdir", name) ? -1 : real(name, mode);
}
int mkdirat(int dir, const char *name, mode_t mode) {
  REAL(mkdirat);
  return fails_at("mkdir", dir, name) ? -1 : real(dir, name, mode);
}
static int opened(const char *symbol, int dir, const char *name, int flags, mode_t mode) {
  static int (*real)(int, const char *, int, ...);
  if (!real) real = dlsym(RTLD_NEXT, symbol);
  return fails_at("open", dir, name) ? -1 : real(dir, name, flags, mode);
}
#define MODE(flags) \
  mode_t mode = 0; \
  if ((flags) & (O_CREAT | O_TMPFILE)) { va_list list; va_start(list, flags); mode = va_arg(list, mode_t); va_end(list); }
int open(const char *name, int flags, ...) { MODE(flags) return opened("openat", AT_FDCWD, name, flags, mode); }
int open64(const char *name, int flags, ...) { MODE(flags) return opened("openat64", AT_FDCWD, name, flags, mode); }
int openat(int dir, const char *name, int flags, ...) { MODE(flags) return opened("openat", dir, name, flags, mode); }
int openat64(int dir, const char *name, int flags, ...) { MODE(flags) return opened("openat64", dir, name, flags, mode); }
