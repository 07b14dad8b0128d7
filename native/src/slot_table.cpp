#include "tutti/slot_table.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "tutti/checksum.h"

namespace tutti {
namespace {

uint64_t record_check(const SlotRecord& record) noexcept {
  return multilinear64(&record, sizeof(SlotRecord) - sizeof(record.check));
}

bool never_written(const SlotRecord& record) noexcept {
  static constexpr std::array<uint8_t, sizeof(SlotRecord)> kZeros{};
  return std::memcmp(&record, kZeros.data(), sizeof(record)) == 0;
}

}  // namespace

Status SlotTable::read_at(void* to, uint64_t bytes, uint64_t offset) const noexcept {
  auto* at = static_cast<char*>(to);
  while (bytes != 0) {
    const ssize_t got = pread(fd_, at, bytes, static_cast<off_t>(offset));
    if (got < 0 && errno == EINTR) {
      continue;
    }
    if (got <= 0) {
      return got == 0 ? Status::ShortIo : status_of_result(-errno, bytes);
    }
    at += got;
    offset += static_cast<uint64_t>(got);
    bytes -= static_cast<uint64_t>(got);
  }
  return Status::Ok;
}

void SlotTable::will_read(uint64_t offset, uint64_t bytes) const noexcept {
  posix_fadvise(fd_, static_cast<off_t>(offset), static_cast<off_t>(bytes), POSIX_FADV_WILLNEED);
}

Status SlotTable::write_at(const void* from, uint64_t bytes, uint64_t offset) const noexcept {
  const auto* at = static_cast<const char*>(from);
  while (bytes != 0) {
    const ssize_t put = pwrite(fd_, at, bytes, static_cast<off_t>(offset));
    if (put < 0 && errno == EINTR) {
      continue;
    }
    if (put <= 0) {
      return put == 0 ? Status::ShortIo : status_of_result(-errno, bytes);
    }
    at += put;
    offset += static_cast<uint64_t>(put);
    bytes -= static_cast<uint64_t>(put);
  }
  return Status::Ok;
}

Status SlotTable::write_sums(uint32_t slot, uint32_t first, std::span<const uint64_t> sums) const noexcept {
  const uint64_t at = static_cast<uint64_t>(slot) * sums_per_slot_ + first;
  return write_at(sums.data(), sums.size_bytes(), sums_offset_ + at * sizeof(uint64_t));
}

Status SlotTable::checked_sums(const SlotRecord& record, uint64_t slot, uint32_t generation, uint32_t first,
                               std::span<const uint64_t> all, std::span<uint64_t> out) const noexcept {
  ScanCounts counts;
  if (!valid(record, slot, counts)) {
    return counts.bad_check + counts.wrong_slot + counts.foreign_pool != 0 ? Status::ChecksumError : Status::Stale;
  }
  if (record.state != static_cast<uint8_t>(RecordState::Resident) || record.generation != generation) {
    return Status::Stale;
  }
  if (multilinear64(all.data(), all.size_bytes()) != record.sums_check) {
    return Status::ChecksumError;
  }
  std::copy_n(all.begin() + first, out.size(), out.begin());
  return Status::Ok;
}

void SlotTable::read_sums(uint32_t slot, std::span<const uint32_t> generations, uint32_t first, uint32_t count,
                          std::span<uint64_t> out, std::span<Status> statuses) const {
  const size_t slots = generations.size();
  const uint64_t bytes = sums_per_slot_ * sizeof(uint64_t);
  std::vector<SlotRecord> records(slots);
  std::vector<uint64_t> all(slots * sums_per_slot_);
  Status read = read_at(records.data(), slots * sizeof(SlotRecord), records_offset_ + slot * sizeof(SlotRecord));
  if (read == Status::Ok) {
    read = read_at(all.data(), slots * bytes, sums_offset_ + slot * bytes);
  }
  if (read != Status::Ok && slots > 1) {  // one that can't be read fails alone
    for (size_t i = 0; i < slots; ++i) {
      read_sums(slot + static_cast<uint32_t>(i), generations.subspan(i, 1), first, count, out.subspan(i * count, count),
                statuses.subspan(i, 1));
    }
    return;
  }
  for (size_t i = 0; i < slots; ++i) {
    statuses[i] = read != Status::Ok ? read
                                     : checked_sums(records[i], slot + i, generations[i], first,
                                                    std::span(all).subspan(i * sums_per_slot_, sums_per_slot_),
                                                    out.subspan(i * count, count));
  }
}

Status SlotTable::write_record(SlotRecord record) const {
  record.magic = kRecordMagic;
  record.pool = pool_;
  if (record.state == static_cast<uint8_t>(RecordState::Resident)) {
    std::vector<uint64_t> all(sums_per_slot_);
    const uint64_t bytes = sums_per_slot_ * sizeof(uint64_t);
    if (const Status status = read_at(all.data(), bytes, sums_offset_ + record.slot * bytes); status != Status::Ok) {
      return status;
    }
    record.sums_check = multilinear64(all.data(), bytes);
  }
  return rewrite(record);
}

Status SlotTable::rewrite(SlotRecord record) const noexcept {
  record.check = record_check(record);
  return write_at(&record, sizeof(record), records_offset_ + static_cast<uint64_t>(record.slot) * sizeof(record));
}

Status SlotTable::read_record(uint32_t slot, SlotRecord& record) const noexcept {
  return read_at(&record, sizeof(record), records_offset_ + static_cast<uint64_t>(slot) * sizeof(record));
}

bool SlotTable::valid(const SlotRecord& record, uint64_t slot, ScanCounts& counts) const noexcept {
  if (record.magic != kRecordMagic && never_written(record)) {
    ++counts.never_used;
    return false;
  }
  if (record.magic != kRecordMagic || record.check != record_check(record)) {
    ++counts.bad_check;
    return false;
  }
  if (record.slot != slot) {
    ++counts.wrong_slot;
    return false;
  }
  if (record.pool != pool_) {
    ++counts.foreign_pool;
    return false;
  }
  ++(record.state == static_cast<uint8_t>(RecordState::Resident) ? counts.resident : counts.free);
  return true;
}

}  // namespace tutti
