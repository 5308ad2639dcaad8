// Start, spin, sleep: the protocol behind ThreadPool::run.
#include "core/threads.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <fstream>
#include <string>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace maga {
namespace {

// Long enough to bridge the gap between two ops and two steps, short enough that an idle server burns nothing.
constexpr auto kSpin = std::chrono::microseconds(200);

void pause_core() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

std::vector<int> allowed_cpus() {
  cpu_set_t set;
  CPU_ZERO(&set);
  std::vector<int> cpus;
  if (sched_getaffinity(0, sizeof(set), &set) == 0)
    for (int i = 0; i < CPU_SETSIZE; ++i)
      if (CPU_ISSET(i, &set)) cpus.push_back(i);
  return cpus;
}

// Cores granted by a cgroup v2 quota, or a very large number.
double cgroup_cores() {
  std::ifstream file("/sys/fs/cgroup/cpu.max");
  std::string quota;
  double period = 0;
  if (file >> quota >> period && quota != "max" && period > 0) return std::stod(quota) / period;
  return 1e9;
}

void pin_to(int cpu) {
  cpu_set_t set;
  CPU_ZERO(&set);
  CPU_SET(cpu, &set);
  sched_setaffinity(0, sizeof(set), &set);  // best effort: an unpinned worker is still right
}

}  // namespace

void name_thread(const char* name) { pthread_setname_np(pthread_self(), name); }

int usable_cores() {
  const int cpus = std::max<int>(1, static_cast<int>(allowed_cpus().size()));
  return std::max(1, static_cast<int>(std::min<double>(cpus, cgroup_cores() + 0.5)));
}

ThreadPool::ThreadPool(int threads) : size_(threads > 0 ? threads : usable_cores()) {
  const std::vector<int> cpus = allowed_cpus();
  for (int i = 1; i < size_; ++i)
    workers_.emplace_back([this, i, cpus] {
      name_thread("maga-compute");
      if (static_cast<int>(cpus.size()) >= size_) pin_to(cpus[i]);
      work(i);
    });
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
    generation_.fetch_add(1, std::memory_order_release);
  }
  wake_.notify_all();
  for (auto& worker : workers_) worker.join();
}

void ThreadPool::run_erased(Entry entry, void* context) {
  if (size_ == 1) return entry(context, 0);
  entry_ = entry;
  context_ = context;
  running_.store(size_ - 1, std::memory_order_relaxed);
  generation_.fetch_add(1, std::memory_order_seq_cst);
  if (sleeping_.load(std::memory_order_seq_cst) > 0) {
    std::lock_guard lock(mutex_);
    wake_.notify_all();
  }
  entry(context, 0);
  for (int spins = 0; running_.load(std::memory_order_acquire) > 0; ++spins) {
    // A worker that lost its core to another process must get it back: yield once in a while.
    if (spins % 4096 == 4095) std::this_thread::yield();
    pause_core();
  }
}

void ThreadPool::work(int thread) {
  uint64_t seen = 0;
  for (;;) {
    const auto deadline = std::chrono::steady_clock::now() + kSpin;
    for (int spins = 0; generation_.load(std::memory_order_acquire) == seen; ++spins) {
      pause_core();
      if (spins % 256 != 255 || std::chrono::steady_clock::now() < deadline) continue;
      std::unique_lock lock(mutex_);
      sleeping_.fetch_add(1, std::memory_order_seq_cst);
      wake_.wait(lock, [&] { return generation_.load(std::memory_order_seq_cst) != seen; });
      sleeping_.fetch_sub(1, std::memory_order_relaxed);
    }
    seen = generation_.load(std::memory_order_acquire);
    if (stop_.load(std::memory_order_acquire)) return;
    entry_(context_, thread);
    running_.fetch_sub(1, std::memory_order_acq_rel);
  }
}

}  // namespace maga
