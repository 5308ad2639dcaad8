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

// Parts of the gate.
constexpr uint64_t kEntered = 0xffff, kClosed = uint64_t{1} << 16, kRegion = uint64_t{1} << 17;

void pause_core() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Waiting awake, for kSpin at most. Whoever else wants the core has it meanwhile: the front end is woken at the end of a step, when
// the workers spin, and should find a core there rather than take the loop's.
class Spin {
 public:
  // False once the time is over.
  bool turn() {
    pause_core();
    if (++turns_ % 256 != 0) return true;
    std::this_thread::yield();
    return std::chrono::steady_clock::now() < deadline_;
  }

 private:
  int turns_ = 0;
  std::chrono::steady_clock::time_point deadline_ = std::chrono::steady_clock::now() + kSpin;
};

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
    gate_.fetch_add(kRegion, std::memory_order_release);
  }
  wake_.notify_all();
  for (auto& worker : workers_) worker.join();
}

void ThreadPool::run_erased(Entry entry, void* context) {
  entry_ = entry;
  context_ = context;
  left_.store(0, std::memory_order_relaxed);
  gate_.store((gate_.load(std::memory_order_relaxed) / kRegion + 1) * kRegion, std::memory_order_seq_cst);
  if (sleeping_.load(std::memory_order_seq_cst) > 0) {
    std::lock_guard lock(mutex_);
    wake_.notify_all();
  }
  entry(context, 0);
  const auto entered = static_cast<int>(gate_.fetch_or(kClosed, std::memory_order_acq_rel) & kEntered);
  Spin spin;
  for (int left; (left = left_.load(std::memory_order_acquire)) < entered;)
    // A worker that is this late has lost its core in the middle of a block: what took it may have this one too.
    if (!spin.turn()) left_.wait(left, std::memory_order_acquire);
}

// Into the region that `gate` shows, unless it has been closed.
bool ThreadPool::enter(uint64_t gate) {
  for (const uint64_t region = gate / kRegion; gate / kRegion == region && (gate & kClosed) == 0;)
    if (gate_.compare_exchange_weak(gate, gate + 1, std::memory_order_acq_rel, std::memory_order_acquire)) return true;
  return false;
}

void ThreadPool::work(int thread) {
  uint64_t seen = 0;
  for (;;) {
    uint64_t gate;
    Spin spin;
    while ((gate = gate_.load(std::memory_order_acquire)) / kRegion == seen) {
      if (spin.turn()) continue;
      std::unique_lock lock(mutex_);
      sleeping_.fetch_add(1, std::memory_order_seq_cst);
      wake_.wait(lock, [&] { return gate_.load(std::memory_order_seq_cst) / kRegion != seen; });
      sleeping_.fetch_sub(1, std::memory_order_relaxed);
    }
    seen = gate / kRegion;
    if (stop_.load(std::memory_order_acquire)) return;
    if (!enter(gate)) continue;
    entry_(context_, thread);
    left_.fetch_add(1, std::memory_order_acq_rel);
    left_.notify_one();
  }
}

}  // namespace maga
