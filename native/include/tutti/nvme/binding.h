// Gives an NVMe drive to this process's driver, and back to the kernel's. Never called by what opens a device: taking a
// drive from the kernel is a decision of its own.
//
// What is refused: a function that isn't an NVMe controller; one whose namespaces or their partitions are mounted (also
// in another mount namespace), are swap, belong to RAID, LVM or device mapper, back a loop device, or are held open by
// a process; one that a process drives; vfio-pci without an IOMMU group, or with a group that other drivers share. Not
// seen: a namespace that the kernel itself serves to others (nvmet, iSCSI, NBD servers inside the kernel). The drive's
// block devices are claimed exclusively while it changes hands, so that nothing can be mounted in between.
#pragma once

#include <string>
#include <vector>

#include "tutti/nvme/pci_device.h"

namespace tutti::nvme {

// Where the kernel's files are; tests put a tree of their own here.
struct SystemPaths {
  std::string sys = "/sys";
  std::string proc = "/proc";
  std::string dev = "/dev";
};

// The driver bound to a PCI function; empty if none is.
std::string bound_driver(const std::string& address, const SystemPaths& paths = {});

// The controller's block devices ("nvme0n1"), as long as the kernel's driver has it.
std::vector<std::string> namespaces_of(const std::string& address, const SystemPaths& paths = {});

// Why the function can't be given to `driver`, a sentence each; empty when it can.
std::vector<std::string> reasons_against(const std::string& address, UserDriver driver, const SystemPaths& paths = {});

// Takes the function from its driver and binds it to `driver`. Does nothing if that is bound already. Throws with the
// reasons, or with what failed; the function is given back to the kernel's driver then.
void bind(const std::string& address, UserDriver driver, const SystemPaths& paths = {});

// Gives the function back to the kernel's own driver and waits until its namespaces are there. Refused while a process
// has it open. DMA is switched off before.
void release(const std::string& address, const SystemPaths& paths = {});

}  // namespace tutti::nvme
