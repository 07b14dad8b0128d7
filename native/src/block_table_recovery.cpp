// The block table's way back after a restart: records in slot order become trees, from the roots down.
#include <algorithm>

#include "tutti/block_table.h"

namespace tutti {

bool BlockTable::load(const SlotRecord& record) {
  const std::lock_guard lock(mutex_);
  const uint32_t slot = record.slot;
  generation_[slot] = std::max(generation_[slot], record.generation);
  if (record.state != static_cast<uint8_t>(RecordState::Resident)) {
    return true;
  }
  if (loading_parent_generation_.empty()) {
    loading_parent_generation_.assign(slots(), 0);
  }
  if (find(record.key) != kNoSlot) {
    return false;
  }
  keys_[slot] = record.key;
  rot_[slot] = static_cast<uint8_t>(record.rot % devices_);
  expiry_[slot] = record.expiry;
  last_use_[slot] = static_cast<uint64_t>(record.last_use) * 1000000;
  state_[slot] = SlotState::Ready;
  tree_[slot].parent = record.parent_slot;
  loading_parent_generation_[slot] = record.parent_generation;
  insert_bucket(slot);
  return true;
}

std::vector<uint32_t> BlockTable::finish_load(uint32_t now, uint64_t& orphans, uint64_t& expired_count) {
  const std::lock_guard lock(mutex_);
  std::vector<uint32_t> stack;
  for (uint32_t slot = 0; slot < slots(); ++slot) {
    if (state_[slot] != SlotState::Ready) {
      continue;
    }
    const uint32_t parent = tree_[slot].parent;
    tree_[slot].parent = kNoSlot;
    if (parent == kNoSlot) {
      position_[slot] = 0;
      stack.push_back(slot);
    } else if (parent < slots() && parent != slot && generation_[parent] == loading_parent_generation_[slot] &&
               (state_[parent] == SlotState::Ready || state_[parent] == SlotState::Resident)) {
      link_child(parent, slot);
    }
  }
  while (!stack.empty()) {  // from the roots down: what isn't reached has no resident parent
    const uint32_t slot = stack.back();
    stack.pop_back();
    if (expired(slot, now)) {
      ++expired_count;
      continue;
    }
    state_[slot] = SlotState::Resident;
    ++resident_;
    for (uint32_t child = tree_[slot].first_child; child != kNoSlot; child = tree_[child].next) {
      position_[child] = position_[slot] + 1;
      stack.push_back(child);
    }
  }
  std::vector<uint32_t> dropped;
  for (uint32_t slot = 0; slot < slots(); ++slot) {
    if (state_[slot] == SlotState::Ready && tree_[slot].parent != kNoSlot &&
        state_[tree_[slot].parent] == SlotState::Resident) {
      unlink_child(slot);  // an expired block below a live one
    }
  }
  for (uint32_t slot = 0; slot < slots(); ++slot) {
    if (state_[slot] != SlotState::Ready) {
      continue;
    }
    ++orphans;
    erase_bucket(slot);
    tree_[slot] = Tree{};
    state_[slot] = SlotState::Removed;
    ++removed_;
    dropped.push_back(slot);
  }
  orphans -= expired_count;
  std::vector<uint32_t> leaves;
  free_.clear();
  for (uint64_t at = slots(); at > 0; --at) {
    const auto slot = static_cast<uint32_t>(at - 1);
    tick_ = std::max(tick_, last_use_[slot]);
    if (state_[slot] == SlotState::Free) {
      free_.push_back(slot);
    } else if (candidate(slot)) {
      leaves.push_back(slot);
    }
  }
  std::sort(leaves.begin(), leaves.end(), [this](uint32_t a, uint32_t b) { return last_use_[a] < last_use_[b]; });
  policy_ = std::make_unique<LruPolicy>(slots());
  policy_->load(leaves, last_use_);
  ordinal_ = resident_;
  std::vector<uint32_t>().swap(loading_parent_generation_);
  return dropped;
}

}  // namespace tutti
