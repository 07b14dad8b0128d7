// Memory that a PCI device may read and write, and the addresses by which the device knows it.
//
// A DmaSpace is one space of device addresses:
//   physical  uio_pci_generic: addresses are those of memory itself. Pages are pinned by registering them with an
//             io_uring, which unlike mlock() also forbids the kernel to move them, and which keeps them after the
//             process was killed until its files are closed: by then the kernel has switched the device's DMA off.
//   iommu     vfio-pci: addresses are chosen here and translated by the IOMMU; what isn't mapped can't be reached.
//   identity  addresses are the process's own: for controllers that are software.
//
// Invariants: a region's pages stay where they are while its DmaMemory lives; no two live regions of a space overlap in
// device addresses; memory is shared between forks, never copied on write under the device. Set-up throws
// std::runtime_error with what to do; nothing here is used in the path of the data.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "tutti/nvme/p2p_table.h"

namespace tutti {
class Uring;
}

namespace tutti::nvme {

inline constexpr uint64_t kBasePageBytes = 4096;
inline constexpr uint64_t kHugePageBytes = uint64_t{2} << 20;

// Huge2M: contiguous for the device over 2 MiB at least. Base4K: where no huge pages are set aside; under `physical`
// only 4 KiB are contiguous then.
enum class PageKind : uint8_t { Huge2M, Base4K };
enum class Addressing : uint8_t { Physical, Iommu, Identity };

// Memory and its device addresses: pages[i] is where the device sees at + i*page_bytes.
struct DmaRegion {
  uint8_t* at = nullptr;
  uint64_t bytes = 0;
  uint64_t page_bytes = 0;
  std::vector<uint64_t> pages;

  [[nodiscard]] uint64_t device(uint64_t offset) const noexcept {
    return pages[offset / page_bytes] + offset % page_bytes;
  }
  // Whether the device sees these bytes as one run.
  [[nodiscard]] bool contiguous(uint64_t offset, uint64_t length) const noexcept;
};

// A part of the BAR of another PCI device, mapped: a peer that a drive can read and write directly.
struct PeerWindow {
  uint8_t* at = nullptr;
  uint64_t bytes = 0;
  uint64_t physical = 0;
};

class DmaSpace;

// One region of a space; unmaps (and frees, if the space allocated it) when it goes. The device must be done with it.
class DmaMemory {
 public:
  DmaMemory() noexcept;
  ~DmaMemory();
  DmaMemory(DmaMemory&& other) noexcept;
  DmaMemory& operator=(DmaMemory&& other) noexcept;
  DmaMemory(const DmaMemory&) = delete;
  DmaMemory& operator=(const DmaMemory&) = delete;

  // Keeps the memory mapped, pinned and allocated for the life of the process: for a device that can't be stopped.
  void leak() noexcept;

  [[nodiscard]] const DmaRegion& region() const noexcept { return region_; }
  [[nodiscard]] uint8_t* at() const noexcept { return region_.at; }
  [[nodiscard]] uint64_t bytes() const noexcept { return region_.bytes; }
  [[nodiscard]] uint64_t device(uint64_t offset) const noexcept { return region_.device(offset); }

 private:
  friend class DmaSpace;
  void drop() noexcept;
  DmaRegion region_;
  std::shared_ptr<DmaSpace> space_;
  std::unique_ptr<Uring> pin_;
  bool mapped_ = false;  // in the IOMMU
  bool owned_ = false;   // the memory itself is ours
};

class DmaSpace : public std::enable_shared_from_this<DmaSpace> {
 public:
  static std::shared_ptr<DmaSpace> physical();
  // Opens a VFIO container. Memory can be mapped once the first device is attached.
  static std::shared_ptr<DmaSpace> iommu();
  static std::shared_ptr<DmaSpace> identity();
  ~DmaSpace();
  DmaSpace(const DmaSpace&) = delete;
  DmaSpace& operator=(const DmaSpace&) = delete;

  [[nodiscard]] Addressing addressing() const noexcept { return addressing_; }

  // Zeroed memory, rounded up to whole pages.
  DmaMemory allocate(uint64_t bytes, PageKind kind);
  // Memory of the caller, which stays the caller's and must stay mapped: page-aligned, whole pages. Under `iommu` the
  // device address may be chosen.
  DmaMemory map(void* at, uint64_t bytes, std::optional<uint64_t> address = std::nullopt);
  // A window of another device's BAR, for transfers from device to device.
  DmaMemory map_peer(const PeerWindow& window);

  // Adds a VFIO group (its open file) to the container. Called by PciDevice.
  void attach_group(int group, const std::string& name);

 private:
  explicit DmaSpace(Addressing addressing) : addressing_(addressing) {}
  friend class DmaMemory;
  DmaMemory take(void* at, uint64_t bytes, uint64_t page_bytes, bool owned, std::optional<uint64_t> address);
  void map_iova(uint64_t iova, void* at, uint64_t bytes);
  uint64_t reserve_iova(uint64_t bytes, uint64_t align, std::optional<uint64_t> wanted);
  void unmap_iova(uint64_t iova, uint64_t bytes) noexcept;
  void read_iova_ranges();

  Addressing addressing_;
  int container_ = -1;
  bool attached_ = false;
  std::mutex mutex_;                                  // guards taken_
  std::map<uint64_t, uint64_t> taken_;                // start -> end of mapped device addresses
  std::vector<std::pair<uint64_t, uint64_t>> valid_;  // what the IOMMU can translate, first and last
};

// The P2P memory-mapping table of a region, with its entries in memory that the device can read.
class MemoryTable {
 public:
  // `page_bytes` divides the runs that the device sees as contiguous: 64 KiB for a BAR or huge pages, 4 KiB for others.
  MemoryTable(const std::shared_ptr<DmaSpace>& space, const DmaRegion& memory, uint32_t page_bytes);
  [[nodiscard]] const P2pRange& range() const noexcept { return range_; }

 private:
  DmaMemory entries_;
  P2pRange range_;
};

}  // namespace tutti::nvme
