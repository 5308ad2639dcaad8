// The pool of K/V pages: which are free, and how many sequences hold each of the others.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace maga {

constexpr int32_t kNoPage = -1;

class PagePool {
 public:
  explicit PagePool(int64_t pages);

  int64_t total() const { return static_cast<int64_t>(references_.size()); }
  int64_t free() const { return static_cast<int64_t>(free_.size()); }
  int32_t references(int32_t page) const { return references_[page]; }
  std::span<const int32_t> references() const { return references_; }  // by page

  int32_t take();                // a free page, now held once; kNoPage when none is free
  void hold(int32_t page);       // one more holder
  int32_t drop(int32_t page);    // one holder less; returns how many are left. At 0 the page is not free yet: see give_back
  void give_back(int32_t page);  // frees a page that nobody holds

 private:
  std::vector<int32_t> references_;
  std::vector<int32_t> free_;  // a stack: the page freed last is the likeliest to be in a CPU's cache
};

}  // namespace maga
