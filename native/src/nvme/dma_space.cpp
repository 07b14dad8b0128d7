#include "tutti/nvme/dma_space.h"

#include <fcntl.h>
#include <linux/vfio.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>

#include "sysfs.h"
#include "tutti/uring.h"

namespace tutti::nvme {
namespace {

constexpr uint64_t kPinBytes = uint64_t{1} << 30;  // the largest buffer that io_uring registers
// Device addresses are given out from here: above all memory that 32-bit addresses and the interrupt window could mean.
constexpr uint64_t kFirstIova = uint64_t{1} << 32;

std::string hex(uint64_t value) {
  char text[32];
  std::snprintf(text, sizeof(text), "0x%llx", static_cast<unsigned long long>(value));
  return text;
}

uint64_t round_up(uint64_t value, uint64_t to) { return (value + to - 1) / to * to; }

std::unique_ptr<Uring> pin_pages(void* at, uint64_t bytes) {
  std::unique_ptr<Uring> ring;
  try {
    ring = std::make_unique<Uring>(1);
  } catch (const std::exception& error) {
    fail(std::string("pinning memory for a drive under uio_pci_generic needs io_uring: ") + error.what() +
         "; allow it, or use vfio-pci");
  }
  std::vector<std::pair<uint64_t, uint64_t>> pieces;
  const auto first = reinterpret_cast<uint64_t>(at);
  for (uint64_t offset = 0; offset < bytes; offset += kPinBytes) {
    pieces.emplace_back(first + offset, first + std::min(bytes, offset + kPinBytes));
  }
  if (const int result = ring->register_buffers(pieces); result < 0) {
    fail_errno("pinning " + std::to_string(bytes) + " bytes", -result,
               "raise the locked-memory limit (ulimit -l); the memory must be anonymous, shared or of huge pages");
  }
  return ring;
}

// Physical addresses of pages that are pinned already; an address read before pinning could be out of date.
std::vector<uint64_t> physical_pages(const uint8_t* at, uint64_t bytes, uint64_t page_bytes) {
  const Fd pagemap(open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC));
  if (pagemap.get() < 0) {
    fail_errno("opening /proc/self/pagemap", errno);
  }
  std::vector<uint64_t> pages;
  pages.reserve(bytes / page_bytes);
  for (uint64_t offset = 0; offset < bytes; offset += page_bytes) {
    uint64_t entry = 0;
    const auto place = static_cast<off_t>(reinterpret_cast<uint64_t>(at + offset) / kBasePageBytes * sizeof(entry));
    if (pread(pagemap.get(), &entry, sizeof(entry), place) != sizeof(entry) || entry >> 63 == 0) {
      fail("/proc/self/pagemap: the page at " + hex(reinterpret_cast<uint64_t>(at + offset)) + " isn't present");
    }
    const uint64_t frame = entry & ((uint64_t{1} << 55) - 1);
    if (frame == 0) {
      fail("/proc/self/pagemap hides physical addresses: uio_pci_generic needs CAP_SYS_ADMIN; use vfio-pci without it");
    }
    pages.push_back(frame * kBasePageBytes);
  }
  return pages;
}

}  // namespace

bool DmaRegion::contiguous(uint64_t offset, uint64_t length) const noexcept {
  if (length == 0 || offset + length > bytes) {
    return false;
  }
  for (uint64_t page = offset / page_bytes + 1; page <= (offset + length - 1) / page_bytes; ++page) {
    if (pages[page] != pages[page - 1] + page_bytes) {
      return false;
    }
  }
  return true;
}

// --- DmaMemory ---

DmaMemory::DmaMemory() noexcept = default;

DmaMemory::~DmaMemory() { drop(); }

DmaMemory::DmaMemory(DmaMemory&& other) noexcept
    : region_(std::exchange(other.region_, {})),
      space_(std::move(other.space_)),
      pin_(std::move(other.pin_)),
      mapped_(std::exchange(other.mapped_, false)),
      owned_(std::exchange(other.owned_, false)) {}

