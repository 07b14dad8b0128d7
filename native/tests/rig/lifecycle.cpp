// Who owns a drive and when its DMA ends: binding, a second owner, time-outs, reset and kill with commands in flight.
//
// Commands stay in flight because drive `slow` takes kSlowPerSecond of them; what it hasn't done within kSettled of
// the last one it never does.
#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/swap.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <csignal>
#include <cstring>
#include <thread>

#include "rig.h"

namespace rig {
namespace {

constexpr uint64_t kCommands = 15;
constexpr uint64_t kEach = 64 * kKiB;
constexpr auto kSettled = std::chrono::milliseconds(1000 * (kCommands + 3) / kSlowPerSecond);

nvme::Command slow_read(const nvme::P2pRange& range, uint64_t i) {
  return {nvme::kOpRead, i * kEach / kBlock, kEach / kBlock, &range, range.base + i * kEach};
}

void issue_slow_reads(nvme::QueueIssuer& issuer, const nvme::P2pRange& range) {
  for (uint64_t i = 0; i < kCommands; ++i) {
    CHECK(issuer.push(slow_read(range, i), i) == Status::Ok);
  }
  issuer.submit();
}

void reads_right(Session& session, const nvme::DmaMemory& memory) {
  const nvme::MemoryTable table(session.space, memory.region(), kEach);
  nvme::QueueIssuer issuer(session.controller->create_queue_pair(16));
  std::memset(memory.at(), 0, 2 * kEach);
  for (uint64_t i = 0; i < 2; ++i) {
    run_one(issuer, slow_read(table.range(), i));
  }
  CHECK(matches(memory.at(), 2 * kEach, salt_of("rig-nvme-slow"), 0));
}

// After stop() returns, memory is the process's again, whatever was in flight.
void reset_in_flight(const Context& context) {
  Session session = open_drive(context, "slow");
  auto memory = session.space->allocate(2 * kMiB, nvme::PageKind::Huge2M);
  const nvme::MemoryTable table(session.space, memory.region(), kEach);
  {
    nvme::QueueIssuer issuer(session.controller->create_queue_pair(16));
    issue_slow_reads(issuer, table.range());
    std::array<nvme::Completed, 16> done{};
    issuer.poll(done.data(), 16);
    CHECK(issuer.in_flight() >= 3);
  }
  session.controller->stop();
  CHECK(session.controller->health() == nvme::Health::Stopped);
  std::memset(memory.at(), 0xEE, memory.bytes());
  std::this_thread::sleep_for(kSettled);
  CHECK(all_equal(memory.at(), memory.bytes(), 0xEE));
  session.controller->start();
  reads_right(session, memory);
}

// A deadline that passes: statuses say so, the queue takes no more, and the drive goes on writing into its memory,
// which is why that memory stays. Deleting the pair ends that, without a reset.
void timeout_quarantines(const Context& context) {
  Session session = open_drive(context, "slow");
  const auto memory = session.space->allocate(2 * kMiB, nvme::PageKind::Huge2M);
  const nvme::MemoryTable table(session.space, memory.region(), kEach);
  std::vector<nvme::Command> commands;
  for (uint64_t i = 0; i < kCommands; ++i) {
    commands.push_back(slow_read(table.range(), i));
  }
  std::vector<nvme::CommandResult> results(kCommands);
  for (const bool deleted : {false, true}) {
    nvme::QueueIssuer issuer(session.controller->create_queue_pair(16));
    CHECK(issuer.run(commands.data(), results.data(), kCommands, within(100)) == Status::Timeout);
    CHECK(issuer.quarantined() && results[kCommands - 1].status == Status::Timeout);
    CHECK(issuer.push(commands[0], 0) == Status::BadState);
    if (deleted) {
      session.controller->delete_queue_pair(issuer.pair().id);
    }
    std::memset(memory.at(), 0xEE, memory.bytes());
    std::this_thread::sleep_for(kSettled);
    uint64_t late = 0;
    for (uint64_t i = 0; i < kCommands; ++i) {
      late += all_equal(memory.at() + i * kEach, kEach, 0xEE) ? 0 : 1;
    }
    CHECK(deleted ? late == 0 : late >= 3);
  }
  reads_right(session, memory);
}

uint16_t command_register(const std::string& address) {
  const int fd = open(("/sys/bus/pci/devices/" + address + "/config").c_str(), O_RDONLY | O_CLOEXEC);
  uint16_t value = 0;
  CHECK(pread(fd, &value, sizeof(value), 4) == sizeof(value));
  close(fd);
  return value;
}
constexpr uint16_t kBusMaster = 4;

// kill -9 with reads in flight into memory that outlives the process. The kernel switches the drive's DMA off while it
// closes the files; vfio-pci resets the function as well. The next process takes the drive over, and after that at the
// latest nothing arrives any more.
void killed_in_flight(const Context& context) {
  void* const shared = mmap(nullptr, 2 * kMiB, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_HUGETLB, -1, 0);
  CHECK(shared != MAP_FAILED);
  auto* const bytes = static_cast<uint8_t*>(shared);
  std::memset(bytes, 0xEE, 2 * kMiB);
  const Drive& drive = context.drive("slow");
  std::array<int, 2> ready{};
  CHECK(pipe2(ready.data(), O_CLOEXEC) == 0);
  const pid_t child = fork();
  if (child == 0) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    Session session = open_drive(context, "slow");
    const auto memory = session.space->map(bytes, 2 * kMiB);
    const nvme::MemoryTable table(session.space, memory.region(), 4096);
    nvme::QueueIssuer issuer(session.controller->create_queue_pair(16));
    issue_slow_reads(issuer, table.range());
    CHECK(write(ready[1], "x", 1) == 1);
    while (true) {
      pause();
    }
  }
  close(ready[1]);
  char letter = 0;
  CHECK(read(ready[0], &letter, 1) == 1);
  close(ready[0]);
  CHECK((command_register(drive.address) & kBusMaster) != 0);
  CHECK(contains(message_of([&] { open_drive(context, "slow"); }), "in use by another process"));
  CHECK((command_register(drive.address) & kBusMaster) != 0);  // the attempt has not cut the owner off
  uint64_t to_come = 0;
  for (uint64_t i = 0; i < kCommands; ++i) {
    to_come += all_equal(bytes + i * kEach, kEach, 0xEE) ? 1 : 0;
  }
  CHECK(to_come >= 3);
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);
  CHECK((command_register(drive.address) & kBusMaster) == 0);
  std::memset(bytes, 0xCC, 2 * kMiB);
  Session session;
  if (context.driver == nvme::UserDriver::Vfio) {
    std::this_thread::sleep_for(kSettled);
    CHECK(all_equal(bytes, 2 * kMiB, 0xCC));
    session = open_drive(context, "slow");
  } else {
    // The emulated drive still ends reads whose memory it had looked up before its DMA was switched off, up to the
    // reset; what switching off does is case dma_switched_off.
    session = open_drive(context, "slow");
    std::memset(bytes, 0xCC, 2 * kMiB);
    std::this_thread::sleep_for(kSettled);
  }
  CHECK(all_equal(bytes, 2 * kMiB, 0xCC));
  const auto memory = session.space->allocate(2 * kMiB, nvme::PageKind::Huge2M);
  reads_right(session, memory);
  munmap(shared, 2 * kMiB);
}

