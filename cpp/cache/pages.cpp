// Counting holders; who evicts what is decided in prefix.cpp.
#include "cache/pages.h"

#include "core/check.h"

namespace maga {

PagePool::PagePool(int64_t pages) : references_(pages, 0) {
  free_.reserve(pages);
  for (int64_t page = pages; page-- > 0;) free_.push_back(static_cast<int32_t>(page));
}

int32_t PagePool::take() {
  if (free_.empty()) return kNoPage;
  const int32_t page = free_.back();
  free_.pop_back();
  references_[page] = 1;
  return page;
}

void PagePool::hold(int32_t page) { ++references_[page]; }

int32_t PagePool::drop(int32_t page) {
  MAGA_CHECK(references_[page] > 0, "page ", page, " is dropped, but nobody holds it");
  return --references_[page];
}

void PagePool::give_back(int32_t page) {
  MAGA_CHECK(references_[page] == 0, "page ", page, " is freed, but ", references_[page], " hold it");
  free_.push_back(page);
}

}  // namespace maga