DmaMemory& DmaMemory::operator=(DmaMemory&& other) noexcept {
  if (this != &other) {
    drop();
    region_ = std::exchange(other.region_, {});
    space_ = std::move(other.space_);
    pin_ = std::move(other.pin_);
    mapped_ = std::exchange(other.mapped_, false);
    owned_ = std::exchange(other.owned_, false);
  }
  return *this;
}

void DmaMemory::drop() noexcept {
  if (mapped_) {
    space_->unmap_iova(region_.pages[0], region_.bytes);
  }
  pin_.reset();
  if (owned_) {
    munmap(region_.at, region_.bytes);
  }
  mapped_ = owned_ = false;
  region_ = {};
  space_.reset();
}

void DmaMemory::leak() noexcept {
  auto kept = std::make_unique<DmaMemory>(std::move(*this));
  [[maybe_unused]] const DmaMemory* const forever = kept.release();
}

// --- DmaSpace ---

std::shared_ptr<DmaSpace> DmaSpace::physical() { return std::shared_ptr<DmaSpace>(new DmaSpace(Addressing::Physical)); }
std::shared_ptr<DmaSpace> DmaSpace::identity() { return std::shared_ptr<DmaSpace>(new DmaSpace(Addressing::Identity)); }

std::shared_ptr<DmaSpace> DmaSpace::iommu() {
  std::shared_ptr<DmaSpace> space(new DmaSpace(Addressing::Iommu));
  space->container_ = open("/dev/vfio/vfio", O_RDWR | O_CLOEXEC);
  if (space->container_ < 0) {
    fail_errno("opening /dev/vfio/vfio", errno, "load vfio-pci (modprobe vfio-pci) and run with access to /dev/vfio");
  }
  if (ioctl(space->container_, VFIO_GET_API_VERSION) != VFIO_API_VERSION ||
      ioctl(space->container_, VFIO_CHECK_EXTENSION, VFIO_TYPE1v2_IOMMU) != 1) {
    fail("/dev/vfio/vfio: no type 1 (version 2) IOMMU; load vfio_iommu_type1");
  }
  return space;
}

DmaSpace::~DmaSpace() {
  if (container_ >= 0) {
    close(container_);
  }
}

void DmaSpace::attach_group(int group, const std::string& name) {
  if (ioctl(group, VFIO_GROUP_SET_CONTAINER, &container_) != 0) {
    fail_errno("adding " + name + " to the VFIO container", errno, "another process may hold the group");
  }
  if (!attached_) {
    if (ioctl(container_, VFIO_SET_IOMMU, VFIO_TYPE1v2_IOMMU) != 0) {
      fail_errno("VFIO_SET_IOMMU for " + name, errno, "EPERM means: no interrupt remapping on this machine");
    }
    attached_ = true;
    read_iova_ranges();
  }
}

void DmaSpace::read_iova_ranges() {
  vfio_iommu_type1_info info{};
  info.argsz = sizeof(info);
  if (ioctl(container_, VFIO_IOMMU_GET_INFO, &info) != 0) {
    fail_errno("VFIO_IOMMU_GET_INFO", errno);
  }
  std::vector<uint64_t> buffer((info.argsz + 7) / 8);  // of 8-byte words: the structures' alignment
  auto* bytes = reinterpret_cast<uint8_t*>(buffer.data());
  info.argsz = static_cast<uint32_t>(buffer.size() * 8);
  std::memcpy(bytes, &info, sizeof(info));
  if (ioctl(container_, VFIO_IOMMU_GET_INFO, bytes) != 0) {
    fail_errno("VFIO_IOMMU_GET_INFO", errno);
  }
  std::memcpy(&info, bytes, sizeof(info));
  uint64_t at = (info.flags & VFIO_IOMMU_INFO_CAPS) != 0 ? info.cap_offset : 0;
  while (at != 0 && at + sizeof(vfio_info_cap_header) <= buffer.size() * 8) {
    vfio_info_cap_header header{};
    std::memcpy(&header, bytes + at, sizeof(header));
    if (header.id == VFIO_IOMMU_TYPE1_INFO_CAP_IOVA_RANGE) {
      uint32_t ranges = 0;
      std::memcpy(&ranges, bytes + at + offsetof(vfio_iommu_type1_info_cap_iova_range, nr_iovas), sizeof(ranges));
      for (uint32_t i = 0; i < ranges; ++i) {
        vfio_iova_range range{};
        std::memcpy(&range,
                    bytes + at + offsetof(vfio_iommu_type1_info_cap_iova_range, iova_ranges) + i * sizeof(range),
                    sizeof(range));
        valid_.emplace_back(range.start, range.end);
      }
    }
    at = header.next;
  }
  if (valid_.empty()) {  // kernels before 5.4 don't say; 39 bits are the least that any IOMMU of today translates
    valid_.emplace_back(kFirstIova, (uint64_t{1} << 39) - 1);
  }
}

