// The cases of the NVMe driver in the rig's guest:  nvme_rig uio|vfio [CASE...]
//
// Prints a line per case, "case NAME ok SECONDS" or "case NAME FAILED", and exits with 1 if one failed.
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "rig.h"

namespace rig {

namespace fs = std::filesystem;

const Drive& Context::drive(const std::string& name) const {
  for (const auto& drive : drives) {
    if (drive.serial == "rig-nvme-" + name) {
      return drive;
    }
  }
  std::fprintf(stderr, "no drive %s in this guest\n", name.c_str());
  std::exit(1);
}

Session open_drive(const Context& context, const std::string& name, nvme::ControllerOptions options,
                   std::shared_ptr<nvme::DmaSpace> space) {
  Session session;
  session.space = space ? std::move(space) : nvme::dma_space_for(context.driver);
  session.device = std::make_shared<nvme::PciDevice>(context.drive(name).address, session.space);
  session.controller = std::make_unique<nvme::UserController>(session.device, session.space, options);
  return session;
}

namespace {
uint64_t word(uint64_t salt, uint64_t place) {
  return (place / 8 + salt * 0x1'0000'0001ULL + 1) * 0x9E3779B97F4A7C15ULL;
}
}  // namespace

void fill(uint8_t* at, uint64_t bytes, uint64_t salt, uint64_t place) {
  for (uint64_t i = 0; i < bytes; i += 8) {
    const uint64_t value = word(salt, place + i);
    std::memcpy(at + i, &value, 8);
  }
}
bool matches(const uint8_t* at, uint64_t bytes, uint64_t salt, uint64_t place) {
  for (uint64_t i = 0; i < bytes; i += 8) {
    uint64_t value = 0;
    std::memcpy(&value, at + i, 8);
    if (value != word(salt, place + i)) {
      std::fprintf(stderr, "byte %llu of %llu differs\n", static_cast<unsigned long long>(i),
                   static_cast<unsigned long long>(bytes));
      return false;
    }
  }
  return true;
}
bool all_equal(const uint8_t* at, uint64_t bytes, uint8_t value) {
  return std::all_of(at, at + bytes, [value](uint8_t byte) { return byte == value; });
}
uint64_t salt_of(const std::string& drive) { return static_cast<uint64_t>(drive.back()); }

namespace {
// Calls `part(memory, place, bytes)` for pieces of the range, with the drive open for direct I/O.
void kernel_io(const Drive& drive, uint64_t place, uint64_t bytes, int flags,
               const std::function<void(int, uint8_t*, uint64_t, uint64_t)>& part) {
  const int fd = open(("/dev/" + drive.block).c_str(), flags | O_DIRECT | O_CLOEXEC);
  CHECK(fd >= 0);
  constexpr uint64_t kPiece = 512 * kKiB;
  auto* const memory = static_cast<uint8_t*>(std::aligned_alloc(4096, kPiece));
  for (uint64_t done = 0; done < bytes; done += kPiece) {
    part(fd, memory, place + done, std::min(kPiece, bytes - done));
  }
  std::free(memory);
  close(fd);
}
}  // namespace

void kernel_write(const Drive& drive, uint64_t salt, uint64_t place, uint64_t bytes) {
  kernel_io(drive, place, bytes, O_WRONLY, [salt](int fd, uint8_t* at, uint64_t where, uint64_t length) {
    fill(at, length, salt, where);
    CHECK(pwrite(fd, at, length, static_cast<off_t>(where)) == static_cast<ssize_t>(length));
  });
}
void read_by_kernel(const Drive& drive, uint8_t* to, uint64_t place, uint64_t bytes) {
  kernel_io(drive, place, bytes, O_RDONLY, [to, place](int fd, uint8_t* at, uint64_t where, uint64_t length) {
    CHECK(pread(fd, at, length, static_cast<off_t>(where)) == static_cast<ssize_t>(length));
    std::memcpy(to + (where - place), at, length);
  });
}
void check_by_kernel(const Drive& drive, uint64_t salt, uint64_t place, uint64_t bytes) {
  kernel_io(drive, place, bytes, O_RDONLY, [salt](int fd, uint8_t* at, uint64_t where, uint64_t length) {
    CHECK(pread(fd, at, length, static_cast<off_t>(where)) == static_cast<ssize_t>(length));
    CHECK(matches(at, length, salt, where));
  });
}

void run_one(nvme::QueueIssuer& issuer, const nvme::Command& command) {
  nvme::CommandResult result;
  const Status status = issuer.run(&command, &result, 1, within(10000));
  if (status != Status::Ok) {
    std::fprintf(stderr, "status %d, NVMe status 0x%x\n", static_cast<int>(status), result.code);
  }
  CHECK(status == Status::Ok);
}

std::string message_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const std::exception& error) {
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

namespace {

std::string line_of(const fs::path& path) {
  std::ifstream file(path);
  std::string text;
  std::getline(file, text);
  text.erase(text.find_last_not_of(' ') + 1);
  return text;
}

Context discover(nvme::UserDriver driver) {
  Context context;
  context.driver = driver;
  for (const auto& entry : fs::directory_iterator("/sys/class/nvme")) {
    Drive drive;
    drive.serial = line_of(entry.path() / "serial");
    drive.model = line_of(entry.path() / "model");
    drive.address = line_of(entry.path() / "address");
    CHECK(drive.serial.starts_with("rig-nvme-"));
    const auto disks = nvme::namespaces_of(drive.address);
    CHECK(disks.size() == 1);
    drive.block = disks[0];
    const fs::path block = "/sys/class/block/" + drive.block;
    drive.bytes = std::stoull(line_of(block / "size")) * 512;
    drive.block_bytes = std::stoull(line_of(block / "queue/logical_block_size"));
    drive.largest_transfer = std::stoull(line_of(block / "queue/max_hw_sectors_kb")) * kKiB;
    context.drives.push_back(drive);
  }
  for (const auto& entry : fs::directory_iterator("/sys/bus/pci/devices")) {
    if (line_of(entry.path() / "vendor") == "0x1af4" && line_of(entry.path() / "device") == "0x1110") {
      context.peer = entry.path().filename();
    }
  }
  CHECK(!context.peer.empty());
  return context;
}

bool in_process(const std::string& name, const std::function<void()>& body) {
  const auto start = Clock::now();
  const pid_t child = fork();
  if (child == 0) {
    alarm(30);
    try {
      body();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "%s: %s\n", name.c_str(), error.what());
      std::exit(1);
    }
    std::exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
  if (status == 0) {
    std::printf("case %s ok %.2f\n", name.c_str(), seconds);
  } else if (WIFSIGNALED(status)) {
    std::printf("case %s FAILED by signal %d\n", name.c_str(), WTERMSIG(status));
  } else {
    std::printf("case %s FAILED\n", name.c_str());
  }
  std::fflush(stdout);
  return status == 0;
}

}  // namespace
}  // namespace rig