// One owner at a time: a second one is refused, and neither that nor an attempt to release the drive disturbs the
// first.
void one_owner(const Context& context) {
  Session session = open_drive(context, "0");
  const auto memory = session.space->allocate(2 * kMiB, nvme::PageKind::Huge2M);
  const nvme::MemoryTable table(session.space, memory.region(), kEach);
  nvme::QueueIssuer issuer(session.controller->create_queue_pair(16));
  const Drive& drive = context.drive("0");
  const pid_t child = fork();
  if (child == 0) {
    bool ok = contains(message_of([&] { open_drive(context, "0"); }), "in use by another process");
    ok = contains(message_of([&] { nvme::release(drive.address); }), "in use by another process") && ok;
    const auto other = context.driver == nvme::UserDriver::Uio ? nvme::UserDriver::Vfio : nvme::UserDriver::Uio;
    ok = contains(message_of([&] { nvme::bind(drive.address, other); }), "in use by another process") && ok;
    _exit(ok ? 0 : 1);
  }
  int status = -1;
  waitpid(child, &status, 0);
  CHECK(status == 0);
  run_one(issuer, {nvme::kOpRead, 0, 8, &table.range(), table.range().base});
  CHECK(matches(memory.at(), 4096, salt_of("rig-nvme-0"), 0));
}

// Opening never turns a drive over silently, and mixes no address spaces.
void wrong_driver(const Context& context) {
  const auto other = context.driver == nvme::UserDriver::Uio ? nvme::DmaSpace::identity() : nvme::DmaSpace::physical();
  CHECK(contains(message_of([&] { nvme::PciDevice(context.drive("0").address, other); }), "addresses"));
  CHECK(contains(message_of([&] { nvme::user_driver(context.peer); }), "is bound to no driver"));
  CHECK(contains(message_of([&] { nvme::user_driver("0000:77:00.0"); }), "no such PCI function"));
}

void orderly_close(const Context& context) {
  const Drive& drive = context.drive("1");
  {
    const Session session = open_drive(context, "1");
    CHECK((command_register(drive.address) & kBusMaster) != 0);
  }
  CHECK((command_register(drive.address) & kBusMaster) == 0);
}