uint64_t DmaSpace::reserve_iova(uint64_t bytes, uint64_t align, std::optional<uint64_t> wanted) {
  const std::lock_guard lock(mutex_);
  const auto in_the_way = [&](uint64_t start) {  // the end of a region that overlaps, or 0
    const auto next = taken_.upper_bound(start + bytes - 1);
    const uint64_t end = next == taken_.begin() ? 0 : std::prev(next)->second;
    return end > start ? end : 0;
  };
  for (const auto& [first, last] : valid_) {
    uint64_t start = wanted ? *wanted : round_up(std::max(first, kFirstIova), align);
    while (start >= first && start <= last && last - start >= bytes - 1) {
      const uint64_t blocked = in_the_way(start);
      if (blocked == 0) {
        taken_.emplace(start, start + bytes);
        return start;
      }
      if (wanted) {
        fail("device addresses from " + hex(*wanted) + " on are taken up to " + hex(blocked));
      }
      start = round_up(blocked, align);
    }
  }
  fail("no room for " + std::to_string(bytes) + " bytes in the IOMMU's address space" +
       (wanted ? " at " + hex(*wanted) : std::string()));
}

void DmaSpace::map_iova(uint64_t iova, void* at, uint64_t bytes) {
  vfio_iommu_type1_dma_map request{};
  request.argsz = sizeof(request);
  request.flags = VFIO_DMA_MAP_FLAG_READ | VFIO_DMA_MAP_FLAG_WRITE;
  request.vaddr = reinterpret_cast<uint64_t>(at);
  request.iova = iova;
  request.size = bytes;
  if (ioctl(container_, VFIO_IOMMU_MAP_DMA, &request) != 0) {
    const int error = errno;
    const std::lock_guard lock(mutex_);
    taken_.erase(iova);
    fail_errno("mapping " + std::to_string(bytes) + " bytes at " + hex(iova) + " for DMA", error,
               error == ENOMEM ? "raise the locked-memory limit (ulimit -l)" : "");
  }
}

void DmaSpace::unmap_iova(uint64_t iova, uint64_t bytes) noexcept {
  vfio_iommu_type1_dma_unmap request{};
  request.argsz = sizeof(request);
  request.iova = iova;
  request.size = bytes;
  // Fails only when the container has lost its last device, and its mappings with it.
  (void)ioctl(container_, VFIO_IOMMU_UNMAP_DMA, &request);
  const std::lock_guard lock(mutex_);
  taken_.erase(iova);
}

DmaMemory DmaSpace::take(void* at, uint64_t bytes, uint64_t page_bytes, bool owned, std::optional<uint64_t> address) {
  DmaMemory memory;
  memory.space_ = shared_from_this();
  memory.owned_ = owned;
  memory.region_.at = static_cast<uint8_t*>(at);
  memory.region_.bytes = bytes;
  switch (addressing_) {
    case Addressing::Physical:
      memory.pin_ = pin_pages(at, bytes);
      memory.region_.page_bytes = page_bytes;
      memory.region_.pages = physical_pages(memory.region_.at, bytes, page_bytes);
      break;
    case Addressing::Iommu: {
      if (!attached_) {
        fail("memory can be mapped once a device is attached to the VFIO container: open the device first");
      }
      memory.region_.page_bytes = bytes;
      const uint64_t iova = reserve_iova(bytes, bytes % kHugePageBytes == 0 ? kHugePageBytes : kBasePageBytes, address);
      map_iova(iova, at, bytes);
      memory.region_.pages = {iova};
      memory.mapped_ = true;
      break;
    }
    case Addressing::Identity:
      memory.region_.page_bytes = page_bytes;
      for (uint64_t offset = 0; offset < bytes; offset += page_bytes) {
        memory.region_.pages.push_back(reinterpret_cast<uint64_t>(at) + offset);
      }
      break;
  }
  return memory;
}

