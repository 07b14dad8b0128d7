// Gives an NVMe drive to the tier's own driver, and back to the kernel:
//
//   nvme_drive show ADDRESS            its driver, its namespaces, what is in the way
//   nvme_drive bind vfio|uio ADDRESS   refused, with reasons, while anything uses the drive
//   nvme_drive release ADDRESS         back to the kernel's driver
//
// ADDRESS as lspci -D prints it: 0000:04:00.0. Exit status 1 when something was refused or failed.
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include "tutti/nvme/binding.h"

namespace nvme = tutti::nvme;

namespace {

int show(const std::string& address) {
  const std::string driver = nvme::bound_driver(address);
  std::printf("%s: bound to %s\n", address.c_str(), driver.empty() ? "no driver" : driver.c_str());
  for (const auto& disk : nvme::namespaces_of(address)) {
    std::printf("namespace: /dev/%s\n", disk.c_str());
  }
  for (const auto wanted : {nvme::UserDriver::Vfio, nvme::UserDriver::Uio}) {
    if (driver == nvme::driver_name(wanted)) {
      continue;
    }
    const auto reasons = nvme::reasons_against(address, wanted);
    std::printf("%s: %s\n", nvme::driver_name(wanted), reasons.empty() ? "possible" : "refused");
    for (const auto& reason : reasons) {
      std::printf("  %s\n", reason.c_str());
    }
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> words(argv + 1, argv + argc);
  try {
    if (words.size() == 2 && words[0] == "show") {
      return show(words[1]);
    }
    if (words.size() == 3 && words[0] == "bind" && (words[1] == "vfio" || words[1] == "uio")) {
      nvme::bind(words[2], words[1] == "vfio" ? nvme::UserDriver::Vfio : nvme::UserDriver::Uio);
      return show(words[2]);
    }
    if (words.size() == 2 && words[0] == "release") {
      nvme::release(words[1]);
      return show(words[1]);
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "nvme_drive: %s\n", error.what());
    return 1;
  }
  std::fprintf(stderr, "nvme_drive show ADDRESS | bind vfio|uio ADDRESS | release ADDRESS\n");
  return 2;
}
