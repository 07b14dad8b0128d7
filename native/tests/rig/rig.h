// What the cases of the rig share: the guest's drives, the bytes that belong where, the kernel's view of them.
//
// The program runs in the guest of scripts/rig, never on a machine with drives of its own: it takes only controllers
// whose serial number begins with "rig-nvme-". Each case runs in a process of its own, with the drives bound to the
// driver under test; `verify`, after the drives went back to the kernel, compares through the kernel what it wrote.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "tutti/nvme/binding.h"
#include "tutti/nvme/pci_device.h"
#include "tutti/nvme/queue_issuer.h"
#include "tutti/nvme/user_controller.h"

namespace rig {

namespace nvme = tutti::nvme;
using Clock = std::chrono::steady_clock;
using tutti::Status;

constexpr uint64_t kKiB = 1024;
constexpr uint64_t kMiB = kKiB * 1024;
constexpr uint64_t kBlock = 512;
constexpr uint64_t kPatternBytes = 8 * kMiB;  // what the kernel writes at the start of each drive; nobody else does
constexpr uint64_t kBadBlock = 2048;          // the block that drive `bad` can't read
constexpr int kSlowPerSecond = 20;            // commands that drive `slow` takes

// One emulated drive, as the kernel's driver described it before it was taken away.
struct Drive {
  std::string serial, model, address, block;  // "rig-nvme-0", ..., "0000:00:03.0", "nvme0n1"
  uint64_t bytes = 0;
  uint64_t block_bytes = 0;
  uint64_t largest_transfer = 0;
};

struct Context {
  nvme::UserDriver driver = nvme::UserDriver::Uio;
  std::vector<Drive> drives;
  std::string peer;  // the PCI address of the device with the shared BAR
  [[nodiscard]] const Drive& drive(const std::string& name) const;
};

struct Case {
  const char* name;
  std::function<void(const Context&)> run;
  std::function<void(const Context&)> verify;  // may be empty
  bool iommu_only = false;
};
std::vector<Case> transfer_cases();
std::vector<Case> fault_cases();
std::vector<Case> lifecycle_cases();
std::vector<Case> ring_cases();
std::vector<Case> executor_cases();
void binding_refusals(const Context& context);  // while the kernel has the drives

// A drive opened by the driver under test.
struct Session {
  std::shared_ptr<nvme::DmaSpace> space;
  std::shared_ptr<nvme::PciDevice> device;
  std::unique_ptr<nvme::UserController> controller;
};
Session open_drive(const Context& context, const std::string& name, nvme::ControllerOptions options = {},
                   std::shared_ptr<nvme::DmaSpace> space = nullptr);

inline Clock::time_point within(int ms) { return Clock::now() + std::chrono::milliseconds(ms); }

// The bytes of drive contents: a function of a salt and the place on the drive.
void fill(uint8_t* at, uint64_t bytes, uint64_t salt, uint64_t place);
bool matches(const uint8_t* at, uint64_t bytes, uint64_t salt, uint64_t place);
bool all_equal(const uint8_t* at, uint64_t bytes, uint8_t value);
uint64_t salt_of(const std::string& drive);  // of what the kernel wrote at its start

// Through the kernel's own driver, O_DIRECT.
void kernel_write(const Drive& drive, uint64_t salt, uint64_t place, uint64_t bytes);
void read_by_kernel(const Drive& drive, uint8_t* at, uint64_t place, uint64_t bytes);
void check_by_kernel(const Drive& drive, uint64_t salt, uint64_t place, uint64_t bytes);

// One command, which must end Ok.
void run_one(nvme::QueueIssuer& issuer, const nvme::Command& command);
std::string message_of(const std::function<void()>& body);  // of the exception; empty if there is none
bool contains(const std::string& text, const std::string& part);

}  // namespace rig
