// The index is a hash table whose buckets are chains through the entries, the eviction order a list through them: no allocation.
#include "cache/prefix.h"

#include <algorithm>
#include <bit>

#include "core/check.h"

namespace maga {
namespace {

uint64_t mix(uint64_t hash, uint64_t value) {
  hash ^= value + 0x9e3779b97f4a7c15u + (hash << 6) + (hash >> 2);
  hash *= 0xff51afd7ed558ccdu;
  return hash ^ (hash >> 32);
}

}  // namespace

PrefixCache::PrefixCache(int64_t pages, int64_t page_tokens, bool enabled)
    : pool_(pages),
      page_tokens_(page_tokens),
      enabled_(enabled),
      entries_(pages),
      tokens_(pages * page_tokens),
      buckets_(std::bit_ceil(static_cast<uint64_t>(std::max<int64_t>(pages, 1))), kNoPage) {}

uint64_t PrefixCache::hash_of(std::string_view salt, uint64_t after, std::span<const int32_t> tokens) const {
  uint64_t hash = mix(0, after);
  if (after == 0)
    for (const char byte : salt) hash = mix(hash, static_cast<uint8_t>(byte));
  for (const int32_t token : tokens) hash = mix(hash, static_cast<uint32_t>(token));
  return hash;
}

int32_t PrefixCache::find(std::string_view salt, uint64_t after, std::span<const int32_t> tokens, uint64_t hash) const {
  for (int32_t page = buckets_[hash & (buckets_.size() - 1)]; page != kNoPage; page = entries_[page].next_in_bucket) {
    const Entry& entry = entries_[page];
    if (entry.hash == hash && entry.after == after && (after != 0 || entry.salt == salt) &&
        std::equal(tokens.begin(), tokens.end(), tokens_.begin() + page * page_tokens_))
      return page;
  }
  return kNoPage;
}

int32_t PrefixCache::allocate() {
  if (pool_.free() == 0 && oldest_ != kNoPage) {
    const int32_t page = oldest_;
    unlink(page);
    remove(page);
    pool_.give_back(page);
    ++evicted_;
  }
  return pool_.take();
}

void PrefixCache::release(std::span<const int32_t> pages) {
  for (size_t i = pages.size(); i-- > 0;) {
    const int32_t page = pages[i];
    if (pool_.drop(page) > 0) continue;
    if (entries_[page].number != 0)
      link_newest(page);
    else
      pool_.give_back(page);
  }
}

PrefixCache::Match PrefixCache::peek(std::string_view salt, std::span<const int32_t> tokens) const {
  Match match;
  if (!enabled_) return match;
  uint64_t after = 0;
  const int64_t full = static_cast<int64_t>(tokens.size()) / page_tokens_;
  for (; match.pages < full; ++match.pages) {
    const auto own = block(tokens, match.pages);
    const int32_t page = find(salt, after, own, hash_of(salt, after, own));
    if (page == kNoPage) break;
    after = entries_[page].number;
    match.unheld += pool_.references(page) == 0;
  }
  return match;
}

PrefixCache::Position PrefixCache::match(std::string_view salt, std::span<const int32_t> tokens, std::vector<int32_t>* pages) {
  Position position;
  if (!enabled_) return position;
  const int64_t full = static_cast<int64_t>(tokens.size()) / page_tokens_;
  for (; position.pages < full; ++position.pages) {
    const auto own = block(tokens, position.pages);
    const int32_t page = find(salt, position.entry, own, hash_of(salt, position.entry, own));
    if (page == kNoPage) break;
    pages->push_back(page);  // may throw, what follows not
    if (pool_.references(page) == 0) unlink(page);
    pool_.hold(page);
    position.entry = entries_[page].number;
  }
  return position;
}

void PrefixCache::insert(std::string_view salt, std::span<const int32_t> tokens, std::span<int32_t> pages, Position* position) {
  if (!enabled_) return;
  const int64_t full = static_cast<int64_t>(tokens.size()) / page_tokens_;
  for (; position->pages < full; ++position->pages) {
    const auto own = block(tokens, position->pages);
    const uint64_t hash = hash_of(salt, position->entry, own);
    int32_t& page = pages[position->pages];
    const int32_t known = find(salt, position->entry, own, hash);
    if (known != kNoPage && known != page) {
      if (pool_.references(known) == 0) unlink(known);
      pool_.hold(known);
      release({&page, 1});
      page = known;
    } else if (known == kNoPage && entries_[page].number == 0) {
      Entry& entry = entries_[page];
      if (position->entry == 0) entry.salt = salt;  // may throw, what follows not
      entry.number = ++last_number_;
      entry.after = position->entry;
      entry.hash = hash;
      std::copy(own.begin(), own.end(), tokens_.begin() + page * page_tokens_);
      int32_t& bucket = buckets_[hash & (buckets_.size() - 1)];
      entry.next_in_bucket = bucket;
      bucket = page;
    }
    position->entry = entries_[page].number;
  }
}

void PrefixCache::forget(std::span<const int32_t> pages) {
  for (const int32_t page : pages) {
    if (entries_[page].number == 0) continue;
    remove(page);
    if (pool_.references(page) > 0) continue;
    unlink(page);
    pool_.give_back(page);
  }
}

void PrefixCache::remove(int32_t page) {
  Entry& entry = entries_[page];
  int32_t* link = &buckets_[entry.hash & (buckets_.size() - 1)];
  while (*link != page) link = &entries_[*link].next_in_bucket;
  *link = entry.next_in_bucket;
  entry.number = 0;
  entry.salt.clear();
}

void PrefixCache::link_newest(int32_t page) {
  Entry& entry = entries_[page];
  entry.older = newest_;
  entry.newer = kNoPage;
  (newest_ == kNoPage ? oldest_ : entries_[newest_].newer) = page;
  newest_ = page;
  ++cached_;
}

void PrefixCache::unlink(int32_t page) {
  const Entry& entry = entries_[page];
  (entry.older == kNoPage ? oldest_ : entries_[entry.older].newer) = entry.newer;
  (entry.newer == kNoPage ? newest_ : entries_[entry.newer].older) = entry.older;
  --cached_;
}

}  // namespace maga
