// The slot table: the durable index. One 128-byte record per slot, and beside it the checksums of the slot's objects.
// Both lie on device 0 (docs/format.md). Records are written through the page cache, so that they survive the process;
// `flush` makes them survive a power loss.
//
// Invariants: a record is written only after the slot's bytes and checksums; a record that fails its own check, names
// another pool or another slot is treated as free and reported; a slot's record is overwritten as free before the slot
// is given out again.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "tutti/status.h"

namespace tutti {

inline constexpr uint32_t kRecordMagic = 0x31525354;  // "TSR1"
inline constexpr uint32_t kNoSlot = 0xFFFFFFFFU;
using Key = std::array<uint8_t, 32>;

struct SlotRecord {
  uint32_t magic = kRecordMagic;
  uint8_t state = 0;  // 1 = free, 2 = resident
  uint8_t rot = 0;
  uint16_t reserved0 = 0;
  uint32_t slot = 0;
  uint32_t generation = 0;
  Key key{};
  uint32_t parent_slot = kNoSlot;
  uint32_t parent_generation = 0;
  uint32_t created = 0;   // seconds since 1970
  uint32_t last_use = 0;  // seconds since 1970
  uint32_t expiry = 0;    // seconds since 1970; 0 = never
  uint32_t reserved1 = 0;
  uint64_t sums_check = 0;  // multilinear64 of the slot's object checksums
  uint64_t pool = 0;        // first 8 bytes of the pool's id
  std::array<uint8_t, 32> reserved2{};
  uint64_t check = 0;  // multilinear64 of the 120 bytes before
};
static_assert(sizeof(SlotRecord) == 128);

enum class RecordState : uint8_t { Free = 1, Resident = 2 };

struct ScanCounts {
  uint64_t read = 0;
  uint64_t never_used = 0;
  uint64_t free = 0;
  uint64_t resident = 0;
  uint64_t bad_check = 0;
  uint64_t wrong_slot = 0;
  uint64_t foreign_pool = 0;
  uint64_t unreadable = 0;
};

class SlotTable {
 public:
  // `fd` stays the caller's. `sums_per_slot` = world * objects.
  SlotTable(int fd, uint64_t records_offset, uint64_t sums_offset, uint64_t slots, uint32_t sums_per_slot,
            uint64_t pool)
      : fd_(fd),
        records_offset_(records_offset),
        sums_offset_(sums_offset),
        slots_(slots),
        sums_per_slot_(sums_per_slot),
        pool_(pool) {}

  [[nodiscard]] uint64_t slots() const noexcept { return slots_; }
  [[nodiscard]] uint32_t sums_per_slot() const noexcept { return sums_per_slot_; }

  // Writes the checksums of `count` objects of a slot, beginning with object `first` (rank * objects).
  Status write_sums(uint32_t slot, uint32_t first, std::span<const uint64_t> sums) const noexcept;
  // Reads `count` checksums, from `first` on, of each of the slots from `slot` on, one per generation given: all of a
  // slot's are verified against its record's sums_check before they are copied to `out` (slots x count). Statuses:
  // Stale when the record isn't resident with that generation.
  void read_sums(uint32_t slot, std::span<const uint32_t> generations, uint32_t first, uint32_t count,
                 std::span<uint64_t> out, std::span<Status> statuses) const;
  // Fills in magic, pool, sums_check (from the sums on the device) and check, then writes.
  Status write_record(SlotRecord record) const;
  Status read_record(uint32_t slot, SlotRecord& record) const noexcept;

  // Calls visit(record) for each valid resident or free record, in slot order.
  template <typename Visit>
  ScanCounts scan(Visit visit) const;

  // Calls last_use(slot, generation) for each valid resident record and rewrites those whose last use is older.
  template <typename LastUse>
  Status update_last_use(LastUse last_use) const;

  // Writes a record whose sums_check is right already.
  Status rewrite(SlotRecord record) const noexcept;

  [[nodiscard]] bool valid(const SlotRecord& record, uint64_t slot, ScanCounts& counts) const noexcept;

 private:
  Status checked_sums(const SlotRecord& record, uint64_t slot, uint32_t generation, uint32_t first,
                      std::span<const uint64_t> all, std::span<uint64_t> out) const noexcept;
  Status read_at(void* to, uint64_t bytes, uint64_t offset) const noexcept;
  void will_read(uint64_t offset, uint64_t bytes) const noexcept;
  Status write_at(const void* from, uint64_t bytes, uint64_t offset) const noexcept;

  int fd_;
  uint64_t records_offset_;
  uint64_t sums_offset_;
  uint64_t slots_;
  uint32_t sums_per_slot_;
  uint64_t pool_;
};

template <typename LastUse>
Status SlotTable::update_last_use(LastUse last_use) const {
  Status first_error = Status::Ok;
  scan([&](SlotRecord record) {
    if (record.state != static_cast<uint8_t>(RecordState::Resident)) {
      return;
    }
    if (const uint32_t used = last_use(record.slot, record.generation); used > record.last_use) {
      record.last_use = used;
      const Status status = rewrite(record);
      first_error = first_error == Status::Ok ? status : first_error;
    }
  });
  return first_error;
}

template <typename Visit>
ScanCounts SlotTable::scan(Visit visit) const {
  constexpr uint64_t kBatch = 32768;  // 4 MiB
  ScanCounts counts;
  std::vector<SlotRecord> batch;
  will_read(records_offset_, kBatch * sizeof(SlotRecord));
  for (uint64_t first = 0; first < slots_; first += kBatch) {
    batch.resize(std::min(kBatch, slots_ - first));
    will_read(records_offset_ + (first + kBatch) * sizeof(SlotRecord), kBatch * sizeof(SlotRecord));
    if (read_at(batch.data(), batch.size() * sizeof(SlotRecord), records_offset_ + first * sizeof(SlotRecord)) !=
        Status::Ok) {
      counts.unreadable += batch.size();
      continue;
    }
    for (uint64_t i = 0; i < batch.size(); ++i) {
      ++counts.read;
      if (valid(batch[i], first + i, counts)) {
        visit(batch[i]);
      }
    }
  }
  return counts;
}

}  // namespace tutti
