#include "tutti/nvme/pci_device.h"

#include <linux/vfio.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <sstream>

#include "sysfs.h"

namespace tutti::nvme {
namespace {

constexpr off_t kCommandRegister = 4;
constexpr uint16_t kMemoryDecoding = 1U << 1;
constexpr uint16_t kBusMaster = 1U << 2;
constexpr uint16_t kGone = 0xFFFF;  // what reads of a device that left the bus give

std::string folder_of(const std::string& address) { return "/sys/bus/pci/devices/" + address; }

// First and last address of BAR `bar`, from sysfs' table of resources.
std::pair<uint64_t, uint64_t> resource(const std::string& folder, uint32_t bar) {
  std::istringstream lines(read_text(folder + "/resource"));
  std::string line;
  for (uint32_t i = 0; i <= bar; ++i) {
    std::getline(lines, line);
  }
  std::istringstream fields(line);
  uint64_t first = 0;
  uint64_t last = 0;
  fields >> std::hex >> first >> last;
  return {first, last};
}

}  // namespace

UserDriver user_driver(const std::string& address) {
  const std::string folder = folder_of(address);
  if (!std::filesystem::exists(folder)) {
    fail(address + ": no such PCI function (addresses look like 0000:04:00.0; lspci -D lists them)");
  }
  const std::string bound = link_name(folder + "/driver");
  for (const auto driver : {UserDriver::Uio, UserDriver::Vfio}) {
    if (bound == driver_name(driver)) {
      return driver;
    }
  }
  fail(address + " is bound to " + (bound.empty() ? "no driver" : bound) +
       ": give it to the tier first, by binding it to vfio-pci or uio_pci_generic");
}

std::shared_ptr<DmaSpace> dma_space_for(UserDriver driver) {
  return driver == UserDriver::Uio ? DmaSpace::physical() : DmaSpace::iommu();
}

PciDevice::PciDevice(const std::string& address, std::shared_ptr<DmaSpace> space)
    : address_(address), folder_(folder_of(address)), driver_(user_driver(address)), space_(std::move(space)) {
  if ((driver_ == UserDriver::Uio) != (space_->addressing() == Addressing::Physical)) {
    fail(address_ + " is bound to " + driver_name(driver_) + ", the memory belongs to the other driver's addresses");
  }
  try {
    config_ = open((folder_ + "/config").c_str(), O_RDWR | O_CLOEXEC);
    if (config_ < 0) {
      fail_errno("opening " + folder_ + "/config", errno, "run it as root");
    }
    if (flock(config_, LOCK_EX | LOCK_NB) != 0) {
      fail_errno(address_ + " is in use by another process", errno);
    }
    driver_ == UserDriver::Uio ? open_uio() : open_vfio();
    set_bus_master(false);
  } catch (...) {
    close_files();
    throw;
  }
}

PciDevice::~PciDevice() {
  try {
    set_bus_master(false);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "tutti: closing %s: %s; the kernel switches it off as well\n", address_.c_str(), error.what());
  }
  close_files();
}

void PciDevice::close_files() noexcept {
  if (registers_ != nullptr) {
    munmap(registers_, register_bytes_);
    registers_ = nullptr;
  }
  for (int* fd : {&uio_, &device_, &group_, &config_}) {  // the lock goes last
    if (*fd >= 0) {
      close(std::exchange(*fd, -1));
    }
  }
}

void PciDevice::map_registers(int fd, uint64_t offset, uint64_t bytes) {
  if (bytes < 0x2000) {
    fail(address_ + ": BAR 0 has " + std::to_string(bytes) + " bytes, too few for NVMe's registers and doorbells");
  }
  void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, static_cast<off_t>(offset));
  if (at == MAP_FAILED) {
    fail_errno("mapping the registers of " + address_, errno,
               "a kernel in lockdown mode refuses this under uio_pci_generic; use vfio-pci");
  }
  registers_ = static_cast<uint8_t*>(at);
  register_bytes_ = bytes;
}

void PciDevice::open_uio() {
  // Behind an IOMMU that translates, physical addresses lead nowhere, or worse, into another device's mappings.
  if (const std::string type = read_text(folder_ + "/iommu_group/type"); !type.empty() && type != "identity") {
    fail(address_ + " is behind an IOMMU that translates (group type " + type + "): bind it to vfio-pci");
  }
  std::error_code error;
  std::string node;
  for (const auto& entry : std::filesystem::directory_iterator(folder_ + "/uio", error)) {
    node = "/dev/" + entry.path().filename().string();
  }
  uio_ = node.empty() ? -1 : open(node.c_str(), O_RDWR | O_CLOEXEC);
  if (uio_ < 0) {
    fail_errno("opening the uio file of " + address_ + " (" + node + ")", node.empty() ? ENOENT : errno,
               "run it as root");
  }
  const Fd bar(open((folder_ + "/resource0").c_str(), O_RDWR | O_SYNC | O_CLOEXEC));
  struct stat facts{};
  if (bar.get() < 0 || fstat(bar.get(), &facts) != 0) {
    fail_errno("opening " + folder_ + "/resource0", errno);
  }
  write_command(static_cast<uint16_t>(read_command() | kMemoryDecoding));
  map_registers(bar.get(), 0, static_cast<uint64_t>(facts.st_size));
}

