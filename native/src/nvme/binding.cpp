#include "tutti/nvme/binding.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <filesystem>
#include <map>
#include <set>
#include <sstream>
#include <thread>

#include "sysfs.h"

namespace tutti::nvme {
namespace {

namespace fs = std::filesystem;
using Names = std::vector<std::string>;

constexpr const char* kNvmeClass = "0x0108";  // mass storage, non-volatile memory
constexpr const char* kBridgeClass = "0x0604";
constexpr auto kPatience = std::chrono::seconds(10);  // for the kernel's driver to find the namespaces

fs::path folder_of(const std::string& address, const SystemPaths& paths) {
  return fs::path(paths.sys) / "bus/pci/devices" / address;
}
fs::path block_folder(const SystemPaths& paths) { return fs::path(paths.sys) / "class/block"; }

Names children(const fs::path& folder) {
  Names names;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    names.push_back(entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

Names controllers_of(const std::string& address, const SystemPaths& paths) {
  return children(folder_of(address, paths) / "nvme");
}

// A namespace and its partitions.
Names with_partitions(const std::string& disk, const SystemPaths& paths) {
  Names names{disk};
  for (const auto& name : children(block_folder(paths) / disk)) {
    if (fs::exists(block_folder(paths) / disk / name / "partition")) {
      names.push_back(name);
    }
  }
  return names;
}

// Device numbers ("259:0") of every node through which the controller can be reached, with the node's name.
std::map<std::string, std::string> device_numbers(const std::string& address, const SystemPaths& paths) {
  std::map<std::string, std::string> numbers;
  const auto add = [&](const fs::path& file, const std::string& name) {
    if (const std::string number = read_text(file); !number.empty()) {
      numbers[number] = name;
    }
  };
  for (const auto& controller : controllers_of(address, paths)) {
    add(fs::path(paths.sys) / "class/nvme" / controller / "dev", controller);
  }
  for (const auto& disk : namespaces_of(address, paths)) {
    for (const auto& name : with_partitions(disk, paths)) {
      add(block_folder(paths) / name / "dev", name);
    }
    const std::string generic = "ng" + disk.substr(4);  // nvme0n1 -> ng0n1
    add(fs::path(paths.sys) / "class/nvme-generic" / generic / "dev", generic);
  }
  return numbers;
}

// Processes that hold a node of the controller open, and nodes mounted in a mount namespace that is seen from here.
void find_users(const std::string& address, const SystemPaths& paths, Names& reasons) {
  const auto numbers = device_numbers(address, paths);
  if (numbers.empty()) {
    return;
  }
  std::istringstream mounts(read_text(paths.proc + "/self/mountinfo"));
  for (std::string line; std::getline(mounts, line);) {
    std::istringstream fields(line);
    std::string id, parent, number, root, where;
    fields >> id >> parent >> number >> root >> where;
    if (const auto found = numbers.find(number); found != numbers.end()) {
      reasons.emplace_back(found->second).append(" is mounted at ").append(where);
    }
  }
  std::set<std::pair<std::string, std::string>> holders;
  for (const auto& process : children(paths.proc)) {
    if (process.find_first_not_of("0123456789") != std::string::npos || process == std::to_string(getpid())) {
      continue;
    }
    const fs::path folder = fs::path(paths.proc) / process;
    for (const auto& number : children(folder / "fd")) {
      struct stat facts{};
      const fs::path file = folder / "fd" / number;
      if (stat(file.c_str(), &facts) != 0 || (!S_ISBLK(facts.st_mode) && !S_ISCHR(facts.st_mode))) {
        continue;
      }
      const auto found =
          numbers.find(std::to_string(major(facts.st_rdev)) + ":" + std::to_string(minor(facts.st_rdev)));
      if (found != numbers.end()) {
        holders.emplace(process, found->second);
      }
    }
  }
  for (const auto& [process, name] : holders) {
    reasons.emplace_back(name)
        .append(" is held open by process ")
        .append(process)
        .append(" (")
        .append(read_text(fs::path(paths.proc) / process / "comm"))
        .append(")");
  }
}

void find_kernel_users(const std::string& disk, const SystemPaths& paths, Names& reasons) {
  std::set<std::string> nodes;
  for (const auto& name : with_partitions(disk, paths)) {
    nodes.insert(fs::path(paths.dev) / name);
    for (const auto& holder : children(block_folder(paths) / name / "holders")) {
      reasons.emplace_back(name).append(" is part of ").append(holder).append(" (device mapper, LVM or RAID)");
    }
  }
  std::istringstream swaps(read_text(paths.proc + "/swaps"));
  for (std::string line; std::getline(swaps, line);) {
    if (const std::string node = line.substr(0, line.find(' ')); nodes.contains(node)) {
      reasons.push_back(node + " is swap");
    }
  }
  for (const auto& name : children(block_folder(paths))) {
    if (const std::string file = read_text(block_folder(paths) / name / "loop/backing_file"); nodes.contains(file)) {
      reasons.emplace_back(file).append(" backs ").append(name);
    }
  }
}

// Claims a namespace and its partitions, as mounting them would; EBUSY means that somebody has, in whatever mount
// namespace. Nothing else can claim them while the files stay open.
std::vector<Fd> claim(const Names& disks, const SystemPaths& paths, Names& reasons) {
  std::vector<Fd> claims;
  for (const auto& disk : disks) {
    const fs::path node = fs::path(paths.dev) / disk;
    Fd fd(open(node.c_str(), O_RDWR | O_EXCL | O_CLOEXEC));
    if (fd.get() < 0) {
      const int error = errno;
      reasons.emplace_back(node).append(error == EBUSY ? " is claimed: mounted somewhere, or part of something"
                                                       : " can't be claimed: ");
      if (error != EBUSY) {
        reasons.back().append(std::strerror(error));
      }
    }
    claims.push_back(std::move(fd));
  }
  return claims;
}

void find_group_trouble(const std::string& address, const SystemPaths& paths, Names& reasons) {
  const fs::path group = folder_of(address, paths) / "iommu_group";
  if (!fs::exists(group)) {
    reasons.push_back(
        "it has no IOMMU group: switch the IOMMU on (intel_iommu=on, amd_iommu=on), or use "
        "uio_pci_generic");
    return;
  }
  for (const auto& other : children(group / "devices")) {
    const std::string driver = bound_driver(other, paths);
    if (other != address && !driver.empty() && driver != driver_name(UserDriver::Vfio) &&
        !read_text(folder_of(other, paths) / "class").starts_with(kBridgeClass)) {
      reasons.emplace_back("its IOMMU group also holds ")
          .append(other)
          .append(", bound to ")
          .append(driver)
          .append(": both must go to vfio-pci, or the drive into another slot");
    }
  }
}

// The lock that whoever drives the function holds (PciDevice); not taken if somebody does.
Fd lock_function(const std::string& address, const SystemPaths& paths, bool& taken) {
  const fs::path config = folder_of(address, paths) / "config";
  Fd fd(open(config.c_str(), O_RDWR | O_CLOEXEC));
  if (fd.get() < 0) {
    fail_errno("opening " + config.string(), errno, "run it as root");
  }
  taken = flock(fd.get(), LOCK_EX | LOCK_NB) == 0;
  return fd;
}
constexpr const char* kInUse = "it is in use by another process: stop that first";

std::string joined(const Names& parts) {
  std::string text;
  for (const auto& part : parts) {
    text.append(text.empty() ? "" : "; ").append(part);
  }
  return text;
}

// Binds to whatever driver `override_with` allows ("\n": any). Returns the driver that took it.
std::string rebind(const std::string& address, const std::string& override_with, const SystemPaths& paths) {
  const fs::path folder = folder_of(address, paths);
  if (!bound_driver(address, paths).empty()) {
    write_text(folder / "driver/unbind", address);
  }
  write_text(folder / "driver_override", override_with);
  (void)try_write_text(paths.sys + "/bus/pci/drivers_probe", address);  // fails where no driver wants it
  return bound_driver(address, paths);
}

}  // namespace

std::string bound_driver(const std::string& address, const SystemPaths& paths) {
  return link_name(folder_of(address, paths) / "driver");
}

std::vector<std::string> namespaces_of(const std::string& address, const SystemPaths& paths) {
  std::set<std::string> disks;
  const auto add = [&](const fs::path& folder) {
    for (const auto& name : children(folder)) {
      if (name.starts_with("nvme") && fs::exists(block_folder(paths) / name)) {
        disks.insert(name);
      }
    }
  };
  for (const auto& controller : controllers_of(address, paths)) {
    add(folder_of(address, paths) / "nvme" / controller);
    // With several paths to a drive the block device belongs to its subsystem.
    for (const auto& subsystem : children(fs::path(paths.sys) / "class/nvme-subsystem")) {
      const fs::path folder = fs::path(paths.sys) / "class/nvme-subsystem" / subsystem;
      if (fs::exists(folder / controller)) {
        add(folder);
      }
    }
  }
  return {disks.begin(), disks.end()};
}

std::vector<std::string> reasons_against(const std::string& address, UserDriver driver, const SystemPaths& paths) {
  const fs::path folder = folder_of(address, paths);
  if (!fs::exists(folder)) {
    return {"there is no such PCI function (addresses look like 0000:04:00.0; lspci -D lists them)"};
  }
  if (const std::string kind = read_text(folder / "class"); !kind.starts_with(kNvmeClass)) {
    return {"it isn't an NVMe controller (PCI class " + kind + ")"};
  }
  Names reasons;
  bool taken = false;
  if (lock_function(address, paths, taken); !taken) {
    reasons.emplace_back(kInUse);
  }
  find_users(address, paths, reasons);
  const Names disks = namespaces_of(address, paths);
  for (const auto& disk : disks) {
    find_kernel_users(disk, paths, reasons);
  }
  if (reasons.empty()) {
    claim(disks, paths, reasons);
  }
  if (driver == UserDriver::Vfio) {
    find_group_trouble(address, paths, reasons);
  } else if (const std::string type = read_text(folder / "iommu_group/type"); !type.empty() && type != "identity") {
    reasons.push_back("it is behind an IOMMU that translates: use vfio-pci");
  }
  if (!fs::exists(fs::path(paths.sys) / "bus/pci/drivers" / driver_name(driver))) {
    reasons.push_back(std::string("the driver isn't loaded: modprobe ") + driver_name(driver));
  }
  return reasons;
}

void bind(const std::string& address, UserDriver driver, const SystemPaths& paths) {
  const std::string wanted = driver_name(driver);
  if (bound_driver(address, paths) == wanted) {
    return;
  }
  Names reasons = reasons_against(address, driver, paths);
  std::vector<Fd> claims;
  Fd lock;
  if (reasons.empty()) {
    bool taken = false;
    lock = lock_function(address, paths, taken);
    if (!taken) {
      reasons.emplace_back(kInUse);
    }
    claims = claim(namespaces_of(address, paths), paths, reasons);
  }
  if (!reasons.empty()) {
    fail(address + " isn't given to " + wanted + ": " + joined(reasons));
  }
  const std::string got = rebind(address, wanted, paths);
  if (got != wanted) {
    claims.clear();
    const std::string back = rebind(address, "\n", paths);
    fail(address + ": " + wanted + " didn't take it (the kernel log may say why); it is bound to " +
         (back.empty() ? "no driver" : back) + " again");
  }
}

void release(const std::string& address, const SystemPaths& paths) {
  const std::string driver = bound_driver(address, paths);
  if (driver != driver_name(UserDriver::Uio) && driver != driver_name(UserDriver::Vfio)) {
    fail(address + " is bound to " + (driver.empty() ? "no driver" : driver) + ", it wasn't given to the tier");
  }
  bool taken = false;
  const Fd config = lock_function(address, paths, taken);
  if (!taken) {
    fail(address + " isn't released: " + kInUse);
  }
  uint16_t command = 0;
  constexpr off_t kCommandRegister = 4;
  constexpr uint16_t kBusMaster = 1U << 2;
  if (pread(config.get(), &command, sizeof(command), kCommandRegister) == sizeof(command)) {
    command = static_cast<uint16_t>(command & ~kBusMaster);
    (void)!pwrite(config.get(), &command, sizeof(command), kCommandRegister);
  }
  const std::string got = rebind(address, "\n", paths);
  if (got.empty()) {
    fail(address + ": no driver of the kernel took it back; load one (modprobe nvme), then: echo " + address +
         " > /sys/bus/pci/drivers_probe");
  }
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  const auto there = [&] {
    const Names disks = namespaces_of(address, paths);
    return !disks.empty() && std::all_of(disks.begin(), disks.end(),
                                         [&](const auto& disk) { return fs::exists(fs::path(paths.dev) / disk); });
  };
  while (!there() && std::chrono::steady_clock::now() < deadline) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  if (!there()) {
    fail(address + " is bound to " + got + " again, but no namespace has appeared in " +
         std::to_string(kPatience.count()) + " s: look at the kernel log");
  }
}

}  // namespace tutti::nvme
