// The index in memory: which key lies in which slot, and the prefix tree over the blocks.
//
// Invariants
//  - prefix-closed: a resident block's parent is resident; a block is evicted only as an unpinned leaf, and any other
//    removal takes its whole subtree along. So residency along a chain is monotone, and a longest-prefix lookup is a
//    binary search.
//  - a slot's generation grows at each reservation, so (slot, generation) names one block for ever.
//  - a slot is in one state; it joins the free list only by release(), which the owner calls when its record is free on
//    the device and nothing reads it any more.
//  - a child never outlives its parent: its expiry is at most the parent's.
// Thread-safe: one lock, held for short sections; no I/O under it.
// Memory: about 90 bytes per slot, all allocated by the constructor.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "tutti/eviction.h"
#include "tutti/slot_table.h"
#include "tutti/status.h"

namespace tutti {

enum class SlotState : uint8_t {
  Free,
  Writing,   // reserved; its bytes are on their way
  Ready,     // durable, but its parent is not published yet
  Resident,  // can be found
  Doomed,    // was Writing when its parent went: will be removed when its I/O has ended
  Removed,   // cannot be found; waits for release()
};

struct Reservation {
  Status status = Status::Ok;  // Ok, Exists, Rejected (parent missing), NoSpace
  uint32_t slot = kNoSlot;
  uint32_t generation = 0;
  uint8_t rot = 0;
};

// Where a block is in its chain. `parent`: the first 8 bytes of the key before it, little-endian; 0 at position 0.
struct Lineage {
  uint64_t parent = 0;
  uint32_t position = 0;
};

struct TableCounts {
  uint64_t resident = 0, writing = 0, free = 0, removed = 0, pinned = 0;
};

class BlockTable {
 public:
  // `first_slot`.. of the pool up to `slots`; rotations 0..devices-1.
  BlockTable(uint64_t slots, uint32_t devices);

  // Leading keys that are resident and not expired. `touch` makes the last of them, and so all, recently used.
  uint32_t find_prefix(std::span<const Key> keys, uint32_t now_seconds, bool touch);
  // Slot, generation and rotation per key; status NotFound where it isn't resident.
  std::vector<Reservation> resolve(std::span<const Key> keys, uint32_t now_seconds);

  // Reserves slots for a chain of new blocks below `parent` (null = root). Never evicts: the caller makes room first.
  // Expired blocks on the way are removed with their subtrees and appended to `removed`.
  std::vector<Reservation> reserve(std::span<const Key> keys, const Key* parent, uint32_t expiry, uint32_t now_seconds,
                                   std::vector<uint32_t>& removed);
  // The block's bytes and record are durable. Ok, or Rejected for a block whose parent went
  // meanwhile (it is Removed then).
  Status publish(uint32_t slot);
  // The block's bytes didn't become durable: removes it; appends what has to be freed to `removed`.
  void abort(uint32_t slot, std::vector<uint32_t>& removed);

  // Removes up to `count` unpinned leaves, oldest first.
  std::vector<uint32_t> evict(uint64_t count);
  // Removes a block and its subtree, if the key is there with this generation (0 = any).
  void remove(const Key& key, uint32_t generation, std::vector<uint32_t>& removed);
  // Removes expired blocks among the next `count` slots of a round trip over all slots.
  void sweep_expired(uint64_t count, uint32_t now_seconds, std::vector<uint32_t>& removed);
  void clear(std::vector<uint32_t>& removed);
  // Gives Removed slots back.
  void release(std::span<const uint32_t> slots);

  // Pins the deepest resident block of `keys` against eviction (and with it its ancestors). Returns its slot, and how
  // deep it is.
  uint32_t pin_prefix(std::span<const Key> keys, uint32_t now_seconds, uint32_t& blocks);
  // Pins a slot that is reserved or resident, whichever its state.
  void pin(uint32_t slot);
  // BadState if it isn't pinned or is another generation by now.
  Status unpin(uint32_t slot, uint32_t generation);

  // Recovery: every valid record in turn, then finish_load, which links the trees and returns the slots that it
  // dropped.
  bool load(const SlotRecord& record);
  std::vector<uint32_t> finish_load(uint32_t now_seconds, uint64_t& orphans, uint64_t& expired);

  [[nodiscard]] SlotRecord record_of(uint32_t slot, RecordState state) const;
  [[nodiscard]] SlotState state_of(uint32_t slot) const;
  // Keys of slots that are in use, or removed and not yet given out again.
  [[nodiscard]] std::vector<Key> keys_of(std::span<const uint32_t> slots) const;
  // Of slots that are in use.
  [[nodiscard]] std::vector<Lineage> lineage_of(std::span<const uint32_t> slots) const;
  [[nodiscard]] TableCounts counts() const;
  [[nodiscard]] uint64_t slots() const noexcept { return state_.size(); }
  [[nodiscard]] uint64_t memory_bytes() const noexcept;
  // Resident slots from `first` on, at most `limit`.
  std::vector<uint32_t> resident_slots(uint32_t first, uint64_t limit) const;

 private:
  struct Tree {
    uint32_t parent = kNoSlot, first_child = kNoSlot, next = kNoSlot, previous = kNoSlot;
  };

  [[nodiscard]] uint64_t bucket_of(const Key& key) const noexcept;
  [[nodiscard]] uint32_t find(const Key& key) const noexcept;
  void insert_bucket(uint32_t slot) noexcept;
  void erase_bucket(uint32_t slot) noexcept;
  [[nodiscard]] uint32_t find_live(const Key& key, uint32_t now) const noexcept;
  [[nodiscard]] bool expired(uint32_t slot, uint32_t now) const noexcept {
    return expiry_[slot] != 0 && expiry_[slot] <= now;
  }
  void link_child(uint32_t parent, uint32_t child) noexcept;
  void unlink_child(uint32_t child) noexcept;
  [[nodiscard]] bool candidate(uint32_t slot) const noexcept {
    return state_[slot] == SlotState::Resident && tree_[slot].first_child == kNoSlot && pins_[slot] == 0;
  }
  void set_resident(uint32_t slot);
  void remove_subtree(uint32_t slot, std::vector<uint32_t>& removed);
  void touch_slot(uint32_t slot);
  void pin_locked(uint32_t slot);
  uint32_t prefix_locked(std::span<const Key> keys, uint32_t now, uint32_t& deepest) const noexcept;
  uint64_t next_tick() noexcept;

  mutable std::mutex mutex_;
  std::vector<Key> keys_;
  std::vector<Tree> tree_;
  std::vector<uint64_t> last_use_;
  std::vector<uint32_t> generation_;
  std::vector<uint32_t> expiry_;
  std::vector<uint32_t> pins_;
  std::vector<uint32_t> position_;  // in the chain, from 0; of slots in use
  std::vector<SlotState> state_;
  std::vector<uint8_t> rot_;
  std::vector<uint32_t> free_;
  std::vector<uint32_t> buckets_;
  std::unique_ptr<EvictionPolicy> policy_;
  std::vector<uint32_t> loading_parent_generation_;  // during recovery only
  uint64_t bucket_mask_ = 0;
  uint64_t tick_ = 0;
  uint64_t ordinal_ = 0;
  uint64_t sweep_at_ = 0;
  uint32_t devices_;
  uint64_t resident_ = 0, writing_ = 0, removed_ = 0, pinned_ = 0;
};

}  // namespace tutti
