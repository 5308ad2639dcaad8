// A pool of pinned threads that spin briefly between the parallel regions of a step and sleep between steps.
// The caller is thread 0. No OpenMP: a second runtime in the process (torch brings one) would oversubscribe the cores.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <type_traits>
#include <vector>

namespace maga {

class ThreadPool {
 public:
  // `threads` counts the caller; 0 means one per core that this process may run on.
  explicit ThreadPool(int threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int size() const { return size_; }

  // Calls body(thread) once on each thread, and returns when all have returned. `body` must not throw.
  template <typename Body>
  void run(Body&& body) {
    using Plain = std::remove_reference_t<Body>;
    run_erased([](void* context, int thread) { (*static_cast<Plain*>(context))(thread); },
               const_cast<void*>(static_cast<const void*>(&body)));
  }

  // Splits [0, count) into blocks of `grain` that the threads take one after another: body(begin, end, thread).
  template <typename Body>
  void parallel_for(int64_t count, int64_t grain, Body&& body) {
    if (count <= 0) return;
    if (grain < 1) grain = 1;
    if (size_ == 1 || count <= grain) {
      body(int64_t{0}, count, 0);
      return;
    }
    std::atomic<int64_t> next{0};
    run([&](int thread) {
      for (;;) {
        const int64_t begin = next.fetch_add(grain, std::memory_order_relaxed);
        if (begin >= count) return;
        body(begin, begin + grain < count ? begin + grain : count, thread);
      }
    });
  }

 private:
  using Entry = void (*)(void* context, int thread);
  void run_erased(Entry entry, void* context);
  void work(int thread);

  int size_;
  std::vector<std::thread> workers_;
  Entry entry_ = nullptr;
  void* context_ = nullptr;
  alignas(64) std::atomic<uint64_t> generation_{0};  // bumped to start a region
  alignas(64) std::atomic<int> running_{0};          // workers still inside the region
  alignas(64) std::atomic<int> sleeping_{0};
  std::atomic<bool> stop_{false};
  std::mutex mutex_;
  std::condition_variable wake_;
};

// What `top -H` and /proc call the calling thread; at most 15 characters.
void name_thread(const char* name);

// Cores that this process may run on (its affinity mask, cut by a cgroup CPU quota).
int usable_cores();

}  // namespace maga
