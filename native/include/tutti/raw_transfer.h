// The baseline of the benchmarks: plain io_uring with O_DIRECT over a list of ranges, without plans, checksums, records
// or layers.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace tutti {

// One range: `bytes` at `offset` of file `fd`, from or to `address`.
struct RawRange {
  int fd;
  uint64_t offset;
  uint64_t address;
};

struct RawSeconds {
  double wall;
  double processor;  // of the whole process
};

// Moves all ranges with `threads` rings of `depth` (0 = by pread and pwrite instead), each taking kRawBatch ranges in
// turn and submitting them together; returns what that took, ring set-up and pinning of `memory` apart. Throws
// std::system_error for the first range that fails or comes up short.
inline constexpr uint32_t kRawBatch = 8;
RawSeconds raw_transfer(std::span<const RawRange> ranges, uint64_t bytes, bool write, uint32_t threads, uint32_t depth,
                        const std::vector<std::pair<uint64_t, uint64_t>>& memory);

}  // namespace tutti
