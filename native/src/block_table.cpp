#include "tutti/block_table.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "tutti/checksum.h"

namespace tutti {

BlockTable::BlockTable(uint64_t slots, uint32_t devices)
    : keys_(slots),
      tree_(slots),
      last_use_(slots, 0),
      generation_(slots, 0),
      expiry_(slots, 0),
      pins_(slots, 0),
      position_(slots, 0),
      state_(slots, SlotState::Free),
      rot_(slots, 0),
      policy_(std::make_unique<LruPolicy>(slots)),
      devices_(devices) {
  uint64_t buckets = 16;
  while (buckets * 3 < slots * 4) {  // at most three quarters full
    buckets *= 2;
  }
  buckets_.assign(buckets, kNoSlot);
  bucket_mask_ = buckets - 1;
  free_.reserve(slots);
  for (uint64_t slot = slots; slot > 0; --slot) {
    free_.push_back(static_cast<uint32_t>(slot - 1));
  }
}

// --- hash: linear probing, deletion by shifting back; keys may be any bytes, so they are mixed ---

uint64_t BlockTable::bucket_of(const Key& key) const noexcept {
  std::array<uint64_t, 4> words{};
  std::memcpy(words.data(), key.data(), sizeof(words));
  return checksum_mix(words[0] + words[1] * 0x9E3779B97F4A7C15ULL + words[2] * 0xC2B2AE3D27D4EB4FULL +
                      words[3] * 0x165667B19E3779F9ULL) &
         bucket_mask_;
}

uint32_t BlockTable::find(const Key& key) const noexcept {
  for (uint64_t at = bucket_of(key);; at = (at + 1) & bucket_mask_) {
    const uint32_t slot = buckets_[at];
    if (slot == kNoSlot || keys_[slot] == key) {
      return slot;
    }
  }
}

void BlockTable::insert_bucket(uint32_t slot) noexcept {
  uint64_t at = bucket_of(keys_[slot]);
  while (buckets_[at] != kNoSlot) {
    at = (at + 1) & bucket_mask_;
  }
  buckets_[at] = slot;
}

void BlockTable::erase_bucket(uint32_t slot) noexcept {
  uint64_t hole = bucket_of(keys_[slot]);
  while (buckets_[hole] != slot) {
    hole = (hole + 1) & bucket_mask_;
  }
  for (uint64_t at = (hole + 1) & bucket_mask_; buckets_[at] != kNoSlot; at = (at + 1) & bucket_mask_) {
    const uint64_t home = bucket_of(keys_[buckets_[at]]);
    if (((at - home) & bucket_mask_) >= ((at - hole) & bucket_mask_)) {
      buckets_[hole] = buckets_[at];
      hole = at;
    }
  }
  buckets_[hole] = kNoSlot;
}

uint32_t BlockTable::find_live(const Key& key, uint32_t now) const noexcept {
  const uint32_t slot = find(key);
  return slot != kNoSlot && state_[slot] == SlotState::Resident && !expired(slot, now) ? slot : kNoSlot;
}

// --- tree ---

void BlockTable::link_child(uint32_t parent, uint32_t child) noexcept {
  tree_[child].parent = parent;
  position_[child] = parent == kNoSlot ? 0 : position_[parent] + 1;
  if (parent == kNoSlot) {
    return;
  }
  if (candidate(parent)) {
    policy_->remove(parent);
  }
  const uint32_t first = tree_[parent].first_child;
  tree_[child].next = first;
  if (first != kNoSlot) {
    tree_[first].previous = child;
  }
  tree_[parent].first_child = child;
}

void BlockTable::unlink_child(uint32_t child) noexcept {
  const Tree links = tree_[child];
  if (links.parent != kNoSlot) {
    const uint32_t parent = links.parent;
    (links.previous == kNoSlot ? tree_[parent].first_child : tree_[links.previous].next) = links.next;
    if (links.next != kNoSlot) {
      tree_[links.next].previous = links.previous;
    }
    last_use_[parent] = std::max(last_use_[parent], last_use_[child]);
    if (candidate(parent)) {
      policy_->add(parent, last_use_[parent]);
    }
  }
  tree_[child].parent = tree_[child].next = tree_[child].previous = kNoSlot;
}

void BlockTable::set_resident(uint32_t slot) {
  state_[slot] = SlotState::Resident;
  --writing_;
  ++resident_;
  if (candidate(slot)) {
    policy_->add(slot, last_use_[slot]);
  }
}

void BlockTable::remove_subtree(uint32_t top, std::vector<uint32_t>& removed) {
  std::vector<uint32_t> subtree{top};
  for (size_t i = 0; i < subtree.size(); ++i) {
    for (uint32_t child = tree_[subtree[i]].first_child; child != kNoSlot; child = tree_[child].next) {
      subtree.push_back(child);
    }
  }
  for (const uint32_t slot : subtree) {
    if (candidate(slot)) {
      policy_->remove(slot);
    }
  }
  unlink_child(top);
  for (const uint32_t slot : subtree) {
    erase_bucket(slot);
    tree_[slot] = Tree{};
    if (pins_[slot] != 0) {
      pins_[slot] = 0;
      --pinned_;
    }
    if (state_[slot] == SlotState::Writing) {
      state_[slot] = SlotState::Doomed;
      continue;
    }
    --(state_[slot] == SlotState::Resident ? resident_ : writing_);
    state_[slot] = SlotState::Removed;
    ++removed_;
    removed.push_back(slot);
  }
}

uint64_t BlockTable::next_tick() noexcept {
  const auto now = std::chrono::system_clock::now().time_since_epoch();
  const auto micros = static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::microseconds>(now).count());
  tick_ = std::max(tick_ + 1, micros);
  return tick_;
}

