/* A disk that fails: loaded into a process before its libraries (LD_PRELOAD), it turns a share of
   the reads and writes of whole 4 KiB sectors into EIO. They are those of rows on disk; files that
   are read otherwise are not touched. io_uring, whose calls no library can stand before, is
   refused to the process, which then reads by preadv and writes by pwritev.

     cc -shared -fPIC -O2 -o faulty_disk.so bench/faulty_disk.c -ldl
     SLUICE_DISK_FAULTS=0.01 LD_PRELOAD=$PWD/faulty_disk.so COMMAND...

   What was done and what failed is appended to the file $SLUICE_DISK_FAULTS_LOG at the end. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/uio.h>

enum { kSector = 4096 };

static double share;
static atomic_ulong operations, faults;

static void refuse_io_uring(void) {
  struct sock_filter steps[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_io_uring_setup, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOSYS),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  struct sock_fprog program = {sizeof steps / sizeof *steps, steps};
  if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 ||
      prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0) {
    perror("faulty_disk: io_uring cannot be refused");
    _Exit(1);
  }
}

__attribute__((constructor)) static void begin(void) {
  const char* const wanted = getenv("SLUICE_DISK_FAULTS");
  share = wanted != NULL ? atof(wanted) : 0;
  refuse_io_uring();
}

__attribute__((destructor)) static void end(void) {
  const char* const path = getenv("SLUICE_DISK_FAULTS_LOG");
  FILE* const log = path != NULL ? fopen(path, "a") : NULL;
  if (log == NULL) return;
  fprintf(log, "{\"operations\": %lu, \"faults\": %lu}\n", atomic_load(&operations),
          atomic_load(&faults));
  fclose(log);
}

/* Whether an operation that moved so many bytes fails: the next draw of splitmix64. */
static int fails(ssize_t bytes) {
  if (bytes <= 0 || bytes % kSector != 0) return 0;
  unsigned long long x = (atomic_fetch_add(&operations, 1) + 1) * 0x9E3779B97F4A7C15ULL;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
  if ((double)((x ^ (x >> 31)) >> 11) * 0x1p-53 >= share) return 0;
  atomic_fetch_add(&faults, 1);
  return 1;
}

typedef ssize_t Transfer(int, const struct iovec*, int, off_t);

static ssize_t done_or_failed(const char* name, int file, const struct iovec* parts, int count,
                              off_t offset) {
  const ssize_t bytes = ((Transfer*)dlsym(RTLD_NEXT, name))(file, parts, count, offset);
  if (!fails(bytes)) return bytes;
  errno = EIO;
  return -1;
}

ssize_t preadv(int file, const struct iovec* parts, int count, off_t offset) {
  return done_or_failed("preadv", file, parts, count, offset);
}

ssize_t pwritev(int file, const struct iovec* parts, int count, off_t offset) {
  return done_or_failed("pwritev", file, parts, count, offset);
}

ssize_t preadv64(int file, const struct iovec* parts, int count, off_t offset) {
  return done_or_failed("preadv64", file, parts, count, offset);
}

ssize_t pwritev64(int file, const struct iovec* parts, int count, off_t offset) {
  return done_or_failed("pwritev64", file, parts, count, offset);
}
