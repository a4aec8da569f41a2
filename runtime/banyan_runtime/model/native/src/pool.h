// Threads that compute a step together: the caller and its helpers run one function, and meet at barriers inside it.
//
// Whoever waits spins for a short while, since a step has hundreds of meetings a microsecond apart, and then sleeps: a helper
// that span for ever would take a core from the server's other process, and one whose partner was descheduled would burn its
// share of a quota for nothing.
#pragma once

#include <atomic>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstdint>
#include <thread>
#include <vector>

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "simd.h"

// How often this thread has met others. Activations change between meetings only: what a thread has made of them holds until the next.
inline thread_local uint64_t meetings = 0;

class Gate {  // opens once for each value; waiters spin, then sleep
  public:
    uint32_t now() const { return value.load(std::memory_order_acquire); }

    void open() {
        value.fetch_add(1, std::memory_order_seq_cst);
        if (sleepers.load(std::memory_order_seq_cst)) syscall(SYS_futex, address(), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
    }

    void wait(uint32_t seen, int spins) {
        for (int i = 0; i < spins; i++) {
            if (now() != seen) return;
            pause_a_little();
        }
        sleepers.fetch_add(1, std::memory_order_seq_cst);
        while (value.load(std::memory_order_seq_cst) == seen)
            syscall(SYS_futex, address(), FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
        sleepers.fetch_sub(1, std::memory_order_seq_cst);
    }

  private:
    uint32_t *address() { return reinterpret_cast<uint32_t *>(&value); }
    alignas(64) std::atomic<uint32_t> value{0};
    std::atomic<uint32_t> sleepers{0};
};

class Pool {
  public:
    // What a thread knows in a run.
    struct Member {
        Pool &pool;
        int index, count;

        // The share of `items` that is this thread's: [begin, end), contiguous.
        void share(int64_t items, int64_t &begin, int64_t &end) const {
            begin = items * index / count;
            end = items * (index + 1) / count;
        }

        // Take some of `items` that nobody has taken since the last meeting, in steps of `unit`; false when none are left. What is taken
        // at a time gets smaller towards the end, so that one whose core was lent to somebody else keeps the others waiting for little.
        bool claim(int64_t items, int64_t unit, int64_t &begin, int64_t &end) {
            begin = pool.claimed.load(std::memory_order_relaxed);
            do {
                if (begin >= items) return false;
                const int64_t part = (items - begin) / (FINENESS * count) / unit * unit;
                end = begin + (part > unit ? part : unit);
            } while (!pool.claimed.compare_exchange_weak(begin, end, std::memory_order_relaxed));
            if (end > items) end = items;
            return true;
        }
        void meet() { pool.meet(); }
    };

    // Throws std::system_error where the kernel gives no more threads.
    explicit Pool(int threads) : count(threads) {
        helpers.reserve(count);
        try {
            for (int i = 1; i < count; i++) helpers.emplace_back([this, i] { help(i); });
        } catch (...) {
            end();
            throw;
        }
    }

    ~Pool() { end(); }

    int threads() const { return count; }

    template <class Work>
    void run(Work &&work) {
        if (count == 1) {
            Member alone{*this, 0, 1};
            work(alone);
            meet();
            return;
        }
        auto call = [](void *context, Member &member) { (*static_cast<std::remove_reference_t<Work> *>(context))(member); };
        function = call;
        context = &work;
        start.open();
        Member first{*this, 0, count};
        work(first);
        meet();
    }

  private:
    static constexpr int SPINS = 4000;       // about 50 us at a barrier
    static constexpr int FINENESS = 4;       // the first claim is this part of a fair share
    static constexpr int IDLE_SPINS = 6000;  // between steps, while the engine decides the next

    void end() {
        ending = true;
        start.open();
        for (auto &helper : helpers) helper.join();
    }

    void help(int index) {
        uint32_t seen = 0;
        for (;;) {
            start.wait(seen, IDLE_SPINS);
            seen++;
            if (ending) return;
            Member member{*this, index, count};
            function(context, member);
            meet();
        }
    }

    void meet() {
        meetings++;
        if (count == 1) {
            claimed.store(0, std::memory_order_relaxed);
            return;
        }
        const uint32_t seen = together.now();
        if (arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == count) {
            arrived.store(0, std::memory_order_relaxed);
            claimed.store(0, std::memory_order_relaxed);
            together.open();
        } else {
            together.wait(seen, SPINS);
        }
    }

    const int count;
    std::vector<std::thread> helpers;
    std::atomic<bool> ending{false};
    void (*function)(void *, Member &) = nullptr;
    void *context = nullptr;
    Gate start, together;
    alignas(64) std::atomic<int> arrived{0};
    alignas(64) std::atomic<int64_t> claimed{0};  // items, since the last meeting
};