void PciDevice::open_vfio() {
  const std::string number = link_name(folder_ + "/iommu_group");
  if (number.empty()) {
    fail(address_ + " has no IOMMU group: switch the IOMMU on, or use uio_pci_generic");
  }
  const std::string node = "/dev/vfio/" + number;
  group_ = open(node.c_str(), O_RDWR | O_CLOEXEC);
  if (group_ < 0) {
    fail_errno("opening " + node, errno,
               errno == EBUSY ? "a device of this IOMMU group is open already" : "give this user access to it");
  }
  vfio_group_status status{};
  status.argsz = sizeof(status);
  if (ioctl(group_, VFIO_GROUP_GET_STATUS, &status) != 0 || (status.flags & VFIO_GROUP_FLAGS_VIABLE) == 0) {
    fail("IOMMU group " + number + " of " + address_ +
         " isn't viable: every device in it must be bound to vfio-pci or to no driver (ls /sys/kernel/iommu_groups/" +
         number + "/devices)");
  }
  space_->attach_group(group_, address_);
  device_ = ioctl(group_, VFIO_GROUP_GET_DEVICE_FD, address_.c_str());
  if (device_ < 0) {
    fail_errno("opening " + address_ + " through VFIO", errno);
  }
  vfio_device_info info{};
  info.argsz = sizeof(info);
  vfio_region_info bar{};
  bar.argsz = sizeof(bar);
  bar.index = VFIO_PCI_BAR0_REGION_INDEX;
  vfio_region_info config{};
  config.argsz = sizeof(config);
  config.index = VFIO_PCI_CONFIG_REGION_INDEX;
  if (ioctl(device_, VFIO_DEVICE_GET_INFO, &info) != 0 || ioctl(device_, VFIO_DEVICE_GET_REGION_INFO, &bar) != 0 ||
      ioctl(device_, VFIO_DEVICE_GET_REGION_INFO, &config) != 0) {
    fail_errno("asking VFIO about the regions of " + address_, errno);
  }
  device_flags_ = info.flags;
  config_offset_ = config.offset;
  write_command(static_cast<uint16_t>(read_command() | kMemoryDecoding));
  map_registers(device_, bar.offset, bar.size);
}

uint16_t PciDevice::read_command() const {
  uint16_t value = 0;
  const bool vfio = driver_ == UserDriver::Vfio;
  if (pread(vfio ? device_ : config_, &value, sizeof(value), static_cast<off_t>(config_offset_) + kCommandRegister) !=
      sizeof(value)) {
    fail_errno("reading the PCI command register of " + address_, errno);
  }
  return value;
}

void PciDevice::write_command(uint16_t value) {
  const bool vfio = driver_ == UserDriver::Vfio;
  if (pwrite(vfio ? device_ : config_, &value, sizeof(value), static_cast<off_t>(config_offset_) + kCommandRegister) !=
      sizeof(value)) {
    fail_errno("writing the PCI command register of " + address_, errno);
  }
}

void PciDevice::set_bus_master(bool on) {
  const uint16_t before = read_command();
  const auto wanted = static_cast<uint16_t>(on ? before | kBusMaster : before & ~kBusMaster);
  if (wanted != before) {
    write_command(wanted);
  }
  // Read back: the answer comes after every write to memory that the device had sent.
  const uint16_t after = read_command();
  if (after == kGone && !on) {
    return;  // off the bus: it reaches nothing
  }
  if (after == kGone || ((after & kBusMaster) != 0) != on) {
    fail(address_ + ": the PCI command register doesn't keep bus mastering " + (on ? "on" : "off"));
  }
}

bool PciDevice::reset_function() noexcept {
  if (driver_ == UserDriver::Vfio) {
    return (device_flags_ & VFIO_DEVICE_FLAGS_RESET) != 0 && ioctl(device_, VFIO_DEVICE_RESET) == 0;
  }
  return try_write_text(folder_ + "/reset", "1") == 0;
}

PeerBar::PeerBar(const std::string& address, uint32_t bar) {
  const std::string folder = folder_of(address);
  const auto [first, last] = resource(folder, bar);
  if (first == 0 || last <= first) {
    fail(address + " has no BAR " + std::to_string(bar));
  }
  if (link_name(folder + "/driver").empty() && read_text(folder + "/enable") == "0") {
    write_text(folder + "/enable", "1");  // a function without a driver doesn't answer to its addresses
  }
  const std::string path = folder + "/resource" + std::to_string(bar);
  const Fd file(open(path.c_str(), O_RDWR | O_SYNC | O_CLOEXEC));
  if (file.get() < 0) {
    fail_errno("opening " + path, errno);
  }
  void* at = mmap(nullptr, last - first + 1, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
  if (at == MAP_FAILED) {
    fail_errno("mapping " + path, errno);
  }
  window_ = {static_cast<uint8_t*>(at), last - first + 1, first};
}

PeerBar::~PeerBar() { munmap(window_.at, window_.bytes); }

}  // namespace tutti::nvme
