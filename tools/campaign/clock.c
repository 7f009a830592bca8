/* A time of day that jumps: CLOCK_REALTIME is ahead by the seconds that the file CAMPAIGN_CLOCK holds. To be preloaded. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile long long *ahead;

__attribute__((constructor)) static void begin(void)
{
    const char *path = getenv("CAMPAIGN_CLOCK");
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    void *found = fd < 0 ? MAP_FAILED : mmap(NULL, sizeof *ahead, PROT_READ, MAP_SHARED, fd, 0);
    ahead = found == MAP_FAILED ? NULL : found;
    if (fd >= 0)
        close(fd);
}

int clock_gettime(clockid_t id, struct timespec *at)
{
    int result = (int)syscall(SYS_clock_gettime, id, at);
    if (!result && id == CLOCK_REALTIME && ahead)
        at->tv_sec += *ahead;
    return result;
}

int gettimeofday(struct timeval *restrict at, void *restrict zone)
{
    struct timespec now;
    int result = clock_gettime(CLOCK_REALTIME, &now);
    (void)zone;
    if (!result) {
        at->tv_sec = now.tv_sec;
        at->tv_usec = now.tv_nsec / 1000;
    }
    return result;
}

time_t time(time_t *at)
{
    struct timespec now;
    if (clock_gettime(CLOCK_REALTIME, &now))
        return -1;
    if (at)
        *at = now.tv_sec;
    return now.tv_sec;
}
