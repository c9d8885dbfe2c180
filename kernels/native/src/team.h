// A team of threads, some or all of which run the phases of a step together.
#pragma once

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace rayfleet {

static inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#endif
}

class Team {
 public:
  explicit Team(int size) : size_(size), parts_(size) {
#if defined(__linux__)
    if (sched_getaffinity(0, sizeof cores_, &cores_)) CPU_ZERO(&cores_);
#endif
    for (int id = 1; id < size; ++id) threads_.emplace_back([this, id] { serve(id); });
  }

  ~Team() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      ending_ = true;
      generation_.fetch_add(1);
    }
    wake_.notify_all();
    for (auto& thread : threads_) thread.join();
  }

  int size() const { return size_; }

  // Runs work(id) on the first `count` threads; the caller is number 0.
  void run(int count, const std::function<void(int)>& work) {
    if (count == 1) {
      // The other threads are not woken: no thread that could read this is running.
      active_ = 1;
      return work(0);
    }
    keep_off_this_core();
    {
      std::lock_guard<std::mutex> lock(mutex_);
      active_ = count;
      work_ = &work;
      generation_.fetch_add(1);
    }
    wake_.notify_all();
    work(0);
    barrier();
  }

  // Returns when all active threads have arrived. Spins: a phase takes microseconds.
  void barrier() {
    if (active_ == 1) return;
    const uint32_t phase = phase_.load();
    if (arrived_.fetch_add(1) + 1 == active_) {
      arrived_.store(0);
      phase_.fetch_add(1);
      return;
    }
    for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; ++spins)
      // Yield, since a thread that lost its core may need this one.
      if (spins < kSpins) relax(); else std::this_thread::yield();
  }

  // Distributes 0..count-1. A thread works on the same part in each phase of the same length, so
  // that its data is in its cache, and claims several items at a time from the part's beginning or
  // end. A thread that is done helps others, so a thread that is delayed by other load gets fewer
  // items.
  template <typename Item>
  void share(int id, int64_t count, Item&& item, int64_t at_a_time = 1, bool from_end = false) {
    const int active = active_;
    if (active == 1) {
      for (int64_t i = 0; i < count; ++i) item(from_end ? count - 1 - i : i);
      return;
    }
    const uint32_t phase = phase_.load();
    for (int ahead = 0; ahead < std::min(active, kHelped); ++ahead) {
      const int part = (id + ahead) % active;
      const int64_t first = count * part / active, size = count * (part + 1) / active - first;
      for (int64_t i; (i = parts_[part].take(phase, size, at_a_time)) < size;)
        for (const int64_t end = std::min(size, i + at_a_time); i < end; ++i)
          item(first + (from_end ? size - 1 - i : i));
    }
    barrier();
  }

 private:
  // A thread's part of a phase, in a separate cache line: the number of claimed items and the phase
  // to which they belong, so that no reset is needed.
  struct alignas(64) Part {
    std::atomic<uint64_t> state{0};

    // Claims up to `some` items; returns the first one, or `size` if none are left.
    int64_t take(uint32_t phase, int64_t size, int64_t some) {
      uint64_t seen = state.load();
      while (true) {
        const int64_t taken = seen >> 32 == phase ? (int64_t)(uint32_t)seen : 0;
        if (taken >= size) return size;
        const uint64_t next = (uint64_t)phase << 32 | (uint64_t)std::min(size, taken + some);
        if (state.compare_exchange_weak(seen, next)) return taken;
      }
    }
  };

  static constexpr int kSpins = 4000;
  // Maximum parts that a thread checks, its own first. Each is a cache line that it reads per
  // phase.
  static constexpr int kHelped = 8;
  static constexpr int kSmall = 8;

  // When waking a thread, the kernel may place it on the caller's core although another one is or
  // will be idle: both then wait for each other in every phase until they are rebalanced. In a
  // larger team, one thread matters less, and moving all of them costs more.
  void keep_off_this_core() {
#if defined(__linux__)
    const int core = sched_getcpu();
    if (core < 0 || core == core_ || size_ > kSmall) return;
    core_ = core;
    cpu_set_t others = cores_;
    CPU_CLR(core, &others);
    if (!CPU_COUNT(&others)) return;
    for (auto& thread : threads_)
      pthread_setaffinity_np(thread.native_handle(), sizeof others, &others);
#endif
  }

  void serve(int id) {
    uint32_t seen = 0;
    while (true) {
      for (int spins = 0; generation_.load(std::memory_order_acquire) == seen && spins < kSpins;
           ++spins)
        relax();
      const std::function<void(int)>* work;
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [&] { return generation_.load() != seen; });
        // Runs that did not need this thread are skipped.
        seen = generation_.load();
        if (ending_) return;
        work = id < active_ ? work_ : nullptr;
      }
      if (!work) continue;
      (*work)(id);
      barrier();
    }
  }

  const int size_;
#if defined(__linux__)
  cpu_set_t cores_;  // cores that the process may use
  int core_ = -1;    // core of the caller when it last ran with others
#endif
  std::vector<std::thread> threads_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::atomic<uint32_t> generation_{0};
  std::atomic<uint32_t> phase_{0};
  std::atomic<int> arrived_{0};
  std::atomic<int> active_{1};
  std::vector<Part> parts_;  // by thread
  const std::function<void(int)>* work_ = nullptr;
  bool ending_ = false;
};

}  // namespace rayfleet
