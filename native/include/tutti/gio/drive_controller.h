// NVMe drives behind the I/O kernel's queue pairs: the issuing warps write into the drives' own queues and ring the
// doorbells in their BAR0, and no thread of the host is in between. What the host still does is here: it has the pairs
// made, maps memory for the drives, and answers quarantine.
//
// Device d of the ring is drive d, and each issuing warp has a pair of every drive. Invariants: abort() names a pair
// only when its drive can't touch memory any more, because the pair was deleted or the drive was reset; the memory of
// pairs stays mapped as long as this object lives, since warps may still poll it. So it goes after the last kernel, and
// before the memory that was mapped is freed. Not thread-safe: one thread uses it.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "tutti/nvme/dma_space.h"
#include "tutti/nvme/user_controller.h"

namespace tutti::gio {

class DriveController {
 public:
  // Started drives, whose memory is in `space`; none has another user. Throws std::runtime_error where a drive doesn't
  // grant `issuers` queue pairs.
  DriveController(std::vector<std::unique_ptr<nvme::UserController>> drives, std::shared_ptr<nvme::DmaSpace> space,
                  uint32_t issuers);

  // Opens drives that are bound to one of the two drivers, all to the same. Throws std::runtime_error.
  static std::unique_ptr<DriveController> open(const std::vector<std::string>& addresses,
                                               const nvme::ControllerOptions& options, uint32_t issuers);

  // For QueueOptions::pairs, with pairs_per_issuer = the number of drives.
  [[nodiscard]] const std::vector<nvme::QueuePair>& pairs() const noexcept { return pairs_; }

  // Lets the drives read and write memory of the caller, whole pages of 4 KiB, or of another device. The range is for
  // Queue::register_slots and register_range, and is valid while this object lives. Throws std::runtime_error.
  const nvme::P2pRange& map(void* at, uint64_t bytes);
  const nvme::P2pRange& map_peer(const nvme::PeerWindow& window);

  // Returns the pairs whose commands can't touch memory any more, to be retired: this one, which is deleted, or all of
  // its drive, where the drive had to be reset. Throws std::runtime_error where even that can't be had: then nothing
  // may be retired. Bounded by the controller's time limits.
  std::vector<uint32_t> abort(uint32_t pair);

  [[nodiscard]] uint32_t drives() const noexcept { return static_cast<uint32_t>(drives_.size()); }
  [[nodiscard]] nvme::UserController& drive(uint32_t device) noexcept { return *drives_[device]; }

 private:
  struct Mapped {
    nvme::DmaMemory memory;
    std::unique_ptr<nvme::MemoryTable> table;
  };
  const nvme::P2pRange& add(nvme::DmaMemory memory);

  const std::shared_ptr<nvme::DmaSpace> space_;
  std::deque<Mapped> mapped_;
  std::vector<nvme::DmaMemory> deleted_;  // of pairs that warps may still poll
  std::vector<nvme::QueuePair> pairs_;
  std::vector<std::unique_ptr<nvme::UserController>> drives_;  // the last member: stopped before memory is unmapped
};

}  // namespace tutti::gio
