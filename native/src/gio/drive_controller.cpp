#include "tutti/gio/drive_controller.h"

#include <cstdio>
#include <stdexcept>

#include "tutti/gio/shared.h"
#include "tutti/nvme/pci_device.h"

namespace tutti::gio {
namespace {

constexpr uint32_t kLargePage = 64 << 10;  // of tables, where the drive sees memory as one run

}  // namespace

DriveController::DriveController(std::vector<std::unique_ptr<nvme::UserController>> drives,
                                 std::shared_ptr<nvme::DmaSpace> space, uint32_t issuers)
    : space_(std::move(space)), drives_(std::move(drives)) {
  for (uint32_t issuer = 0; issuer < issuers; ++issuer) {
    for (const auto& drive : drives_) {
      pairs_.push_back(drive->create_queue_pair(kQueueEntries));
    }
  }
}

std::unique_ptr<DriveController> DriveController::open(const std::vector<std::string>& addresses,
                                                       const nvme::ControllerOptions& options, uint32_t issuers) {
  if (addresses.empty()) {
    throw std::runtime_error("no drives were named");
  }
  const nvme::UserDriver driver = nvme::user_driver(addresses[0]);
  const auto space = nvme::dma_space_for(driver);
  std::vector<std::unique_ptr<nvme::UserController>> drives;
  for (const auto& address : addresses) {
    if (nvme::user_driver(address) != driver) {
      throw std::runtime_error(address + " isn't bound to " + nvme::driver_name(driver) + ", as " + addresses[0] +
                               " is: drives that share memory share the driver");
    }
    drives.push_back(
        std::make_unique<nvme::UserController>(std::make_shared<nvme::PciDevice>(address, space), space, options));
  }
  return std::make_unique<DriveController>(std::move(drives), space, issuers);
}

const nvme::P2pRange& DriveController::map(void* at, uint64_t bytes) { return add(space_->map(at, bytes)); }
const nvme::P2pRange& DriveController::map_peer(const nvme::PeerWindow& window) {
  return add(space_->map_peer(window));
}

const nvme::P2pRange& DriveController::add(nvme::DmaMemory memory) {
  const nvme::DmaRegion& region = memory.region();
  const bool large = region.page_bytes % kLargePage == 0 && region.bytes % kLargePage == 0;
  Mapped mapped;
  mapped.table = std::make_unique<nvme::MemoryTable>(space_, region,
                                                     large ? kLargePage : static_cast<uint32_t>(nvme::kBasePageBytes));
  mapped.memory = std::move(memory);
  mapped_.push_back(std::move(mapped));
  return mapped_.back().table->range();
}

std::vector<uint32_t> DriveController::abort(uint32_t pair) {
  const uint32_t device = pair % drives();
  nvme::UserController& drive = *drives_[device];
  if (drive.health() == nvme::Health::Ready) {
    try {
      deleted_.push_back(drive.delete_queue_pair(pairs_[pair].id));
      return {pair};
    } catch (const std::runtime_error& error) {
      // It doesn't answer, or not as it should: then none of its pairs is to be trusted.
      std::fprintf(stderr, "tutti: a queue pair can't be deleted, so its drive is reset: %s\n", error.what());
    }
  }
  drive.stop();
  std::vector<uint32_t> all;
  for (uint32_t other = device; other < pairs_.size(); other += drives()) {
    all.push_back(other);
  }
  return all;
}

}  // namespace tutti::gio