void BlockTable::touch_slot(uint32_t slot) {
  last_use_[slot] = next_tick();
  if (candidate(slot)) {
    policy_->touch(slot, last_use_[slot]);
  }
}

// --- lookups ---

uint32_t BlockTable::prefix_locked(std::span<const Key> keys, uint32_t now, uint32_t& deepest) const noexcept {
  uint32_t low = 0;
  auto high = static_cast<uint32_t>(keys.size());
  deepest = kNoSlot;
  while (low < high) {  // residency along a chain is monotone
    const uint32_t middle = low + (high - low) / 2;
    if (const uint32_t slot = find_live(keys[middle], now); slot != kNoSlot) {
      low = middle + 1;
      deepest = slot;
    } else {
      high = middle;
    }
  }
  return low;
}

uint32_t BlockTable::find_prefix(std::span<const Key> keys, uint32_t now, bool touch) {
  const std::lock_guard lock(mutex_);
  uint32_t deepest = kNoSlot;
  const uint32_t count = prefix_locked(keys, now, deepest);
  if (touch && deepest != kNoSlot) {
    touch_slot(deepest);
  }
  return count;
}

std::vector<Reservation> BlockTable::resolve(std::span<const Key> keys, uint32_t now) {
  const std::lock_guard lock(mutex_);
  std::vector<Reservation> result(keys.size());
  uint32_t deepest = kNoSlot;
  constexpr size_t kAhead = 8;  // hides the cache misses of a large table
  for (size_t i = 0; i < keys.size(); ++i) {
    if (i + 2 * kAhead < keys.size()) {
      __builtin_prefetch(&buckets_[bucket_of(keys[i + 2 * kAhead])]);
    }
    if (i + kAhead < keys.size()) {
      if (const uint32_t ahead = buckets_[bucket_of(keys[i + kAhead])]; ahead != kNoSlot) {
        __builtin_prefetch(&keys_[ahead]);
      }
    }
    const uint32_t slot = find_live(keys[i], now);
    if (slot == kNoSlot) {
      result[i].status = Status::NotFound;
    } else {
      result[i] = {Status::Ok, slot, generation_[slot], rot_[slot]};
      deepest = slot;
    }
  }
  if (deepest != kNoSlot) {
    touch_slot(deepest);
  }
  return result;
}

// --- life of a block ---

