// A PCI function owned by this process: its registers, its DMA switch, its reset, by uio_pci_generic or vfio-pci.
//
// Invariants: a function has one owner at a time (a lock on its configuration space, taken before anything else is
// opened: closing a uio file switches the device's DMA off for whoever uses it); opening never switches DMA on; closing
// switches it off, and so does the kernel when the process is killed. Which kernel driver is bound is never changed
// here: see binding.h.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "tutti/nvme/controller_port.h"
#include "tutti/nvme/dma_space.h"

namespace tutti::nvme {

enum class UserDriver : uint8_t { Uio, Vfio };
inline constexpr const char* driver_name(UserDriver driver) noexcept {
  return driver == UserDriver::Uio ? "uio_pci_generic" : "vfio-pci";
}

// Which of the two drivers is bound to the function ("0000:04:00.0"). Throws, and says what to do, if neither is.
UserDriver user_driver(const std::string& address);

// The space of device addresses that goes with a driver. Under vfio-pci one space serves all devices that share memory.
std::shared_ptr<DmaSpace> dma_space_for(UserDriver driver);

class PciDevice final : public ControllerPort {
 public:
  PciDevice(const std::string& address, std::shared_ptr<DmaSpace> space);
  ~PciDevice() override;
  PciDevice(const PciDevice&) = delete;
  PciDevice& operator=(const PciDevice&) = delete;

  [[nodiscard]] const std::string& name() const noexcept override { return address_; }
  [[nodiscard]] uint8_t* registers() const noexcept override { return registers_; }
  [[nodiscard]] uint64_t register_bytes() const noexcept override { return register_bytes_; }
  void set_bus_master(bool on) override;
  bool reset_function() noexcept override;

  [[nodiscard]] UserDriver driver() const noexcept { return driver_; }

 private:
  void open_uio();
  void open_vfio();
  void map_registers(int fd, uint64_t offset, uint64_t bytes);
  [[nodiscard]] uint16_t read_command() const;
  void write_command(uint16_t value);
  void close_files() noexcept;

  std::string address_;
  std::string folder_;  // in sysfs
  UserDriver driver_;
  std::shared_ptr<DmaSpace> space_;
  uint8_t* registers_ = nullptr;
  uint64_t register_bytes_ = 0;
  int config_ = -1;             // sysfs' config; holds the lock
  int uio_ = -1;                // /dev/uioN: open as long as DMA may run
  int group_ = -1;              // /dev/vfio/N
  int device_ = -1;             // the VFIO device
  uint64_t config_offset_ = 0;  // of the configuration space in device_
  uint32_t device_flags_ = 0;   // of VFIO
};

// A BAR of another PCI function, mapped through sysfs; memory decoding is switched on. It needs no driver of ours.
class PeerBar {
 public:
  PeerBar(const std::string& address, uint32_t bar);
  ~PeerBar();
  PeerBar(const PeerBar&) = delete;
  PeerBar& operator=(const PeerBar&) = delete;
  [[nodiscard]] const PeerWindow& window() const noexcept { return window_; }

 private:
  PeerWindow window_;
};

}  // namespace tutti::nvme
