// What the driver of an NVMe controller needs of the function it sits on: a PCI device, or a model of one in software.
#pragma once

#include <cstdint>
#include <string>

namespace tutti::nvme {

class ControllerPort {
 public:
  virtual ~ControllerPort() = default;
  // How messages name the device.
  [[nodiscard]] virtual const std::string& name() const noexcept = 0;
  // The controller's registers and doorbells, mapped uncached.
  [[nodiscard]] virtual uint8_t* registers() const noexcept = 0;
  [[nodiscard]] virtual uint64_t register_bytes() const noexcept = 0;
  // Whether the device may read and write memory. Once switched off, nothing arrives any more.
  virtual void set_bus_master(bool on) = 0;
  // Resets the function from outside, for a controller that doesn't answer. False where the device has no such reset.
  virtual bool reset_function() noexcept = 0;
};

}  // namespace tutti::nvme