std::vector<Reservation> BlockTable::reserve(std::span<const Key> keys, const Key* parent_key, uint32_t expiry,
                                             uint32_t now, std::vector<uint32_t>& removed) {
  const std::lock_guard lock(mutex_);
  std::vector<Reservation> result(keys.size());
  const auto drop_expired = [&](uint32_t slot) {
    if (slot != kNoSlot && expired(slot, now)) {
      remove_subtree(slot, removed);
      return kNoSlot;
    }
    return slot;
  };
  uint32_t parent = kNoSlot;
  if (parent_key != nullptr) {
    parent = drop_expired(find(*parent_key));
    if (parent == kNoSlot) {
      for (auto& reservation : result) {
        reservation.status = Status::Rejected;
      }
      return result;
    }
  }
  for (size_t i = 0; i < keys.size(); ++i) {
    if (const uint32_t slot = drop_expired(find(keys[i])); slot != kNoSlot) {
      result[i] = {Status::Exists, slot, generation_[slot], rot_[slot]};
      parent = slot;
      continue;
    }
    if (free_.empty()) {
      for (size_t rest = i; rest < keys.size(); ++rest) {
        result[rest].status = Status::NoSpace;
      }
      break;
    }
    const uint32_t slot = free_.back();
    free_.pop_back();
    state_[slot] = SlotState::Writing;
    ++writing_;
    ++generation_[slot];
    keys_[slot] = keys[i];
    rot_[slot] = static_cast<uint8_t>(ordinal_++ % devices_);
    const uint32_t bound = parent == kNoSlot ? 0 : expiry_[parent];
    expiry_[slot] = expiry == 0 ? bound : bound == 0 ? expiry : std::min(expiry, bound);
    last_use_[slot] = next_tick();
    insert_bucket(slot);
    link_child(parent, slot);
    result[i] = {Status::Ok, slot, generation_[slot], rot_[slot]};
    parent = slot;
  }
  return result;
}

Status BlockTable::publish(uint32_t slot) {
  const std::lock_guard lock(mutex_);
  if (state_[slot] == SlotState::Doomed) {
    state_[slot] = SlotState::Removed;
    --writing_;
    ++removed_;
    return Status::Rejected;
  }
  if (state_[slot] != SlotState::Writing) {
    return Status::BadState;
  }
  const uint32_t parent = tree_[slot].parent;
  if (parent != kNoSlot && state_[parent] != SlotState::Resident) {
    state_[slot] = SlotState::Ready;
    return Status::Ok;
  }
  std::vector<uint32_t> stack{slot};
  while (!stack.empty()) {
    const uint32_t at = stack.back();
    stack.pop_back();
    set_resident(at);
    for (uint32_t child = tree_[at].first_child; child != kNoSlot; child = tree_[child].next) {
      if (state_[child] == SlotState::Ready) {
        stack.push_back(child);
      }
    }
  }
  return Status::Ok;
}

void BlockTable::abort(uint32_t slot, std::vector<uint32_t>& removed) {
  const std::lock_guard lock(mutex_);
  if (state_[slot] == SlotState::Writing) {
    remove_subtree(slot, removed);  // leaves the slot itself Doomed
  }
  if (state_[slot] == SlotState::Doomed) {
    state_[slot] = SlotState::Removed;
    --writing_;
    ++removed_;
    removed.push_back(slot);
  }
}

std::vector<uint32_t> BlockTable::evict(uint64_t count) {
  const std::lock_guard lock(mutex_);
  std::vector<uint32_t> removed;
  while (removed.size() < count) {
    const uint32_t slot = policy_->victim();
    if (slot == kNoSlot) {
      break;
    }
    remove_subtree(slot, removed);
  }
  return removed;
}

void BlockTable::remove(const Key& key, uint32_t generation, std::vector<uint32_t>& removed) {
  const std::lock_guard lock(mutex_);
  const uint32_t slot = find(key);
  if (slot != kNoSlot && (generation == 0 || generation_[slot] == generation)) {
    remove_subtree(slot, removed);
  }
}

void BlockTable::sweep_expired(uint64_t count, uint32_t now, std::vector<uint32_t>& removed) {
  const std::lock_guard lock(mutex_);
  for (uint64_t i = 0; i < std::min<uint64_t>(count, slots()); ++i) {
    const auto slot = static_cast<uint32_t>(sweep_at_++ % slots());
    if (state_[slot] == SlotState::Resident && expired(slot, now)) {
      remove_subtree(slot, removed);
    }
  }
}

void BlockTable::clear(std::vector<uint32_t>& removed) {
  const std::lock_guard lock(mutex_);
  for (uint32_t slot = 0; slot < slots(); ++slot) {
    if (state_[slot] == SlotState::Resident || state_[slot] == SlotState::Ready || state_[slot] == SlotState::Writing) {
      remove_subtree(slot, removed);
    }
  }
}

