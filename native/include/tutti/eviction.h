// Eviction policies. The block table offers only candidates: resident leaves of the prefix trees that nobody has
// pinned. So whatever a policy chooses, a block never goes before its descendants.
//
// A touch of a block counts for all its ancestors: the table hands a removed leaf's last use on to its parent.
// Not thread-safe: called under the table's lock.
#pragma once

#include <cstdint>
#include <vector>

#include "tutti/slot_table.h"

namespace tutti {

class EvictionPolicy {
 public:
  EvictionPolicy() = default;
  virtual ~EvictionPolicy() = default;
  EvictionPolicy(const EvictionPolicy&) = delete;
  EvictionPolicy& operator=(const EvictionPolicy&) = delete;

  // `slot` became a candidate. `last_use` are the table's ticks (larger = later).
  virtual void add(uint32_t slot, uint64_t last_use) = 0;
  // `slot` is no candidate any more: it was removed, pinned, or got a child.
  virtual void remove(uint32_t slot) = 0;
  // A candidate was used.
  virtual void touch(uint32_t slot, uint64_t last_use) = 0;
  // The candidate to evict next, or kNoSlot. It stays a candidate until remove().
  [[nodiscard]] virtual uint32_t victim() const = 0;
  // Candidates in bulk, once, in order of last use (oldest first).
  virtual void load(const std::vector<uint32_t>& oldest_first, const std::vector<uint64_t>& last_use) = 0;
};

// Least recently used: a doubly linked list through two arrays, ordered by last use.
class LruPolicy final : public EvictionPolicy {
 public:
  explicit LruPolicy(uint64_t slots) : newer_(slots, kNoSlot), older_(slots, kNoSlot), used_(slots, 0) {}

  void add(uint32_t slot, uint64_t last_use) override {
    used_[slot] = last_use;
    // Walk from both ends: a fresh block belongs near the new end, a parent whose last leaf just went near the old one.
    uint32_t from_new = newest_;
    uint32_t from_old = oldest_;
    while (from_new != kNoSlot && used_[from_new] > last_use && used_[from_old] <= last_use) {
      from_new = older_[from_new];
      from_old = newer_[from_old];
    }
    if (from_new == kNoSlot) {
      link_before(slot, oldest_);
    } else if (used_[from_new] <= last_use) {
      link_before(slot, newer_[from_new]);
    } else {
      link_before(slot, from_old);
    }
  }

  void remove(uint32_t slot) override {
    const uint32_t newer = newer_[slot];
    const uint32_t older = older_[slot];
    (newer == kNoSlot ? newest_ : older_[newer]) = older;
    (older == kNoSlot ? oldest_ : newer_[older]) = newer;
    newer_[slot] = older_[slot] = kNoSlot;
  }

  void touch(uint32_t slot, uint64_t last_use) override {
    remove(slot);
    add(slot, last_use);
  }

  [[nodiscard]] uint32_t victim() const override { return oldest_; }

  void load(const std::vector<uint32_t>& oldest_first, const std::vector<uint64_t>& last_use) override {
    for (const uint32_t slot : oldest_first) {
      used_[slot] = last_use[slot];
      link_before(slot, kNoSlot);
    }
  }

 private:
  // Links `slot` on the older side of `newer`; kNoSlot = as the newest.
  void link_before(uint32_t slot, uint32_t newer) {
    const uint32_t older = newer == kNoSlot ? newest_ : older_[newer];
    newer_[slot] = newer;
    older_[slot] = older;
    (newer == kNoSlot ? newest_ : older_[newer]) = slot;
    (older == kNoSlot ? oldest_ : newer_[older]) = slot;
  }

  std::vector<uint32_t> newer_;
  std::vector<uint32_t> older_;
  std::vector<uint64_t> used_;
  uint32_t newest_ = kNoSlot;
  uint32_t oldest_ = kNoSlot;
};

}  // namespace tutti
