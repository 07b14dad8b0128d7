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

// Moves all ranges with `threads` rings of `depth` and returns the seconds it took, ring set-up apart. Throws
// std::system_error for the first range that fails or comes up short.
double raw_transfer(std::span<const RawRange> ranges, uint64_t bytes, bool write, uint32_t threads, uint32_t depth,
                    const std::vector<std::pair<uint64_t, uint64_t>>& memory);

}  // namespace tutti