DmaMemory DmaSpace::allocate(uint64_t bytes, PageKind kind) {
  const bool huge = kind == PageKind::Huge2M;
  const uint64_t page_bytes = huge ? kHugePageBytes : kBasePageBytes;
  bytes = round_up(std::max<uint64_t>(bytes, 1), page_bytes);
  int flags = MAP_SHARED | MAP_ANONYMOUS | MAP_POPULATE;
  if (huge) {
    flags |= MAP_HUGETLB | (21 << MAP_HUGE_SHIFT);
  }
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (at == MAP_FAILED) {
    fail_errno("allocating " + std::to_string(bytes) + " bytes" + (huge ? " of 2 MiB pages" : ""), errno,
               huge ? "set huge pages aside: sysctl vm.nr_hugepages=N" : "");
  }
  std::memset(at, 0, bytes);
  return take(at, bytes, page_bytes, true, std::nullopt);  // owns the pages from its first line on, also if it throws
}

DmaMemory DmaSpace::map(void* at, uint64_t bytes, std::optional<uint64_t> address) {
  if (bytes == 0 || bytes % kBasePageBytes != 0 || reinterpret_cast<uint64_t>(at) % kBasePageBytes != 0) {
    fail("memory for DMA begins and ends at multiples of 4096: " + hex(reinterpret_cast<uint64_t>(at)) + ", " +
         std::to_string(bytes) + " bytes");
  }
  if (address && addressing_ != Addressing::Iommu) {
    fail("a device address can be chosen under vfio-pci only");
  }
  return take(at, bytes, kBasePageBytes, false, address);
}

DmaMemory DmaSpace::map_peer(const PeerWindow& window) {
  if (addressing_ == Addressing::Iommu) {
    return map(window.at, window.bytes);
  }
  DmaMemory memory;
  memory.space_ = shared_from_this();
  memory.region_ = {window.at, window.bytes, window.bytes, {window.physical}};
  return memory;
}

// --- MemoryTable ---

MemoryTable::MemoryTable(const std::shared_ptr<DmaSpace>& space, const DmaRegion& memory, uint32_t page_bytes) {
  if (page_bytes < kBasePageBytes || (page_bytes & (page_bytes - 1)) != 0 || memory.bytes % page_bytes != 0) {
    fail("a table's pages are a power of two of at least 4096 bytes that divides the memory: " +
         std::to_string(page_bytes) + " for " + std::to_string(memory.bytes));
  }
  const uint64_t pages = memory.bytes / page_bytes;
  const uint64_t bytes = pages * sizeof(DataDescriptor);
  const bool scattered = space->addressing() == Addressing::Physical && bytes > kBasePageBytes;
  entries_ = space->allocate(bytes, scattered ? PageKind::Huge2M : PageKind::Base4K);
  if (!entries_.region().contiguous(0, bytes)) {
    fail("the table of " + std::to_string(memory.bytes) + " bytes needs " + std::to_string(bytes) +
         " contiguous bytes, which uio_pci_generic can't promise beyond 2 MiB: register the memory in parts of at "
         "most " +
         std::to_string(kHugePageBytes / sizeof(DataDescriptor) * page_bytes) + " bytes, or use vfio-pci");
  }
  auto* entries = reinterpret_cast<DataDescriptor*>(entries_.at());
  for (uint64_t i = 0; i < pages; ++i) {
    if (!memory.contiguous(i * page_bytes, page_bytes)) {
      fail("the device sees page " + std::to_string(i) + " of " + std::to_string(page_bytes) +
           " bytes in pieces: use smaller table pages");
    }
    entries[i] = sgl(kSglDataBlock, memory.device(i * page_bytes), page_bytes);
  }
  range_ = {reinterpret_cast<uint64_t>(memory.at), entries, entries_.device(0), pages, page_bytes};
}

}  // namespace tutti::nvme
