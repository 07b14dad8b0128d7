// The moving warps of a thread block: they take segments of objects, in order of publication, copy them between bounce
// slots and the engine's memory, and add up the checksum on the way. The same source runs on GPU warps and on threads.
//
// The checksum (checksum.h) is linear before its mix, so each segment contributes its own sum times a power of the
// radix, in any order. Invariants: a segment is moved by exactly one warp; a job is marked done after all its bytes are
// written; whoever has seen `done` sees those bytes.
#pragma once

#include "tutti/checksum.h"
#include "tutti/gio/shared.h"

namespace tutti::gio {

TUTTI_HD inline uint32_t segments_of(uint32_t payload_bytes) noexcept {
  return (payload_bytes + kSegmentBytes - 1) / kSegmentBytes;
}

TUTTI_HD inline uint64_t radix_power(uint32_t exponent) noexcept {
  uint64_t result = 1;
  for (uint64_t base = kChecksumRadix; exponent != 0; exponent >>= 1, base *= base) {
    if ((exponent & 1) != 0) {
      result *= base;
    }
  }
  return result;
}

// Called by one lane of an issuing warp. The job's memory may not be touched until it is done.
TUTTI_HD inline void publish_job(BlockShared& shared, uint32_t job, uint64_t source, uint64_t target,
                                 uint32_t segments) noexcept {
  Job& entry = shared.jobs[job];
  entry.source = source;
  entry.target = target;
  entry.sum = 0;
  entry.remaining = segments;
  entry.done = 0;
  const uint32_t turn = block_fetch_add(&shared.published, 1);
  block_store(&shared.order[turn % kJobs], (turn + 1) << 10 | job);
}

// Body of a moving warp. Returns when every issuing warp of the block has left.
template <typename Warp>
TUTTI_HD void run_mover(Warp& warp, BlockShared& shared, uint32_t payload_bytes) noexcept {
  const uint32_t segments = segments_of(payload_bytes);
  for (;;) {
    const uint64_t ticket = warp.once([&] { return block_fetch_add(&shared.ticket, uint64_t{1}); });
    const auto turn = static_cast<uint32_t>(ticket / segments);
    const auto segment = static_cast<uint32_t>(ticket % segments);
    uint32_t entry = 0;
    for (;;) {
      // Order matters: whoever reads 0 issuers has seen every publication before.
      const uint32_t issuers = warp.once([&] { return block_load(&shared.issuers); });
      entry = warp.once([&] { return block_load(&shared.order[turn % kJobs]); });
      if (entry >> 10 == ((turn + 1) & 0x3FFFFF)) {
        break;
      }
      if (issuers == 0) {
        return;
      }
      warp.pause();
    }
    Job& job = shared.jobs[entry & 1023];
    const uint32_t offset = segment * kSegmentBytes;
    const uint32_t left = payload_bytes - offset;
    const uint32_t bytes = left < kSegmentBytes ? left : kSegmentBytes;
    const uint64_t sum = warp.move(job.source + offset, job.target == 0 ? 0 : job.target + offset, bytes);
    warp.single([&] {
      block_fetch_add(&job.sum, sum * radix_power(segments - 1 - segment));
      if (block_fetch_add(&job.remaining, ~uint32_t{0}) == 1) {
        block_store(&job.done, 1);
      }
    });
  }
}

}  // namespace tutti::gio