void BlockTable::release(std::span<const uint32_t> slots_in) {
  const std::lock_guard lock(mutex_);
  for (const uint32_t slot : slots_in) {
    if (state_[slot] == SlotState::Removed) {
      state_[slot] = SlotState::Free;
      --removed_;
      free_.push_back(slot);
    }
  }
}

// --- pins ---

void BlockTable::pin_locked(uint32_t slot) {
  if (pins_[slot]++ == 0) {
    ++pinned_;
    if (state_[slot] == SlotState::Resident && tree_[slot].first_child == kNoSlot) {
      policy_->remove(slot);
    }
  }
}

void BlockTable::pin(uint32_t slot) {
  const std::lock_guard lock(mutex_);
  pin_locked(slot);
}

uint32_t BlockTable::pin_prefix(std::span<const Key> keys, uint32_t now, uint32_t& blocks) {
  const std::lock_guard lock(mutex_);
  uint32_t deepest = kNoSlot;
  blocks = prefix_locked(keys, now, deepest);
  if (deepest != kNoSlot) {
    touch_slot(deepest);
    pin_locked(deepest);
  }
  return deepest;
}

Status BlockTable::unpin(uint32_t slot, uint32_t generation) {
  const std::lock_guard lock(mutex_);
  if (slot >= slots() || generation_[slot] != generation || pins_[slot] == 0) {
    return Status::BadState;  // removed meanwhile: its pins went with it
  }
  if (--pins_[slot] == 0) {
    --pinned_;
    if (candidate(slot)) {
      policy_->add(slot, last_use_[slot]);
    }
  }
  return Status::Ok;
}

// --- views ---

SlotRecord BlockTable::record_of(uint32_t slot, RecordState state) const {
  const std::lock_guard lock(mutex_);
  SlotRecord record;
  record.state = static_cast<uint8_t>(state);
  record.slot = slot;
  record.generation = generation_[slot];
  if (state == RecordState::Resident) {
    record.rot = rot_[slot];
    record.key = keys_[slot];
    record.parent_slot = tree_[slot].parent;
    record.parent_generation = record.parent_slot == kNoSlot ? 0 : generation_[record.parent_slot];
    record.last_use = static_cast<uint32_t>(last_use_[slot] / 1000000);
    record.expiry = expiry_[slot];
  }
  return record;
}

std::vector<Key> BlockTable::keys_of(std::span<const uint32_t> slots) const {
  const std::lock_guard lock(mutex_);
  std::vector<Key> keys;
  keys.reserve(slots.size());
  for (const uint32_t slot : slots) {
    keys.push_back(keys_[slot]);
  }
  return keys;
}

std::vector<Lineage> BlockTable::lineage_of(std::span<const uint32_t> slots) const {
  const std::lock_guard lock(mutex_);
  std::vector<Lineage> found;
  found.reserve(slots.size());
  for (const uint32_t slot : slots) {
    Lineage& one = found.emplace_back(Lineage{0, position_[slot]});
    if (const uint32_t parent = tree_[slot].parent; parent != kNoSlot) {
      std::memcpy(&one.parent, keys_[parent].data(), sizeof(one.parent));
    }
  }
  return found;
}

SlotState BlockTable::state_of(uint32_t slot) const {
  const std::lock_guard lock(mutex_);
  return state_[slot];
}

TableCounts BlockTable::counts() const {
  const std::lock_guard lock(mutex_);
  return {resident_, writing_, free_.size(), removed_, pinned_};
}

uint64_t BlockTable::memory_bytes() const noexcept {
  constexpr uint64_t kPerSlot = sizeof(Key) + sizeof(Tree) + sizeof(uint64_t) + 2 * sizeof(uint32_t) +
                                2 * sizeof(uint32_t) + sizeof(SlotState) + sizeof(uint8_t) +
                                sizeof(uint32_t) /* free list */ + 2 * sizeof(uint32_t) + sizeof(uint64_t) /* LRU */;
  return slots() * kPerSlot + buckets_.size() * sizeof(uint32_t);
}

std::vector<uint32_t> BlockTable::resident_slots(uint32_t first, uint64_t limit) const {
  const std::lock_guard lock(mutex_);
  std::vector<uint32_t> result;
  for (uint64_t slot = first; slot < slots() && result.size() < limit; ++slot) {
    if (state_[slot] == SlotState::Resident) {
      result.push_back(static_cast<uint32_t>(slot));
    }
  }
  return result;
}

}  // namespace tutti
