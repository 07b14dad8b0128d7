// A plan: one store or retrieve of many blocks, enqueued by one call and expanded into IOCBs by the executor as the
// ring has room.
//
// Items are (block, object) pairs. A read runs by groups of layers over all blocks. The first group is one layer, so
// that it is whole as early as possible; the groups then double, up to where the objects of one block that are
// neighbours on a device make one command of kRunBytes (the kernel merges what is submitted together): fewer commands,
// less processor time. A write runs block by block, so that a block's objects lie next to each other on the device in
// time as in space. Invariants: every item ends exactly once (object_done); a block's status is the first that wasn't
// Ok; `drained` means that no I/O of the plan can touch its memory any more; `done` is drained or expired.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "tutti/layout.h"
#include "tutti/ring.h"
#include "tutti/status.h"

namespace tutti {

using Clock = std::chrono::steady_clock;

// A larger command brings nothing more on the drives measured.
inline constexpr uint64_t kRunBytes = 512 << 10;

// An engine block that isn't there: the layers of its group are left out of a read.
inline constexpr uint32_t kNoEngineBlock = 0xFFFFFFFFU;

struct Item {
  uint32_t block;   // position in the plan
  uint32_t object;  // kv_factor*layer + kv
};

class Plan : public std::enable_shared_from_this<Plan> {
 public:
  // All vectors have one entry per block; `engine_blocks` has that many for each group of layers, group by group.
  // `deadline` of time_point::max() = none.
  Plan(Direction direction, const Layout& layout, std::vector<uint32_t> slots, std::vector<uint32_t> generations,
       std::vector<uint8_t> rots, std::vector<uint32_t> engine_blocks, Clock::time_point deadline);

  [[nodiscard]] uint32_t blocks() const noexcept { return static_cast<uint32_t>(slots.size()); }
  [[nodiscard]] uint64_t items() const noexcept { return static_cast<uint64_t>(blocks()) * objects; }
  [[nodiscard]] Item item(uint64_t index) const noexcept {
    if (direction == Direction::Read) {
      const Group group = groups_[index / blocks()];
      const uint64_t within = index - static_cast<uint64_t>(group.first) * blocks();
      return {static_cast<uint32_t>(within / group.width), static_cast<uint32_t>(group.first + within % group.width)};
    }
    return {static_cast<uint32_t>(index / objects), static_cast<uint32_t>(index % objects)};
  }
  [[nodiscard]] uint32_t engine_block(uint32_t group, uint32_t block) const noexcept {
    return engine_blocks[static_cast<size_t>(group) * blocks() + block];
  }
  // Checksum of an object: expected (read) or computed (write).
  uint64_t& sum(Item item) noexcept { return sums[static_cast<uint64_t>(item.block) * objects + item.object]; }

  // One item ended. Wakes waiters when it was the last of its layer or of the plan.
  void object_done(Item item, Status status) noexcept;
  // Ends a block before its items are issued: they are still counted by object_done.
  void fail_block(uint32_t block, Status status) noexcept;
  [[nodiscard]] Status block_status(uint32_t block) const noexcept {
    return static_cast<Status>(status_[block].load(std::memory_order_acquire));
  }
  // True when an item need not be issued any more.
  [[nodiscard]] bool skip(uint32_t block) const noexcept {
    return ended_.load(std::memory_order_acquire) || block_status(block) != Status::Ok;
  }

  // Marks what hasn't ended: Timeout (deadline) or Cancelled. Later completions change no status.
  void end_early(Status status) noexcept;
  [[nodiscard]] bool ended_early() const noexcept { return ended_.load(std::memory_order_acquire); }
  [[nodiscard]] bool drained() const noexcept { return items_left_.load(std::memory_order_acquire) == 0; }
  [[nodiscard]] bool done() const noexcept { return drained() || ended_early(); }
  [[nodiscard]] bool layer_done(uint32_t layer) const noexcept {
    return layer_left_[layer].load(std::memory_order_acquire) == 0 || ended_early();
  }

  // Wait until done / this layer is done / drained, or `until`; enforce the deadline themselves. Return whether it was
  // reached.
  bool wait(Clock::time_point until);
  bool wait_layer(uint32_t layer, Clock::time_point until);
  bool wait_drained(Clock::time_point until);

  [[nodiscard]] std::vector<uint8_t> statuses() const;
  [[nodiscard]] double seconds() const noexcept;  // submit to end; so far, while running

  const Direction direction;
  const uint32_t objects;
  const uint32_t kv_factor;
  const std::vector<uint32_t> slots;
  const std::vector<uint32_t> generations;
  const std::vector<uint8_t> rots;
  const std::vector<uint32_t> engine_blocks;
  const Clock::time_point deadline;
  uint64_t ticket = 0;         // of Executor::mark: what must be reached before the I/O begins
  std::vector<uint64_t> sums;  // blocks x objects

  // Expansion state, owned by the executor's feeding thread.
  uint32_t expected = 0;  // blocks whose checksums are known (reads)
  uint64_t next_item = 0;

 private:
  template <typename Reached>
  bool wait_for(Clock::time_point until, Reached reached);

  struct Group {
    uint32_t first;  // object
    uint32_t width;  // objects
  };
  static std::vector<Group> read_groups(const Layout& layout);

  const std::vector<Group> groups_;  // per object: the group that it is read with; empty for writes
  std::unique_ptr<std::atomic<uint8_t>[]> status_;
  std::unique_ptr<std::atomic<uint32_t>[]> layer_left_;
  std::atomic<uint64_t> items_left_;
  std::atomic<bool> ended_{false};
  const Clock::time_point submitted_ = Clock::now();
  std::atomic<int64_t> duration_ns_{-1};
  std::mutex mutex_;
  std::condition_variable changed_;
};

}  // namespace tutti
