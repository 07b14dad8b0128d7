// An I/O queue pair: where its parts lie. A CPU thread (queue_issuer.h) or an issuing warp of the I/O kernel
// (gio/issuer.h) drives it; the state of driving (tail, head, phase) belongs to the driver, and starts at tail 0,
// head 0, phase 1.
//
// Everything is owned by who made the pair: the userspace driver's controller (user_controller.h says how long it
// lasts), or the ring, for controllers that are software. Source: NVM Express Base 2.0c, 3.3; PCIe
// Transport 1.0c, 3.1.2 (doorbells).
#pragma once

#include <cstdint>
#include <type_traits>

#include "tutti/host_device.h"
#include "tutti/nvme/command.h"
#include "tutti/nvme/p2p_table.h"

namespace tutti::nvme {

struct QueuePair {
  SubmissionEntry* sq = nullptr;
  CompletionEntry* cq = nullptr;
  uint32_t* sq_doorbell = nullptr;
  uint32_t* cq_doorbell = nullptr;
  const ScratchPage* scratch = nullptr;  // one per entry
  uint32_t entries = 0;                  // at most entries - 1 commands are in flight
  uint32_t nsid = 0;
  uint32_t block_bytes = 0;       // of the namespace
  uint32_t largest_transfer = 0;  // bytes of one command
  uint16_t id = 0;
  DataPointer pointer = DataPointer::Prp;
};

static_assert(std::is_trivially_copyable_v<QueuePair>);  // it is copied to a GPU as it is

// Makes everything written so far visible to the device, then rings.
TUTTI_HD inline void ring_doorbell(uint32_t* doorbell, uint32_t value) noexcept {
#if defined(__aarch64__) && !defined(__CUDA_ARCH__)
  asm volatile("dmb oshst" ::: "memory");  // what C++ orders is ordered among processors, not for devices
#endif
  store_release(doorbell, value);
}

// The word of a completion that holds its phase. What the device wrote before it is visible after.
TUTTI_HD inline uint32_t load_completion(const CompletionEntry* entry) noexcept {
  const uint32_t word = load_acquire(&entry->status);
#if defined(__aarch64__) && !defined(__CUDA_ARCH__)
  asm volatile("dmb oshld" ::: "memory");
#endif
  return word;
}

// DPTR of a transfer by the command in `slot`, in the form that the pair uses.
TUTTI_HD inline DataDescriptor describe(const QueuePair& pair, const P2pRange& range, uint64_t address, uint32_t bytes,
                                        uint32_t slot) noexcept {
  return pair.pointer == DataPointer::Sgl ? sgl_of(range, address, bytes, pair.scratch[slot])
                                          : prp_of(range, address, bytes, pair.scratch[slot]);
}

// Whether one command can carry the transfer.
TUTTI_HD inline bool transferable(const QueuePair& pair, const P2pRange& range, uint64_t address,
                                  uint32_t blocks) noexcept {
  const uint64_t bytes = uint64_t{blocks} * pair.block_bytes;
  return blocks != 0 && bytes <= pair.largest_transfer && address % 4 == 0 &&
         bytes <= largest_described(pair.pointer, range.page_bytes) && inside(range, address, bytes);
}

}  // namespace tutti::nvme