int main(int argc, char** argv) {
  using namespace rig;
  const std::string mode = argc > 1 ? argv[1] : "";
  if (mode != "uio" && mode != "vfio") {
    std::fprintf(stderr, "nvme_rig uio|vfio [CASE...]\n");
    return 2;
  }
  const std::vector<std::string> wanted(argv + 2, argv + argc);
  const auto selected = [&](const std::string& name) {
    return wanted.empty() || std::find(wanted.begin(), wanted.end(), name) != wanted.end();
  };
  const Context context = discover(mode == "uio" ? nvme::UserDriver::Uio : nvme::UserDriver::Vfio);
  bool ok = true;
  if (selected("binding_refusals")) {
    ok = in_process("binding_refusals", [&] { binding_refusals(context); }) && ok;
  }
  ok = in_process("bind",
                  [&] {
                    for (const auto& drive : context.drives) {
                      const bool small = drive.serial.ends_with("slow") || drive.serial.ends_with("bad");
                      kernel_write(drive, salt_of(drive.serial), 0, small ? 2 * kMiB : kPatternBytes);
                      nvme::bind(drive.address, context.driver);
                      CHECK(nvme::bound_driver(drive.address) == nvme::driver_name(context.driver));
                      CHECK(nvme::namespaces_of(drive.address).empty());
                    }
                  }) &&
       ok;
  std::vector<Case> cases;
  for (const auto& part : {transfer_cases(), fault_cases(), lifecycle_cases(), ring_cases(), executor_cases()}) {
    cases.insert(cases.end(), part.begin(), part.end());
  }
  std::erase_if(cases, [&](const Case& found) {
    return !selected(found.name) || (found.iommu_only && context.driver != nvme::UserDriver::Vfio);
  });
  for (const auto& found : cases) {
    ok = in_process(found.name, [&] { found.run(context); }) && ok;
  }
  ok = in_process(
           "release",
           [&] {
             for (const auto& drive : context.drives) {
               nvme::release(drive.address);
               CHECK(nvme::bound_driver(drive.address) == "nvme");
             }
             CHECK(contains(message_of([&] { nvme::release(context.drives[0].address); }), "wasn't given to the tier"));
           }) &&
       ok;
  ok = in_process("seen_by_the_kernel",
                  [&] {
                    const Context again = discover(context.driver);  // names may have changed hands
                    for (const auto& drive : again.drives) {
                      if (!drive.serial.ends_with("bad")) {
                        check_by_kernel(drive, salt_of(drive.serial), 0,
                                        drive.serial.ends_with("slow") ? 2 * kMiB : kPatternBytes);
                      }
                    }
                    for (const auto& found : cases) {
                      if (found.verify) {
                        found.verify(again);
                      }
                    }
                  }) &&
       ok;
  return ok ? 0 : 1;
}