// With its DMA switched off, a drive can't even fetch a command; after a reset it works again.
void dma_switched_off(const Context& context) {
  Session session = open_drive(context, "0");
  const auto memory = session.space->allocate(2 * kMiB, nvme::PageKind::Huge2M);
  const nvme::MemoryTable table(session.space, memory.region(), kEach);
  nvme::QueueIssuer issuer(session.controller->create_queue_pair(16));
  std::memset(memory.at(), 0xEE, memory.bytes());
  session.device->set_bus_master(false);
  const nvme::Command read{nvme::kOpRead, 0, 8, &table.range(), table.range().base};
  nvme::CommandResult result;
  CHECK(issuer.run(&read, &result, 1, within(300)) == Status::Timeout);
  CHECK(all_equal(memory.at(), memory.bytes(), 0xEE));
  session.controller->stop();
  session.controller->start();
  nvme::QueueIssuer again(session.controller->create_queue_pair(16));
  run_one(again, read);
  CHECK(matches(memory.at(), 4096, salt_of("rig-nvme-0"), 0));
}

void must_run(std::vector<const char*> words) {
  const pid_t child = fork();
  if (child == 0) {
    const int quiet = open("/dev/null", O_WRONLY | O_CLOEXEC);
    dup2(quiet, 1);
    words.push_back(nullptr);
    execvp(words[0], const_cast<char* const*>(words.data()));
    _exit(127);
  }
  int status = -1;
  waitpid(child, &status, 0);
  CHECK(status == 0);
}

}  // namespace

void binding_refusals(const Context& context) {
  const Drive& drive = context.drive("0");
  const std::string node = "/dev/" + drive.block;
  const auto refusal = [&](const std::string& address) {
    return message_of([&] { nvme::bind(address, context.driver); });
  };
  CHECK(contains(refusal(context.peer), "it isn't an NVMe controller"));
  CHECK(contains(refusal("0000:77:00.0"), "no such PCI function"));
  CHECK(contains(message_of([&] { nvme::release(drive.address); }), "wasn't given to the tier"));
  CHECK(contains(message_of([&] { nvme::user_driver(drive.address); }), "is bound to nvme"));

  // Held open by another process, as a block device or as a character device.
  for (const std::string& held : {node, std::string("/dev/") + drive.block.substr(0, drive.block.find('n', 2))}) {
    std::array<int, 2> ready{};
    CHECK(pipe2(ready.data(), O_CLOEXEC) == 0);
    const pid_t child = fork();
    if (child == 0) {
      const int fd = open(held.c_str(), O_RDONLY | O_CLOEXEC);
      CHECK(fd >= 0 && write(ready[1], "x", 1) == 1);
      while (true) {
        pause();
      }
    }
    char letter = 0;
    CHECK(read(ready[0], &letter, 1) == 1);
    CHECK(contains(refusal(drive.address), "is held open by process " + std::to_string(child)));
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
    close(ready[0]);
    close(ready[1]);
  }

  must_run({"mkswap", node.c_str()});
  CHECK(swapon(node.c_str(), 0) == 0);
  CHECK(contains(refusal(drive.address), node + " is swap"));
  CHECK(swapoff(node.c_str()) == 0);

  must_run({"mkfs.ext2", "-q", node.c_str()});
  CHECK(mkdir("/tmp/mounted", 0700) == 0);
  CHECK(mount(node.c_str(), "/tmp/mounted", "ext2", 0, nullptr) == 0);
  CHECK(contains(refusal(drive.address), drive.block + " is mounted at /tmp/mounted"));
  CHECK(umount("/tmp/mounted") == 0);

  // Mounted where this process can't see it.
  std::array<int, 2> ready{};
  CHECK(pipe2(ready.data(), O_CLOEXEC) == 0);
  const pid_t child = fork();
  if (child == 0) {
    CHECK(unshare(CLONE_NEWNS) == 0);
    CHECK(mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0);
    CHECK(mount(node.c_str(), "/tmp/mounted", "ext2", 0, nullptr) == 0);
    CHECK(write(ready[1], "x", 1) == 1);
    while (true) {
      pause();
    }
  }
  char letter = 0;
  CHECK(read(ready[0], &letter, 1) == 1);
  CHECK(contains(refusal(drive.address), node + " is claimed"));
  kill(child, SIGKILL);
  waitpid(child, nullptr, 0);

  if (context.driver == nvme::UserDriver::Uio) {
    CHECK(contains(message_of([&] { nvme::bind(drive.address, nvme::UserDriver::Vfio); }), "IOMMU group"));
  } else {
    CHECK(contains(message_of([&] { nvme::bind(drive.address, nvme::UserDriver::Uio); }),
                   "behind an IOMMU that translates"));
  }
  CHECK(nvme::bound_driver(drive.address) == "nvme");
}

std::vector<Case> lifecycle_cases() {
  return {
      {"one_owner", one_owner, {}},
      {"wrong_driver", wrong_driver, {}},
      {"orderly_close", orderly_close, {}},
      {"dma_switched_off", dma_switched_off, {}},
      {"reset_in_flight", reset_in_flight, {}},
      {"timeout_quarantines", timeout_quarantines, {}},
      {"killed_in_flight", killed_in_flight, {}},
  };
}

}  // namespace rig
