// What giving a drive away is refused for, on a tree of files made like /sys, /proc and /dev. The real thing is tested
// in the rig's guest.
#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "check.h"
#include "tutti/nvme/binding.h"

namespace fs = std::filesystem;
namespace nvme = tutti::nvme;

namespace {

constexpr const char* kAddress = "0000:04:00.0";

struct Tree {
  fs::path root = fs::temp_directory_path() / ("tutti-binding-" + std::to_string(getpid()));
  nvme::SystemPaths paths{root / "sys", root / "proc", root / "dev"};
  fs::path device = fs::path(paths.sys) / "bus/pci/devices" / kAddress;

  Tree() {
    fs::remove_all(root);
    for (const char* driver : {"nvme", "uio_pci_generic", "vfio-pci"}) {
      put("sys/bus/pci/drivers/" + std::string(driver) + "/unbind", "");
    }
    put("sys/bus/pci/drivers_probe", "");
    function(kAddress, "0x010802", "nvme");
    fs::create_directories(device / "nvme/nvme0/nvme0n1");
    put("sys/class/nvme/nvme0/dev", "241:0");
    put("sys/class/nvme-generic/ng0n1/dev", "242:0");
    put("sys/class/block/nvme0n1/dev", "259:0");
    put("sys/class/block/nvme0n1p2/dev", "259:2");
    put("sys/class/block/nvme0n1/nvme0n1p2/partition", "2");
    put("dev/nvme0n1", "");
    put("proc/self/mountinfo", "1 1 8:1 / / rw - ext4 /dev/sda1 rw\n");
    put("proc/swaps", "Filename Type Size Used Priority\n");
  }
  ~Tree() { fs::remove_all(root); }

