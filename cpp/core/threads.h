// A pool of pinned threads that spin briefly between the parallel regions of a step and sleep between steps.
// The caller is thread 0. No OpenMP: a second runtime in the process (torch brings one) would oversubscribe the cores.
// Nobody waits for a thread that has no core: where the front end or another process runs on it, the others do its share.
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

  // Splits [0, count) into blocks of `grain` that the threads take one after another: body(begin, end, thread). It must not throw.
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
  // Calls body(thread) here and on each worker that comes before the call here has returned; returns when all have.
  template <typename Body>
  void run(Body&& body) {
    using Plain = std::remove_reference_t<Body>;
    run_erased([](void* context, int thread) { (*static_cast<Plain*>(context))(thread); },
               const_cast<void*>(static_cast<const void*>(&body)));
  }

  using Entry = void (*)(void* context, int thread);
  void run_erased(Entry entry, void* context);
  void work(int thread);
  bool enter(uint64_t gate);

  int size_;
  std::vector<std::thread> workers_;
  Entry entry_ = nullptr;
  void* context_ = nullptr;
  alignas(64) std::atomic<uint64_t> gate_{0};  // number of the region, whether it is closed, how many workers have entered
  alignas(64) std::atomic<int> left_{0};       // workers that have left it again
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
