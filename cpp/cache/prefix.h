// The prefix cache: full pages of computed K/V entries, found again by the tokens that led to them.
//
// A cached page is keyed by (the entry of the page before it, its own tokens). Keys are compared exactly, and an entry's
// number is never used twice, so equal keys mean equal prefixes; the hash only finds the bucket. The first page of a chain
// is keyed by the salt too. A page that sequences hold is live; one that only the cache knows is cached and evicted, least
// recently used first, when the pool runs dry. A sequence holds the whole chain before its own pages and drops it from the
// back, so the least recently used entry never has a successor in the cache.
//
// To pin an entry, match it and do not release the pages.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cache/pages.h"

namespace maga {

class PrefixCache {
 public:
  // The place in the cache that a sequence has reached: its next page goes after `entry`.
  struct Position {
    uint64_t entry = 0;  // 0: the start
    int64_t pages = 0;   // pages of the sequence up to here
  };

  PrefixCache(int64_t pages, int64_t page_tokens, bool enabled);

  const PagePool& pool() const { return pool_; }
  int64_t page_tokens() const { return page_tokens_; }
  int64_t cached() const { return cached_; }                    // pages that nobody holds and the cache keeps
  int64_t available() const { return pool_.free() + cached_; }  // pages that allocate() can give
  uint64_t evicted() const { return evicted_; }                 // pages that left the index to others, since start
  int64_t pages_for(int64_t tokens) const { return (tokens + page_tokens_ - 1) / page_tokens_; }

  // A page held once; evicts if it must. kNoPage when every page is held.
  int32_t allocate();
  void hold(int32_t page) { pool_.hold(page); }
  // Drops a sequence's pages, which leaves them cached if they are in the index and free otherwise.
  void release(std::span<const int32_t> pages);

  struct Match {
    int64_t pages = 0;   // full pages of the longest cached prefix
    int64_t unheld = 0;  // of them, those that nobody holds: holding them makes fewer pages available
  };
  // What match() would find.
  Match peek(std::string_view salt, std::span<const int32_t> tokens) const;
  // Holds the pages of the longest cached prefix of `tokens` and appends them to `pages`.
  Position match(std::string_view salt, std::span<const int32_t> tokens, std::vector<int32_t>* pages);

  // Enters the full pages of `tokens` that come after `position`; all their K/V entries must be computed. Where the cache has a
  // page of the same content already, the sequence's own page is exchanged for that one.
  void insert(std::string_view salt, std::span<const int32_t> tokens, std::span<int32_t> pages, Position* position);
  // Takes pages out of the index, whoever holds them: their contents must not be found again.
  void forget(std::span<const int32_t> pages);

 private:
  struct Entry {
    uint64_t number = 0;  // 0: the page is not in the index
    uint64_t after = 0;
    uint64_t hash = 0;
    int32_t next_in_bucket = kNoPage;
    int32_t older = kNoPage, newer = kNoPage;  // the list of cached pages
    std::string salt;                          // of the first page of a chain
  };

  uint64_t hash_of(std::string_view salt, uint64_t after, std::span<const int32_t> tokens) const;
  int32_t find(std::string_view salt, uint64_t after, std::span<const int32_t> tokens, uint64_t hash) const;
  std::span<const int32_t> block(std::span<const int32_t> tokens, int64_t page) const {
    return tokens.subspan(page * page_tokens_, page_tokens_);
  }
  void remove(int32_t page);       // from the index
  void link_newest(int32_t page);  // into the list of cached pages
  void unlink(int32_t page);

  PagePool pool_;
  int64_t page_tokens_;
  bool enabled_;
  std::vector<Entry> entries_;    // by page
  std::vector<int32_t> tokens_;   // (pages, page_tokens) of the pages in the index
  std::vector<int32_t> buckets_;  // first page of each; a power of two
  uint64_t last_number_ = 0;
  int32_t oldest_ = kNoPage, newest_ = kNoPage;
  int64_t cached_ = 0;
  uint64_t evicted_ = 0;
};

}  // namespace maga