  void put(const fs::path& path, const std::string& text) const {
    fs::create_directories((root / path).parent_path());
    std::ofstream(root / path) << text;
  }
  void function(const std::string& address, const std::string& kind, const std::string& driver) const {
    const fs::path at = fs::path("sys/bus/pci/devices") / address;
    put(at / "class", kind + "\n");
    put(at / "driver_override", "");
    put(at / "config", std::string(64, '\0'));
    if (!driver.empty()) {
      fs::create_directory_symlink("../../drivers/" + driver, root / at / "driver");
    }
  }
  void group(const std::string& type) const {
    const fs::path at = root / "sys/kernel/iommu_groups/7";
    fs::create_directories(at / "devices");
    put("sys/kernel/iommu_groups/7/type", type);
    fs::create_directory_symlink(device, at / "devices" / kAddress);
    fs::create_directory_symlink("../../../../kernel/iommu_groups/7", device / "iommu_group");
  }
  std::string reasons(nvme::UserDriver driver = nvme::UserDriver::Uio) const {
    std::string text;
    for (const auto& reason : nvme::reasons_against(kAddress, driver, paths)) {
      text += reason + "\n";
    }
    return text;
  }
};

template <typename Body>
std::string message_of(Body body) {
  try {
    body();
  } catch (const std::runtime_error& error) {
    return error.what();
  }
  return "";
}

bool contains(const std::string& text, const std::string& part) {
  if (text.find(part) == std::string::npos) {
    std::fprintf(stderr, "'%s' isn't in '%s'\n", part.c_str(), text.c_str());
    return false;
  }
  return true;
}

void free_drive() {
  const Tree tree;
  CHECK(tree.reasons().empty());
  CHECK(nvme::bound_driver(kAddress, tree.paths) == "nvme");
  CHECK(nvme::namespaces_of(kAddress, tree.paths) == std::vector<std::string>{"nvme0n1"});
}

void what_it_is() {
  const Tree tree;
  tree.put(std::string("sys/bus/pci/devices/") + kAddress + "/class", "0x020000");
  CHECK(contains(tree.reasons(), "isn't an NVMe controller (PCI class 0x020000)"));
  CHECK(
      contains(nvme::reasons_against("0000:05:00.0", nvme::UserDriver::Uio, tree.paths).at(0), "no such PCI function"));
  fs::remove_all(tree.root / "sys/bus/pci/drivers/uio_pci_generic");
  tree.put(std::string("sys/bus/pci/devices/") + kAddress + "/class", "0x010802");
  CHECK(contains(tree.reasons(), "modprobe uio_pci_generic"));
}

void users() {
  {
    const Tree tree;  // a partition of it is mounted
    tree.put("proc/self/mountinfo", "30 1 259:2 / /var/lib/a rw - xfs /dev/nvme0n1p2 rw\n");
    CHECK(contains(tree.reasons(), "nvme0n1p2 is mounted at /var/lib/a"));
    CHECK(contains(message_of([&] { nvme::bind(kAddress, nvme::UserDriver::Uio, tree.paths); }),
                   std::string(kAddress) + " isn't given to uio_pci_generic: nvme0n1p2 is mounted"));
    CHECK(nvme::bound_driver(kAddress, tree.paths) == "nvme");
  }
  {
    const Tree tree;
    tree.put("sys/class/block/nvme0n1p2/holders/dm-0/dev", "254:0");
    CHECK(contains(tree.reasons(), "nvme0n1p2 is part of dm-0"));
  }
  {
    const Tree tree;
    tree.put("proc/swaps", "Filename Type Size Used Priority\n" + tree.paths.dev + "/nvme0n1p2 partition 1 0 -2\n");
    CHECK(contains(tree.reasons(), "/nvme0n1p2 is swap"));
  }
  {
    const Tree tree;
    tree.put("sys/class/block/loop3/loop/backing_file", tree.paths.dev + "/nvme0n1\n");
    CHECK(contains(tree.reasons(), "/nvme0n1 backs loop3"));
  }
  for (const char* node : {"sys/class/block/nvme0n1/dev", "sys/class/block/nvme0n1p2/dev", "sys/class/nvme/nvme0/dev",
                           "sys/class/nvme-generic/ng0n1/dev"}) {
    const Tree tree;  // /dev/null stands for the device node
    tree.put(node, "1:3");
    tree.put("proc/4242/comm", "dd\n");
    fs::create_directories(tree.root / "proc/4242/fd");
    fs::create_symlink("/dev/null", tree.root / "proc/4242/fd/3");
    CHECK(contains(tree.reasons(), "is held open by process 4242 (dd)"));
  }
  {
    const Tree tree;
    fs::remove(tree.root / "dev/nvme0n1");
    CHECK(contains(tree.reasons(), "/nvme0n1 can't be claimed"));
  }
}

void driven_by_a_process() {
  const Tree tree;
  const int fd = open((tree.device / "config").c_str(), O_RDWR | O_CLOEXEC);
  CHECK(fd >= 0 && flock(fd, LOCK_EX) == 0);
  CHECK(contains(message_of([&] { nvme::bind(kAddress, nvme::UserDriver::Uio, tree.paths); }), "is in use by another"));
  fs::remove(tree.device / "driver");
  fs::create_directory_symlink("../../drivers/vfio-pci", tree.device / "driver");
  CHECK(contains(message_of([&] { nvme::bind(kAddress, nvme::UserDriver::Uio, tree.paths); }), "is in use by another"));
  CHECK(contains(message_of([&] { nvme::release(kAddress, tree.paths); }), "is in use by another"));
  close(fd);
}

void namespaces_with_several_paths() {
  const Tree tree;
  fs::remove_all(tree.device / "nvme/nvme0/nvme0n1");
  fs::create_directories(tree.device / "nvme/nvme0/nvme0c0n1");  // one path; the block device is the subsystem's
  fs::create_directories(tree.root / "sys/class/nvme-subsystem/nvme-subsys0/nvme0");
  fs::create_directories(tree.root / "sys/class/nvme-subsystem/nvme-subsys0/nvme0n1");
  fs::create_directories(tree.root / "sys/class/nvme-subsystem/nvme-subsys1/nvme1");
  fs::create_directories(tree.root / "sys/class/nvme-subsystem/nvme-subsys1/nvme1n1");
  tree.put("sys/class/block/nvme1n1/dev", "259:9");
  CHECK(nvme::namespaces_of(kAddress, tree.paths) == std::vector<std::string>{"nvme0n1"});
  tree.put("proc/self/mountinfo", "30 1 259:0 / /data rw - xfs /dev/nvme0n1 rw\n");
  CHECK(contains(tree.reasons(), "nvme0n1 is mounted at /data"));
}

void iommu() {
  {
    const Tree tree;
    CHECK(contains(tree.reasons(nvme::UserDriver::Vfio), "no IOMMU group"));
  }
  {
    const Tree tree;
    tree.group("DMA-FQ");
    CHECK(tree.reasons(nvme::UserDriver::Vfio).empty());
    CHECK(contains(tree.reasons(), "IOMMU that translates"));
  }
  {
    const Tree tree;
    tree.group("identity");
    CHECK(tree.reasons().empty());
    tree.function("0000:04:00.1", "0x020000", "e1000e");  // a network card in the same group
    tree.function("0000:00:1c.0", "0x060400", "pcieport");
    for (const char* other : {"0000:04:00.1", "0000:00:1c.0"}) {
      fs::create_directory_symlink(fs::path(tree.paths.sys) / "bus/pci/devices" / other,
                                   tree.root / "sys/kernel/iommu_groups/7/devices" / other);
    }
    const std::string reasons = tree.reasons(nvme::UserDriver::Vfio);
    CHECK(contains(reasons, "holds 0000:04:00.1, bound to e1000e") && reasons.find("1c.0") == std::string::npos);
  }
}

// Files don't bind anything: the driver stays, and everything is put back.
void a_driver_that_does_not_take_it() {
  const Tree tree;
  CHECK(contains(message_of([&] { nvme::bind(kAddress, nvme::UserDriver::Uio, tree.paths); }),
                 "uio_pci_generic didn't take it (the kernel log may say why); it is bound to nvme again"));
  std::ifstream file(tree.device / "driver_override");
  CHECK(file.get() == '\n');
  CHECK(contains(message_of([&] { nvme::release(kAddress, tree.paths); }), "wasn't given to the tier"));
}

}  // namespace

int main() {
  free_drive();
  what_it_is();
  users();
  driven_by_a_process();
  namespaces_with_several_paths();
  iommu();
  a_driver_that_does_not_take_it();
  return 0;
}
