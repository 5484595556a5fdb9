// The pool of threads (core/threads.h). Compiled once, for no instruction set.
//
// A waiting thread spins for SPIN and then sleeps, whatever OpenMP's environment variables say: with more threads than
// processors, a thread that spins longer takes a processor from threads that have work.
#include "core/threads.h"

#include <pthread.h>
#include <signal.h>
#include <time.h>

#include <atomic>
#include <new>

namespace {

constexpr int64_t SPIN = 50000;  // ns
constexpr int64_t MOST = 255;    // threads besides the caller

inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb");  // about as long as x86's pause; `yield` does nothing on most
#endif
}

inline int64_t nanoseconds() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

// A condition that threads wait for; the thread that makes it true notifies them.
class Event {
  public:
    template <class IsTrue>
    void wait(IsTrue is_true) {
        if (spin(is_true)) return;
        pthread_mutex_lock(&mutex);
        sleepers.fetch_add(1);
        while (!is_true()) pthread_cond_wait(&changed, &mutex);
        sleepers.fetch_sub(1);
        pthread_mutex_unlock(&mutex);
    }

    void notify() {
        // Either the sleeper is seen here, or what it waits for is seen there.
        std::atomic_thread_fence(std::memory_order_seq_cst);
        if (sleepers.load() == 0) return;
        pthread_mutex_lock(&mutex);
        pthread_cond_broadcast(&changed);
        pthread_mutex_unlock(&mutex);
    }

  private:
    pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
    std::atomic<int> sleepers{0};

    template <class IsTrue>
    static bool spin(IsTrue is_true) {
        for (int64_t end = 0, now; !is_true();) {
            for (int i = 0; i < 16; i++) {
                if (is_true()) return true;
                relax();
            }
            now = nanoseconds();
            if (end == 0) end = now + SPIN;
            if (now > end) return false;
        }
        return true;
    }
};

struct alignas(64) Worker {
    std::atomic<uint64_t> called{0};  // the last region that it was called to
    Event event;
};

// A region is a call of lfm2_cb_share_work. There is one at a time; they are numbered.
struct Pool {
    std::atomic<bool> busy{false};
    uint64_t regions = 0;
    void (*work)(const void*) = nullptr;
    const void* context = nullptr;
    alignas(64) std::atomic<uint64_t> open{0};  // the region that threads may still join; 0: none
    std::atomic<int64_t> inside{0};             // workers that have joined, or are finding out that they are late
    Event left;
    int64_t num_workers = 0;
    Worker workers[MOST];
} pool;

void* serve(void* argument) {
    Worker& worker = *(Worker*)argument;
    for (uint64_t region = 0;;) {
        worker.event.wait([&] { return worker.called.load() != region; });
        region = worker.called.load();
        pool.inside.fetch_add(1);
        if (pool.open.load() == region) pool.work(pool.context);
        if (pool.inside.fetch_sub(1) == 1) pool.left.notify();
    }
    return nullptr;
}

// A forked process has none of its parent's threads but the one that forked.
void forget_workers() { new (&pool) Pool; }

// As many workers as can be had, up to `wanted`.
void hire(int64_t wanted) {
    static bool fork_is_watched;
    if (!fork_is_watched) fork_is_watched = pthread_atfork(nullptr, nullptr, forget_workers) == 0;
    sigset_t others, before;  // signals are for threads that know what to do with them
    sigfillset(&others);
    for (int fault : {SIGILL, SIGSEGV, SIGBUS, SIGFPE, SIGTRAP}) sigdelset(&others, fault);
    pthread_sigmask(SIG_SETMASK, &others, &before);
    for (pthread_t thread; pool.num_workers < wanted; pool.num_workers++) {
        if (pthread_create(&thread, nullptr, serve, &pool.workers[pool.num_workers])) break;
        pthread_detach(thread);
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

}  // namespace

extern "C" void lfm2_cb_share_work(int64_t threads, void (*work)(const void*), const void* context) {
    if (threads < 2 || pool.busy.exchange(true)) return work(context);
    const int64_t wanted = min(threads - 1, MOST);
    if (pool.num_workers < wanted) hire(wanted);
    pool.work = work;
    pool.context = context;
    const uint64_t region = ++pool.regions;
    pool.open.store(region);
    for (int64_t i = 0; i < min(wanted, pool.num_workers); i++) {
        pool.workers[i].called.store(region);
        pool.workers[i].event.notify();
    }
    work(context);
    pool.open.store(0);  // a thread that comes now is too late
    pool.left.wait([] { return pool.inside.load() == 0; });
    pool.busy.store(false);
}
