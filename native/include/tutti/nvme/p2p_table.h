// The P2P memory-mapping table: where the pages of registered KV memory lie for a PCI device, as ready SGL entries.
//
// One 16-byte SGL Data Block descriptor per page (64 KiB for GPU memory, 4 KiB or more for host memory): 60 GiB of
// 64 KiB pages take 983,040 entries, 15 MiB. A transfer of whole pages needs no list of its own: its command carries
// one Last Segment descriptor that points at the table. PRP, which every drive takes, has a list page per queue slot
// that is filled from the same table: 4 KiB x depth instead of 4 KiB per 64 KiB of memory (3.75 GiB for 60 GiB).
// Source: Tutti (arXiv 2605.03375), P2P memory-mapping table with SGL; NVM Express Base 2.0c, 4.1.1 and 4.1.2.
#pragma once

#include <cstdint>

#include "tutti/nvme/command.h"

namespace tutti::nvme {

inline constexpr uint32_t kPrpPageBytes = 4096;
inline constexpr uint32_t kPrpEntries = kPrpPageBytes / 8;   // of one list page
inline constexpr uint32_t kSglEntries = kPrpPageBytes / 16;  // of one scratch segment

// A registered range of memory. Everything is owned by who made the table and must outlive every command.
struct P2pRange {
  uint64_t base = 0;                        // virtual address of page 0, a multiple of the page size
  const DataDescriptor* entries = nullptr;  // one per page
  uint64_t entries_address = 0;             // where the device sees the entries
  uint64_t pages = 0;
  uint32_t page_bytes = 0;
};

// The scratch page of one queue slot: kPrpPageBytes long, as its user writes it and as the device sees it.
struct ScratchPage {
  uint64_t* at = nullptr;
  uint64_t address = 0;
};

// Where the device sees a byte of the range.
TUTTI_HD inline uint64_t device_address(const P2pRange& range, uint64_t address) noexcept {
  const uint64_t offset = address - range.base;
  return range.entries[offset / range.page_bytes].lo + offset % range.page_bytes;
}

TUTTI_HD inline bool inside(const P2pRange& range, uint64_t address, uint64_t bytes) noexcept {
  return bytes != 0 && address >= range.base && address - range.base <= range.pages * range.page_bytes - bytes;
}

// Entries of one transfer: the pages that it touches.
TUTTI_HD inline uint64_t pages_touched(const P2pRange& range, uint64_t address, uint64_t bytes) noexcept {
  const uint64_t offset = address - range.base;
  return (offset + bytes - 1) / range.page_bytes - offset / range.page_bytes + 1;
}

// DPTR of a transfer as SGL. `bytes` > 0 inside the range and of at most kSglEntries pages. Writes `scratch` only when
// the transfer begins or ends inside a page and touches more than one.
TUTTI_HD inline DataDescriptor sgl_of(const P2pRange& range, uint64_t address, uint32_t bytes,
                                      ScratchPage scratch) noexcept {
  const uint64_t offset = address - range.base;
  const uint64_t first = offset / range.page_bytes;
  const uint64_t pages = pages_touched(range, address, bytes);
  if (pages == 1) {
    return sgl(kSglDataBlock, device_address(range, address), bytes);
  }
  if (offset % range.page_bytes == 0 && bytes % range.page_bytes == 0) {
    return sgl(kSglLastSegment, range.entries_address + first * sizeof(DataDescriptor),
               static_cast<uint32_t>(pages * sizeof(DataDescriptor)));
  }
  uint32_t left = bytes;
  uint64_t at = address;
  for (uint64_t i = 0; i < pages; ++i) {
    const auto room = static_cast<uint32_t>(range.page_bytes - (at - range.base) % range.page_bytes);
    const uint32_t part = left < room ? left : room;
    const DataDescriptor entry = sgl(kSglDataBlock, device_address(range, at), part);
    scratch.at[2 * i] = entry.lo;
    scratch.at[2 * i + 1] = entry.hi;
    at += part;
    left -= part;
  }
  return sgl(kSglLastSegment, scratch.address, static_cast<uint32_t>(pages * sizeof(DataDescriptor)));
}

// DPTR of a transfer as PRP: two entries, or one and a list in `scratch`. `address` is a multiple of 4; at most
// kPrpEntries + 1 pages of kPrpPageBytes are touched.
TUTTI_HD inline DataDescriptor prp_of(const P2pRange& range, uint64_t address, uint32_t bytes,
                                      ScratchPage scratch) noexcept {
  const uint64_t first = device_address(range, address);
  const auto room = static_cast<uint32_t>(kPrpPageBytes - first % kPrpPageBytes);
  if (bytes <= room) {
    return {first, 0};
  }
  uint64_t at = address + room;
  uint32_t left = bytes - room;
  if (left <= kPrpPageBytes) {
    return {first, device_address(range, at)};
  }
  for (uint32_t i = 0; left != 0; ++i) {
    scratch.at[i] = device_address(range, at);
    const uint32_t part = left < kPrpPageBytes ? left : kPrpPageBytes;
    at += part;
    left -= part;
  }
  return {first, scratch.address};
}

// The largest transfer that one scratch page can describe whatever its alignment, in bytes.
TUTTI_HD inline uint64_t largest_described(DataPointer pointer, uint32_t page_bytes) noexcept {
  return pointer == DataPointer::Prp ? uint64_t{kPrpEntries} * kPrpPageBytes : uint64_t{kSglEntries - 1} * page_bytes;
}

}  // namespace tutti::nvme
