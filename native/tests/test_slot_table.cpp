// Records on a real file: every flipped bit of a record or of its checksums is noticed.
#include <fcntl.h>
#include <unistd.h>

#include <cstdlib>
#include <vector>

#include "check.h"
#include "tutti/slot_table.h"

using namespace tutti;

namespace {

Status one(const SlotTable& table, uint32_t slot, uint32_t generation, uint32_t first, std::vector<uint64_t>& out) {
  Status status = Status::BadState;
  table.read_sums(slot, {&generation, 1}, first, static_cast<uint32_t>(out.size()), out, {&status, 1});
  return status;
}

}  // namespace

int main() {
  char path[] = "/tmp/tutti-slot-table-XXXXXX";
  const int fd = mkstemp(path);
  CHECK(fd >= 0 && unlink(path) == 0);
  constexpr uint32_t kSums = 6;
  const SlotTable table(fd, 4096, 65536, 16, kSums, 0xABCDEF);
  CHECK(ftruncate(fd, 131072) == 0);
  const std::vector<uint64_t> sums{1, 2, 3, 4, 5, 6};
  CHECK(table.write_sums(3, 0, sums) == Status::Ok);
  SlotRecord record;
  record.state = static_cast<uint8_t>(RecordState::Resident);
  record.slot = 3;
  record.generation = 7;
  CHECK(table.write_record(record) == Status::Ok);

  std::vector<uint64_t> out(2);
  CHECK(one(table, 3, 7, 2, out) == Status::Ok && out[0] == 3 && out[1] == 4);
  CHECK(one(table, 3, 6, 2, out) == Status::Stale);
  // Several slots at once: each has its own answer.
  const std::vector<uint32_t> generations{9, 7, 1};
  std::vector<uint64_t> several(6);
  std::vector<Status> statuses(3);
  table.read_sums(2, generations, 2, 2, several, statuses);
  CHECK(statuses == (std::vector{Status::Stale, Status::Ok, Status::Stale}) && several[2] == 3 && several[3] == 4);
  CHECK(one(table, 4, 0, 2, out) == Status::Stale);

  const auto flip = [&](uint64_t bit) {
    unsigned char byte = 0;
    CHECK(pread(fd, &byte, 1, static_cast<off_t>(bit / 8)) == 1);
    byte = static_cast<unsigned char>(byte ^ (1U << (bit % 8)));
    CHECK(pwrite(fd, &byte, 1, static_cast<off_t>(bit / 8)) == 1);
  };
  const uint64_t record_bit = 8ULL * (4096 + 3 * 128);
  for (uint64_t bit = record_bit; bit < record_bit + 128 * 8; ++bit) {
    flip(bit);
    CHECK(one(table, 3, 7, 2, out) == Status::ChecksumError);
    uint32_t seen = 0;
    const ScanCounts counts = table.scan([&](const SlotRecord&) { ++seen; });
    CHECK(seen == 0 && counts.bad_check == 1 && counts.never_used == 15);
    flip(bit);
  }
  const uint64_t sums_bit = 8ULL * (65536 + 3 * kSums * 8);
  for (uint64_t bit = sums_bit; bit < sums_bit + kSums * 64; ++bit) {
    flip(bit);
    CHECK(one(table, 3, 7, 2, out) == Status::ChecksumError);
    flip(bit);
  }
  CHECK(one(table, 3, 7, 0, out) == Status::Ok && out[0] == 1);

  // A record copied to another slot, or from another pool, is not believed.
  SlotRecord copy;
  CHECK(table.read_record(3, copy) == Status::Ok);
  CHECK(pwrite(fd, &copy, sizeof(copy), 4096 + 5 * 128) == static_cast<ssize_t>(sizeof(copy)));
  const SlotTable other(fd, 4096, 65536, 16, kSums, 0x123456);
  const auto ignore = [](const SlotRecord&) {};
  CHECK(table.scan(ignore).wrong_slot == 1 && table.scan(ignore).resident == 1);
  CHECK(other.scan(ignore).foreign_pool == 1);
  close(fd);
  return 0;
}
